"""The verifier of pipelines rejects planted wrong programs, wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.training.pipeline.program import COMPUTE, Flaw, Instruction, Op, ScheduleFlawed, Shape, StageProgram
from zbmd.training.pipeline.schedules import SCHEDULES, activations_max, programs_of
from zbmd.training.pipeline.verifier import verify

Programs = list[StageProgram]
PIPE = Shape(stages=4, chunks=1, microbatches=8)
CHUNKED = Shape(stages=2, chunks=2, microbatches=4)
ALONE = Shape(stages=1, chunks=2, microbatches=2)

OPS = {op.value: op for op in Op}


def word(text: str) -> Instruction:
    part = text.rstrip("0123456789")
    op = part.lstrip("0123456789")
    return Instruction(OPS[op], int(part[: -len(op)]), int(text[len(part) :]))


def edited(programs: Programs, stage: int, instructions: Sequence[Instruction]) -> None:
    programs[stage] = replace(programs[stage], instructions=tuple(instructions))


def dropped(programs: Programs, stage: int, gone: str) -> None:
    edited(programs, stage, [one for one in programs[stage].instructions if str(one) != gone])


def swapped(programs: Programs, stage: int, first: str, second: str) -> None:
    names = {first: word(second), second: word(first)}
    edited(programs, stage, [names.get(str(one), one) for one in programs[stage].instructions])


def moved(programs: Programs, stage: int, what: str, before: str) -> None:
    rest = [one for one in programs[stage].instructions if str(one) != what]
    at = list(map(str, rest)).index(before)
    edited(programs, stage, [*rest[:at], word(what), *rest[at:]])


def added(programs: Programs, stage: int, *words: str) -> None:
    edited(programs, stage, [*programs[stage].instructions, *map(word, words)])


def a_stage_is_missing(programs: Programs) -> None:
    del programs[3]


def another_shape(programs: Programs) -> None:
    programs[1] = replace(programs[1], shape=Shape(stages=4, chunks=1, microbatches=9))


def another_schedule(programs: Programs) -> None:
    programs[2] = replace(programs[2], schedule="gpipe")


def two_stages_in_each_others_place(programs: Programs) -> None:
    programs[1], programs[2] = programs[2], programs[1]


def a_part_of_another_stage(programs: Programs) -> None:
    added(programs, 1, "2F0")


def a_part_that_does_not_exist(programs: Programs) -> None:
    added(programs, 0, "4F0")


def a_microbatch_that_does_not_exist(programs: Programs) -> None:
    added(programs, 0, "0F8")


def a_forward_pass_twice(programs: Programs) -> None:
    added(programs, 0, "0F3")


def a_backward_pass_forgotten(programs: Programs) -> None:
    dropped(programs, 0, "0B7")


def a_whole_backward_pass_after_its_halves(programs: Programs) -> None:
    added(programs, 3, "3B7")


def a_weight_gradient_after_a_whole_backward_pass(programs: Programs) -> None:
    added(programs, 3, "3W0")


def a_gradient_before_its_forward_pass(programs: Programs) -> None:
    moved(programs, 3, "3B0", "3F0")


def a_weight_gradient_before_its_input_gradient(programs: Programs) -> None:
    moved(programs, 0, "0W0", "0I0")


def a_weight_gradient_forgotten(programs: Programs) -> None:
    dropped(programs, 2, "2W7")


def backward_passes_out_of_order(programs: Programs) -> None:
    swapped(programs, 3, "3B6", "3B7")
    swapped(programs, 3, "3F6", "3F7")
    swapped(programs, 3, "3RECV_F6", "3RECV_F7")


def weight_gradients_out_of_order(programs: Programs) -> None:
    swapped(programs, 3, "3W6", "3W7")


def sends_out_of_order(programs: Programs) -> None:
    dropped(programs, 0, "0SEND_F0")
    moved(programs, 0, "0SEND_F0", "0RECV_B0")


def an_input_never_received(programs: Programs) -> None:
    dropped(programs, 1, "1RECV_F2")


def a_gradient_received_too_late(programs: Programs) -> None:
    swapped(programs, 1, "1RECV_B2", "1B2")


def an_activation_sent_before_it_is_computed(programs: Programs) -> None:
    swapped(programs, 0, "0SEND_F0", "0F0")


def a_gradient_sent_before_it_is_computed(programs: Programs) -> None:
    swapped(programs, 1, "1SEND_B0", "1B0")


def the_last_part_sends_on(programs: Programs) -> None:
    added(programs, 3, "3SEND_F0")


def the_first_part_sends_back(programs: Programs) -> None:
    added(programs, 0, "0SEND_B0")


def the_first_part_receives(programs: Programs) -> None:
    edited(programs, 0, [word("0RECV_F0"), *programs[0].instructions])


def a_send_forgotten(programs: Programs) -> None:
    dropped(programs, 1, "1SEND_F7")


def all_forward_passes_first(programs: Programs) -> None:
    for stage, other in enumerate(programs_of("gpipe", PIPE)):
        edited(programs, stage, other.instructions)


def weight_gradients_at_the_end(programs: Programs) -> None:
    rest = [one for one in programs[3].instructions if one.op is not Op.WEIGHT_GRADIENT]
    edited(programs, 3, [*rest, *(word(f"3W{i}") for i in range(8))])


def a_stage_that_waits_before_it_sends(programs: Programs) -> None:
    moved(programs, 0, "0RECV_B0", "0SEND_F0")


def all_forward_passes_first_on_one_stage(programs: Programs) -> None:
    edited(programs, 0, programs_of("gpipe", PIPE)[0].instructions)


def chunks_in_the_wrong_order(programs: Programs) -> None:
    """Stage 0 wants chunk 1's first input before it has sent what that is made of."""
    wanted = [word("2RECV_F0"), word("2F0"), word("2SEND_F0")]
    edited(programs, 0, [*wanted, *(one for one in programs[0].instructions if one not in wanted)])


def no_handover_on_one_stage(programs: Programs) -> None:
    moved(programs, 0, "1F0", "0F0")


def no_handover_back_on_one_stage(programs: Programs) -> None:
    swapped(programs, 0, "1B0", "0B0")


PLANTS: list[tuple[str, Shape, Callable[[Programs], None], Flaw]] = [
    ("1f1b", PIPE, a_stage_is_missing, Flaw.MALFORMED),
    ("1f1b", PIPE, another_shape, Flaw.MALFORMED),
    ("1f1b", PIPE, another_schedule, Flaw.MALFORMED),
    ("1f1b", PIPE, two_stages_in_each_others_place, Flaw.MALFORMED),
    ("1f1b", PIPE, a_part_of_another_stage, Flaw.WRONG_STAGE),
    ("1f1b", PIPE, a_part_that_does_not_exist, Flaw.OUT_OF_RANGE),
    ("1f1b", PIPE, a_microbatch_that_does_not_exist, Flaw.OUT_OF_RANGE),
    ("1f1b", PIPE, a_forward_pass_twice, Flaw.REPEATED),
    ("1f1b", PIPE, a_backward_pass_forgotten, Flaw.MISSING),
    ("zb-h1", PIPE, a_whole_backward_pass_after_its_halves, Flaw.SPLIT),
    ("1f1b", PIPE, a_weight_gradient_after_a_whole_backward_pass, Flaw.SPLIT),
    ("1f1b", PIPE, a_gradient_before_its_forward_pass, Flaw.BEFORE_FORWARD),
    ("zb-h1", PIPE, a_weight_gradient_before_its_input_gradient, Flaw.BEFORE_INPUT_GRADIENT),
    ("zb-h1", PIPE, a_weight_gradient_forgotten, Flaw.MISSING),
    ("1f1b", PIPE, backward_passes_out_of_order, Flaw.MICROBATCH_ORDER),
    ("zb-h1", PIPE, weight_gradients_out_of_order, Flaw.MICROBATCH_ORDER),
    ("1f1b", PIPE, sends_out_of_order, Flaw.MICROBATCH_ORDER),
    ("1f1b", PIPE, an_input_never_received, Flaw.BEFORE_RECEIVED),
    ("1f1b", PIPE, a_gradient_received_too_late, Flaw.BEFORE_RECEIVED),
    ("1f1b", PIPE, an_activation_sent_before_it_is_computed, Flaw.BEFORE_COMPUTED),
    ("1f1b", PIPE, a_gradient_sent_before_it_is_computed, Flaw.BEFORE_COMPUTED),
    ("1f1b", PIPE, the_last_part_sends_on, Flaw.NO_TRANSFER),
    ("1f1b", PIPE, the_first_part_sends_back, Flaw.NO_TRANSFER),
    ("1f1b", PIPE, the_first_part_receives, Flaw.NO_TRANSFER),
    ("1f1b", PIPE, a_send_forgotten, Flaw.MISSING),
    ("1f1b", PIPE, all_forward_passes_first, Flaw.MEMORY),
    ("1f1b", PIPE, all_forward_passes_first_on_one_stage, Flaw.MEMORY),
    ("zb-h1", PIPE, weight_gradients_at_the_end, Flaw.MEMORY),
    ("1f1b", Shape(stages=2, chunks=1, microbatches=1), a_stage_that_waits_before_it_sends, Flaw.DEADLOCK),
    ("1f1b", CHUNKED, chunks_in_the_wrong_order, Flaw.DEADLOCK),
    ("gpipe", ALONE, no_handover_on_one_stage, Flaw.BEFORE_RECEIVED),
    ("gpipe", ALONE, no_handover_back_on_one_stage, Flaw.BEFORE_RECEIVED),
]


@pytest.mark.parametrize(
    ("name", "shape", "plant", "flaw"), PLANTS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_planted_wrong_program_is_rejected(
    name: str, shape: Shape, plant: Callable[[Programs], None], flaw: Flaw
) -> None:
    programs, most = list(programs_of(name, shape)), activations_max(name, shape)
    verify(programs, activations_max=most)
    plant(programs)
    with pytest.raises(ScheduleFlawed) as caught:
        verify(programs, activations_max=most)
    assert caught.value.flaw is flaw, caught.value


def test_a_deadlock_says_who_waits_for_what() -> None:
    programs = list(programs_of("1f1b", Shape(stages=2, chunks=1, microbatches=1)))
    a_stage_that_waits_before_it_sends(programs)
    with pytest.raises(
        ScheduleFlawed, match=r"stage 0 at 0RECV_B0 waits for the gradient.*stage 1 at 1RECV_F0"
    ):
        verify(programs, activations_max=(1, 1))


def test_slots_that_run_out_are_a_deadlock() -> None:
    """A stage that runs ahead of what its neighbour has room for, each waiting to be rid of something."""
    shape = Shape(stages=2, chunks=1, microbatches=12)
    first, last = programs_of("gpipe", shape)[0], programs_of("1f1b", shape)[1]
    with pytest.raises(ScheduleFlawed, match="slots of stage") as caught:
        verify([replace(first, schedule="1f1b"), last], activations_max=(12, 1))
    assert caught.value.flaw is Flaw.DEADLOCK


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    draw=st.data(),
)
def test_no_instruction_may_be_left_out_or_done_twice(
    name: str, stages: int, microbatches: int, draw: st.DataObject
) -> None:
    shape = Shape(stages=stages, chunks=1, microbatches=microbatches)
    programs, most = list(programs_of(name, shape)), activations_max(name, shape)
    stage = draw.draw(st.integers(0, stages - 1))
    instructions = list(programs[stage].instructions)
    index = draw.draw(st.integers(0, len(instructions) - 1))
    if draw.draw(st.booleans()):
        del instructions[index]
    else:
        twice = instructions[index]
        assert twice.op in COMPUTE or stages > 1
        instructions.insert(draw.draw(st.integers(index + 1, len(instructions))), twice)
    edited(programs, stage, instructions)
    with pytest.raises(ScheduleFlawed):
        verify(programs, activations_max=most)
