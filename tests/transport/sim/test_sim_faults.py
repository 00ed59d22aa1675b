"""Faults as data: they print, parse, and are drawn from a seed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.sim import (
    ALL_FAULTS,
    Clog,
    Crash,
    CrashWithin,
    Cut,
    DiskFull,
    Effect,
    Fault,
    NetConditions,
    Note,
    Partition,
    Pause,
    Process,
    SetTimer,
    Simulation,
    Started,
    Stimulus,
    UnsupportedFault,
    World,
    draw_plan,
    format_plan,
    parse_fault,
    parse_faults,
    parse_plan,
)
from zbmd.transport.sim.faults import names_of, weaker

MS = 1_000_000
NAMES = ("rank0", "rank1", "node.a", "x-1")


@given(seed=st.integers(0, 2**32), count=st.integers(0, 40), span_ns=st.integers(1, 10**12))
def test_a_drawn_plan_prints_and_parses(seed: int, count: int, span_ns: int) -> None:
    plan = draw_plan(random.Random(seed), NAMES, span_ns, ALL_FAULTS, count)
    assert len(plan) == count
    assert parse_plan(format_plan(plan)) == plan
    assert plan == draw_plan(random.Random(seed), NAMES, span_ns, ALL_FAULTS, count)
    assert [fault.at_ns for fault in plan] == sorted(fault.at_ns for fault in plan)
    for fault in plan:
        assert 0 <= fault.at_ns < span_ns
        assert fault.for_ns > 0
        assert names_of(fault) <= set(NAMES)
        for simpler in weaker(fault):
            assert simpler != fault
            assert parse_fault(format_plan((simpler,))) == simpler


def test_every_kind_is_drawn_and_written_as_documented() -> None:
    plan = draw_plan(random.Random(1), NAMES, 10**9, ALL_FAULTS, 400)
    assert {type(fault) for fault in plan} == set(ALL_FAULTS)
    text = "crash:process=rank1,at=1500us,for=20ms;partition:groups=rank0+rank1/rank2,at=3ms,for=1ms"
    assert format_plan(parse_plan(text)) == text
    assert parse_plan(text) == (
        Crash(process="rank1", at_ns=1_500_000, for_ns=20 * MS),
        Partition(groups=(("rank0", "rank1"), ("rank2",)), at_ns=3 * MS, for_ns=MS),
    )


def test_who_is_alone_is_not_cut_off() -> None:
    plan = draw_plan(random.Random(1), ["a"], 10**9, (Crash, Partition, Cut, Clog), 20)
    assert {type(fault) for fault in plan} == {Crash}
    with pytest.raises(LocalProtocolError, match="cannot draw"):
        draw_plan(random.Random(1), ["a"], 10**9, (Cut,), 1)
    with pytest.raises(LocalProtocolError, match="cannot draw"):
        draw_plan(random.Random(1), [], 10**9, ALL_FAULTS, 1)


def test_a_crash_for_others_to_mend_has_no_end() -> None:
    plan = draw_plan(random.Random(1), ["a"], 10**9, (Crash,), 5, restart=False)
    assert {fault.for_ns for fault in plan} == {0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("boom:process=a,at=1ms,for=1ms", "no kind of fault"),
        ("crash", "write crash:process=…,at=…,for=…"),
        ("crash:process=a,at=1ms", "does not say for"),
        ("crash:process=a,at=1ms,for=1ms,for=1ms", "write crash:"),
        ("crash:process=a,at=1,for=1ms", "written like 1500us"),
        ("crash:process=a b,at=1ms,for=1ms", "no name of a process"),
        ("crash:process=a,at=-1ms,for=1ms", "not below 0"),
        ("slow:process=a,factor=x,at=1ms,for=1ms", "factor='x'"),
        ("disk-read-errors:process=a,probability=7,at=1ms,for=1ms", "out of range"),
        ("cut:source=a,target=,at=1ms,for=1ms", "no name of a process"),
        (";".join(["crash:process=a,at=1ms,for=1ms"] * 1025), "1024 are the bound"),
    ],
)
def test_what_is_no_plan_is_refused_in_words(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_plan(text)


@given(text=st.text(max_size=60))
def test_any_text_is_a_plan_or_a_user_error(text: str) -> None:
    try:
        plan = parse_plan(text)
    except UserError:
        return
    assert parse_plan(format_plan(plan)) == plan


def test_the_command_line_takes_a_number_or_a_plan() -> None:
    assert parse_faults("12") == 12
    assert parse_faults("pause:process=a,at=0ns,for=1s") == (Pause(process="a", at_ns=0, for_ns=10**9),)


def test_machines_refuse_what_cannot_strike_them() -> None:
    sim = Simulation[int](0)
    sim.add("a", lambda incarnation: pytest.fail("never started"), start=False)
    with pytest.raises(UnsupportedFault, match="disk-full"):
        sim.apply(DiskFull(process="a", at_ns=0, for_ns=1))
    with pytest.raises(LocalProtocolError, match="no simulated process z"):
        sim.apply(Crash(process="z", at_ns=0, for_ns=1))
    assert NetConditions in sim.supported
    assert DiskFull not in sim.supported


class Noting(Process[int]):
    """Has three effects when it starts, and another at its timer."""

    def deliver(self, stimulus: Stimulus[int], *, now_ns: int) -> list[Effect[int]]:
        if isinstance(stimulus, Started):
            return [Note(value=1), SetTimer(name="t", at_ns=now_ns + MS), Note(value=2)]
        return [Note(value=3)]

    def check_invariants(self) -> None:
        """It has none."""


def noted(*plan: Fault) -> list[object]:
    simulation = Simulation[int](1)
    simulation.add("a", lambda _: Noting())
    for fault in parse_plan(format_plan(plan)):
        simulation.apply(fault)
    simulation.run()
    return [value for _, value in simulation.notes()]


@pytest.mark.parametrize(
    ("effects", "at_ns", "expected"),
    [
        (0, 0, []),
        (1, 0, [1]),
        (2, 0, [1]),
        (3, 0, [1, 2]),
        (4, 0, [1, 2, 3]),
        (5, 0, [1, 2, 3]),
        (0, 1, [1, 2]),
        (1, 1, [1, 2, 3]),
    ],
)
def test_a_crash_falls_between_two_effects(effects: int, at_ns: int, expected: list[object]) -> None:
    assert noted(CrashWithin(process="a", effects=effects, at_ns=at_ns, for_ns=0)) == expected


def test_after_a_crash_between_effects_it_is_restarted() -> None:
    first = CrashWithin(process="a", effects=1, at_ns=0, for_ns=MS)
    assert noted(first) == [1, 1, 2, 3]
    # The second counts on where the first has struck.
    assert noted(first, CrashWithin(process="a", effects=3, at_ns=0, for_ns=MS)) == [1, 1, 1, 2, 3]
    assert noted(first, first) == [1, 1, 2, 3]


def test_a_crash_between_effects_is_for_machines() -> None:
    fault = CrashWithin(process="a", effects=1, at_ns=0, for_ns=0)
    world = World(1)
    world.add("a", lambda _: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(UnsupportedFault):
        world.apply(fault)
    world.close()
    with pytest.raises(UserError, match="effects are 0 to"):
        parse_fault("crash-within:process=a,effects=-1,at=0ns,for=0ns")
