"""Pipeline schedules: as text, as the papers promise them, and in a model of time."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.training.pipeline.program import (
    MICROBATCHES_MAX,
    STAGES_MAX,
    Instruction,
    Op,
    ScheduleError,
    Shape,
    StageProgram,
    activations_peak,
    format_program,
    parse_program,
    parse_programs,
    slots_of,
)
from zbmd.training.pipeline.schedules import SCHEDULES, activations_max, program_of, programs_of
from zbmd.training.pipeline.simulate import Costs, Timeline, simulate
from zbmd.training.pipeline.verifier import verify
from zbmd.transport.errors import UserError


def shape(stages: int, microbatches: int, chunks: int = 1) -> Shape:
    return Shape(stages=stages, chunks=chunks, microbatches=microbatches)


def timeline(
    name: str,
    size: Shape,
    *,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
    transfer: float = 0.0,
) -> Timeline:
    costs = Costs.even(
        size.parts,
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        transfer=transfer,
    )
    return simulate(programs_of(name, size), costs)


SHAPES = st.builds(Shape, stages=st.integers(1, 9), chunks=st.integers(1, 4), microbatches=st.integers(1, 24))
ANY_SHAPE = st.builds(
    Shape,
    stages=st.integers(1, STAGES_MAX),
    chunks=st.integers(1, 8),
    microbatches=st.integers(1, MICROBATCHES_MAX // 8),
)
INSTRUCTIONS = st.builds(
    Instruction, st.sampled_from(Op), st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1)
)
PROGRAMS = st.builds(
    StageProgram,
    schedule=st.from_regex(r"[a-z0-9-]{1,32}", fullmatch=True),
    shape=ANY_SHAPE,
    stage=st.integers(0, 10**9 - 1),
    instructions=st.lists(INSTRUCTIONS).map(tuple),
)


@given(program=PROGRAMS)
def test_the_text_of_a_program_is_read_back(program: StageProgram) -> None:
    assert parse_program(format_program(program)) == program
    assert parse_program(format_program(program)).digest() == program.digest()


def test_programs_read_as_the_papers_draw_them() -> None:
    first, last = programs_of("1f1b", shape(2, 3))
    assert str(first) == (
        "pipeline 1f1b stages=2 stage=0 chunks=1 microbatches=3\n"
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2\n"
    )
    assert str(last).splitlines()[1].startswith("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1")
    assert parse_programs(f"{first}{last}") == (first, last)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1"),
        ("0F0", "line 1"),
        ("pipeline x stages=0 stage=0 chunks=1 microbatches=1", "stages is 0"),
        (f"pipeline x stages=1 stage=0 chunks=1 microbatches={MICROBATCHES_MAX + 1}", "microbatches"),
        ("pipeline x stages=1 stage=0 chunks=64 microbatches=65536", "instructions"),
        ("pipeline x stages=1 stage=0 chunks=1 microbatches=1\n0F0 0G0", "line 2: '0G0'"),
        ("pipeline x stages=1 stage=0 chunks=1 microbatches=1\n\n0F٣", "line 3"),
        ("pipeline x stages=1 stage=0 chunks=1 microbatches=1\n0F" + "1" * 5000, "line 2"),
    ],
)
def test_a_text_that_is_no_program_is_told_by_its_line(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        parse_program(text)


@settings(max_examples=150, deadline=None)
@given(size=SHAPES, name=st.sampled_from(sorted(SCHEDULES)))
def test_every_schedule_is_right_and_within_its_memory(size: Shape, name: str) -> None:
    if not SCHEDULES[name].chunked:
        size = shape(size.stages, size.microbatches)
    programs, most = programs_of(name, size), activations_max(name, size)
    verify(programs, activations_max=most)
    assert parse_programs("".join(map(format_program, programs))) == programs
    peaks = tuple(activations_peak(program) for program in programs)
    assert (
        peaks
        == simulate(
            programs, Costs.even(size.parts, forward=1, input_gradient=1, weight_gradient=1, transfer=0)
        ).activations
    )
    assert all(peak <= bound for peak, bound in zip(peaks, most, strict=True))


@settings(max_examples=60)
@given(size=SHAPES, name=st.sampled_from(sorted(SCHEDULES)))
def test_rings_for_many_micro_batches_have_room_for_few(size: Shape, name: str) -> None:
    """So a stage that has rings for the most that it may be given can turn to any fewer."""
    if not SCHEDULES[name].chunked:
        size = shape(size.stages, size.microbatches)
    more = shape(size.stages, size.microbatches + 1, size.chunks)
    for few, many in zip(programs_of(name, size), programs_of(name, more), strict=True):
        slots, room = slots_of(few), slots_of(many)
        assert slots.keys() == room.keys() and all(slots[ring] <= room[ring] for ring in slots)


def test_memory_is_what_the_papers_say() -> None:
    stages, microbatches = 4, 16
    assert activations_max("gpipe", shape(stages, microbatches)) == (16, 16, 16, 16)
    assert activations_max("1f1b", shape(stages, microbatches)) == (4, 3, 2, 1)
    assert activations_max("zb-h1", shape(stages, microbatches)) == (4, 4, 4, 4)
    # (p - r - 1) * 2 + (v - 1) * p forward passes of a chunk before the first backward pass, and one more.
    assert activations_max("1f1b", shape(stages, microbatches, 2)) == (11, 9, 7, 5)
    for name in SCHEDULES:
        size = shape(stages, microbatches)
        found = tuple(activations_peak(program) for program in programs_of(name, size))
        assert found == activations_max(name, size)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_bubbles_are_what_the_papers_say(stages: int, rounds: int) -> None:
    microbatches = rounds * stages
    fill = (stages - 1) / microbatches
    for name in ("gpipe", "1f1b"):
        for costs in ((1, 1, 1), (2, 3, 1), (1, 1, 5)):
            times = dict(zip(("forward", "input_gradient", "weight_gradient"), costs, strict=True))
            found = timeline(name, shape(stages, microbatches), **times).bubble
            assert math.isclose(found, fill, rel_tol=1e-9), (name, costs)
    for chunks in (2, 3):
        found = timeline("1f1b", shape(stages, microbatches, chunks)).bubble
        assert math.isclose(found, fill / chunks, rel_tol=1e-9), chunks
    # (p - 1) (F + I - W), of m (F + I + W): a third of 1F1B's where all three cost the same.
    assert math.isclose(timeline("zb-h1", shape(stages, microbatches)).bubble, fill / 3, rel_tol=1e-9)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (2, 32), (4, 16), (8, 32)])
def test_a_short_transfer_leaves_the_bubble_of_1f1b_near_theory(stages: int, microbatches: int) -> None:
    found = timeline("1f1b", shape(stages, microbatches), transfer=0.001).bubble
    assert abs(found / ((stages - 1) / microbatches) - 1) <= 0.1


def test_transfers_pass_while_a_stage_computes_and_one_behind_the_other() -> None:
    # Two stages, forward only counts: the second micro-batch's transfer hides behind the first's forward.
    found = timeline("gpipe", shape(2, 3), forward=2, input_gradient=0, weight_gradient=0, transfer=1)
    assert [span.start for span in found.spans[1][:3]] == [3, 5, 7]
    slow = timeline("gpipe", shape(2, 3), forward=1, input_gradient=0, weight_gradient=0, transfer=4)
    assert [span.start for span in slow.spans[1][:3]] == [5, 9, 13]


@given(size=SHAPES, costs=st.lists(st.floats(0, 10), min_size=4, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_simulated_step_loses_no_work(size: Shape, costs: list[float]) -> None:
    forward, input_gradient, weight_gradient, transfer = costs
    found = timeline(
        "1f1b",
        size,
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        transfer=transfer,
    )
    work = size.chunks * size.microbatches * (forward + input_gradient + weight_gradient)
    assert all(math.isclose(busy, work, abs_tol=1e-6) for busy in found.busy)
    assert found.makespan >= max(found.busy) - 1e-6
    assert all(
        before.end <= after.start + 1e-9
        for spans in found.spans
        for before, after in itertools.pairwise(spans)
    )


@pytest.mark.parametrize(
    ("name", "size", "stage", "said"),
    [
        ("2f2b", shape(2, 2), 0, "choose from gpipe, 1f1b, zb-h1"),
        ("zb-h1", shape(2, 2, 2), 0, "one chunk"),
        ("1f1b", shape(0, 2), 0, "stages is 0"),
        ("1f1b", shape(2, 0), 0, "microbatches is 0"),
        ("1f1b", shape(2, 2), 2, "stage 2 does not exist"),
    ],
)
def test_what_does_not_exist_is_told_in_words(name: str, size: Shape, stage: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        program_of(name, size, stage)
