"""The frame of scenarios, over machines and over programs: phases, outcomes, and shrinking what fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.sim import (
    ALL_FAULTS,
    NETWORK_FAULTS,
    Arrived,
    Crash,
    Cut,
    Effect,
    Fault,
    FaultPlan,
    History,
    Options,
    Partition,
    Pause,
    PeerEnded,
    Process,
    RunOutcome,
    Scenario,
    ScenarioReport,
    ScenarioStage,
    Send,
    SetTimer,
    SimProcess,
    Simulation,
    Started,
    Stimulus,
    TimerFired,
    World,
    names_of,
    parse_faults,
    run_scenario,
    shrink,
)
from zbmd.transport.sim.scenario import candidates

MS = 1_000_000
EVERY_NS = 1 * MS
BUGS = ("", "forgets", "stops", "raises")
MACHINE_FAULTS: tuple[type[Fault], ...] = (Crash, Pause, *NETWORK_FAULTS)


class Maximum:
    """Gossips the largest number it has heard of; adds one to it every so often, `length` times at most.

    Its planted bugs show when a peer ends: it forgets what it knows, stops gossiping, or raises.
    """

    def __init__(self, name: str, names: Sequence[str], length: int, bug: str, board: dict[str, int]) -> None:
        self.name, self.names, self.length, self.bug, self.board = name, names, length, bug, board
        self.value = board[name] = 0
        self.stopped = False

    def deliver(self, stimulus: Stimulus[int], *, now_ns: int) -> Sequence[Effect[int]]:
        match stimulus:
            case Started():
                return [SetTimer(name="gossip", at_ns=now_ns + EVERY_NS)]
            case Arrived(message=heard) if not self.stopped:
                self.value = max(self.value, heard)
            case PeerEnded() if self.bug == "forgets":
                self.value = 0
            case PeerEnded() if self.bug == "stops":
                self.stopped = True
            case PeerEnded() if self.bug == "raises":
                raise KeyError("no such peer")
            case TimerFired() if not self.stopped:
                self.value = min(self.value + 1, self.length)
                sends = [Send(to=name, message=self.value) for name in self.names if name != self.name]
                self.board[self.name] = self.value
                return [*sends, SetTimer(name="gossip", at_ns=now_ns + EVERY_NS)]
            case _:
                pass
        self.board[self.name] = self.value
        return []

    def check_invariants(self) -> None:
        assert self.value <= self.length


@dataclass
class NeverLess:
    """The knowledge of a living process does not shrink."""

    board: dict[str, int]
    incarnation: Callable[[str], int]
    name: str = "never less"
    stride: int = 1

    def __post_init__(self) -> None:
        self.seen: dict[tuple[str, int], int] = {}

    def check(self) -> None:
        for process, value in self.board.items():
            life = (process, self.incarnation(process))
            known = self.seen.get(life, 0)
            if value < known:
                raise AssertionError(f"{process} went from {known} to {value}")
            self.seen[life] = value


@dataclass(frozen=True)
class Machines:
    """Over machines."""

    bug: str = ""
    kinds: tuple[type[Fault], ...] = MACHINE_FAULTS
    name: str = "machines"
    description: str = "gossip of a maximum, by machines"

    def build(self, seed: int | str, options: Options) -> ScenarioStage:
        sim, board = Simulation[int](seed), dict[str, int]()
        names = tuple(f"rank{rank}" for rank in range(options.ranks))

        def factory(name: str) -> Callable[[int], Process[int]]:
            return lambda incarnation: Maximum(name, names, options.length, self.bug, board)

        for name in names:
            sim.add(name, factory(name))
        return ScenarioStage(
            world=sim,
            victims=names,
            core_min=1,
            converged=lambda core: all(board[name] == options.length for name in core),
            span_ns=options.length * EVERY_NS,
            liveness_ns=(2 * options.length + 50) * EVERY_NS,
            checkers=(NeverLess(board, sim.incarnation),),
        )


@dataclass(frozen=True)
class Programs:
    """Over programs, by datagrams, with what is known kept on disk: their bugs show after a restart."""

    bug: str = ""
    kinds: tuple[type[Fault], ...] = ALL_FAULTS
    name: str = "programs"
    description: str = "gossip of a maximum, by programs"

    def build(self, seed: int | str, options: Options) -> ScenarioStage:
        world, board, lives = World(seed), dict[str, int](), dict[str, int]()
        names = tuple(f"rank{rank}" for rank in range(options.ranks))

        async def program(process: SimProcess) -> None:
            value = 0

            async def hear() -> None:
                nonlocal value
                while True:
                    heard = int.from_bytes((await process.receive_datagram()).data)
                    value = max(value, heard)  # as it is now, not as it was before the wait

            lives[process.name] = process.incarnation
            board[process.name] = value
            if process.incarnation > 1 and self.bug == "raises":
                raise KeyError("no such peer")
            if process.incarnation > 1 and self.bug == "stops":
                await asyncio.Event().wait()
            rounds = 0
            async with asyncio.TaskGroup() as group:
                group.create_task(hear())
                while True:
                    await asyncio.sleep(EVERY_NS / 1e9)
                    value = min(value + 1, options.length)
                    board[process.name] = value
                    rounds += 1
                    if process.incarnation > 1 and self.bug == "forgets" and rounds % 4 == 0:
                        board[process.name] -= 1
                    with contextlib.suppress(OSError):
                        process.disk.write("value", value.to_bytes(4))
                    for name in names:
                        if name != process.name:
                            process.send_datagram(name, value.to_bytes(4))

        for name in names:
            world.add(name, program)
        return ScenarioStage(
            world=world,
            victims=names,
            core_min=1,
            converged=lambda core: all(board[name] == options.length for name in core),
            span_ns=options.length * EVERY_NS,
            liveness_ns=(20 * options.length + 1200) * EVERY_NS,
            checkers=(NeverLess(board, lives.__getitem__, stride=3),),
        )


def run(scenario: Scenario, seed: int, options: Options, plan: FaultPlan | None = None) -> ScenarioReport:
    return run_scenario(scenario, seed, options, plan, tell=None)


def hunt(scenario: Scenario, options: Options) -> ScenarioReport:
    return next(
        report
        for report in (run(scenario, seed, options) for seed in range(100))
        if report.outcome is not RunOutcome.OK
    )


@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 5), faults=st.integers(0, 12))
@settings(max_examples=30)
def test_machines_that_are_right_pass(seed: int, ranks: int, faults: int) -> None:
    report = run(Machines(), seed, Options(ranks=ranks, faults=faults, length=10))
    assert report.outcome is RunOutcome.OK, report


@example(seed=455095, ranks=4, faults=5)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 4), faults=st.integers(0, 8))
@settings(max_examples=15)
def test_programs_that_are_right_pass(seed: int, ranks: int, faults: int) -> None:
    report = run(Programs(), seed, Options(ranks=ranks, faults=faults, length=8))
    assert report.outcome is RunOutcome.OK, report


EXPECTED = {"forgets": RunOutcome.SAFETY, "stops": RunOutcome.LIVENESS, "raises": RunOutcome.CRASH}


@pytest.mark.parametrize("make", [Machines, Programs])
@pytest.mark.parametrize("bug", EXPECTED)
def test_a_bug_is_found_told_apart_and_shrunk_to_one_crash(make: Callable[[str], Scenario], bug: str) -> None:
    scenario = make(bug)
    failed = hunt(scenario, Options(ranks=4, faults=6, length=10))
    assert failed.outcome is EXPECTED[bug], failed
    small = shrink(scenario, failed, runs_max=80)
    assert small.report.outcome is failed.outcome
    assert small.runs <= 80
    assert [type(fault) for fault in small.report.plan] == [Crash]
    assert small.report.options.faults == 1
    assert small.report.options.ranks <= 2
    assert small.report.options.length <= failed.options.length


def test_shrinking_keeps_to_the_plans_that_a_scenario_is_meant_to_stand() -> None:
    class SparesTheFirst(Machines):
        def admits(self, seed: int | str, options: Options, plan: FaultPlan) -> bool:
            asked.append(plan)
            return all("rank0" not in names_of(fault) for fault in plan)

    asked: list[FaultPlan] = []
    plan: FaultPlan = tuple(Crash(process=f"rank{rank}", at_ns=4 * MS, for_ns=0) for rank in (1, 2))
    failed = next(
        report
        for seed in range(100)
        if (report := run(Machines("forgets"), seed, Options(ranks=3, length=10), plan)).outcome
        is not RunOutcome.OK
    )
    small = shrink(SparesTheFirst("forgets"), failed)
    assert asked and small.report.outcome is failed.outcome
    assert all("rank0" not in names_of(fault) for fault in small.report.plan)


def test_a_reports_command_line_is_the_run() -> None:
    failed = hunt(Machines("forgets"), Options(ranks=3, faults=5, length=6))
    words = failed.command.split(" --")
    assert words[:4] == ["zbmd sim run machines", f"seed {failed.seed}", "ranks 3", "length 6"]
    plan = parse_faults(words[4].removeprefix("faults ").strip("'"))
    assert plan == failed.plan
    again = run(Machines("forgets"), int(failed.seed), failed.options, failed.plan)
    assert again == failed
    assert "never less: rank" in str(failed)
    assert f"again: {failed.command}" in str(failed)


def test_the_seed_is_told_first_and_names_everything() -> None:
    told: list[str] = []
    for scenario in (Machines(), Programs()):
        options = Options(ranks=3, faults=6, length=8)
        first = run_scenario(scenario, 77, options, tell=told.append)
        assert told.pop().startswith(f"{scenario.name}: seed 77")
        assert run(scenario, 77, options) == first
        assert run(scenario, 78, options).digest != first.digest


def test_a_run_without_a_digest_is_the_same_run() -> None:
    options = Options(ranks=3, faults=6, length=8)
    for scenario in (Machines(), Programs()):
        whole = run(scenario, 77, options)
        assert run_scenario(scenario, 77, options, tell=None, digested=False) == replace(whole, digest="")
    failed = hunt(Machines("forgets"), options)
    again = run_scenario(Machines("forgets"), failed.seed, options, failed.plan, tell=None, digested=False)
    assert again == replace(failed, digest="")
    assert len(again.story) > 1
    history = History()
    history.keep_last(1)
    with pytest.raises(LocalProtocolError, match="no digest"):
        history.digest()


def test_the_core_is_healed_and_the_rest_is_not() -> None:
    class Watched(Machines):
        def build(self, seed: int | str, options: Options) -> ScenarioStage:
            stage = super().build(seed, options)
            stages.append(stage)
            return stage

    stages: list[ScenarioStage] = []
    sizes: set[int] = set()
    for seed in range(12):
        plan: FaultPlan = tuple(Crash(process=f"rank{rank}", at_ns=MS, for_ns=0) for rank in range(4))
        plan += (Partition(groups=(("rank0",), ("rank1", "rank2"), ("rank3",)), at_ns=0, for_ns=10**12),)
        report = run(Watched(), seed, Options(ranks=4, length=5), plan)
        assert report.outcome is RunOutcome.OK
        world = stages[-1].world
        assert isinstance(world, Simulation)
        assert {name for name in stages[-1].victims if world.lives(name)} == report.core
        sizes.add(len(report.core))
    assert sizes == {1, 2, 3, 4}


def test_options_and_cores_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="ranks"):
        Options(ranks=0)
    stage = replace(Machines().build(1, Options()), core_min=9)
    with pytest.raises(LocalProtocolError, match="a core of 9 of 4"):
        from_stage(stage)
    with pytest.raises(LocalProtocolError, match="no simulated process rank9"):
        run(Machines(), 1, Options(), (Crash(process="rank9", at_ns=0, for_ns=0),))
    passed = run(Machines(), 1, Options(faults=0))
    with pytest.raises(LocalProtocolError, match="nothing to shrink"):
        shrink(Machines(), passed)


def from_stage(stage: ScenarioStage) -> ScenarioReport:
    class Fixed(Machines):
        def build(self, seed: int | str, options: Options) -> ScenarioStage:
            return stage

    return run(Fixed(), 1, Options())


def test_a_thrown_away_world_is_closed() -> None:
    class Broken(Programs):
        def build(self, seed: int | str, options: Options) -> ScenarioStage:
            stage = super().build(seed, options)
            built.append(stage)
            return stage

    built: list[ScenarioStage] = []
    with pytest.raises(LocalProtocolError):
        run(Broken(), 1, Options(), (Crash(process="rank9", at_ns=0, for_ns=0),))
    world = built[0].world
    assert isinstance(world, World)
    assert world.loop.is_closed()


# --- the search of the shrinker, without a world ---------------------------------------------------------


def fake(options: Options, plan: FaultPlan, outcome: RunOutcome) -> ScenarioReport:
    return ScenarioReport(
        scenario="fake",
        seed=1,
        options=options,
        plan=plan,
        outcome=outcome,
        reason="",
        digest="",
        events=0,
        virtual_ns=0,
        core=frozenset(),
        story=(),
    )


@given(
    count=st.integers(1, 30),
    needed=st.sets(st.integers(0, 29), max_size=3),
    ranks=st.integers(1, 20),
    length=st.integers(1, 200),
    least=st.tuples(st.integers(1, 20), st.integers(1, 200)),
)
def test_shrinking_keeps_what_is_needed_and_no_more(
    count: int, needed: set[int], ranks: int, length: int, least: tuple[int, int]
) -> None:
    plan: FaultPlan = tuple(Pause(process="node", at_ns=index, for_ns=1) for index in range(count))
    wanted = {fault for fault in plan if fault.at_ns in needed}
    ranks_min, length_min = min(least[0], ranks), min(least[1], length)
    runs = 0

    def rerun(options: Options, plan: FaultPlan) -> ScenarioReport:
        nonlocal runs
        runs += 1
        fails = wanted <= set(plan) and options.ranks >= ranks_min and options.length >= length_min
        return fake(options, plan, RunOutcome.SAFETY if fails else RunOutcome.OK)

    failed = fake(Options(ranks=ranks, length=length, faults=count), plan, RunOutcome.SAFETY)
    small = shrink(Machines(), failed, runs_max=5000, rerun=rerun)
    assert set(small.report.plan) == wanted
    assert (small.report.options.ranks, small.report.options.length) == (ranks_min, length_min)
    assert small.runs == runs
    assert not small.exhausted


def test_shrinking_is_bounded_and_keeps_the_kind_of_failure() -> None:
    plan: FaultPlan = tuple(Pause(process="node", at_ns=index, for_ns=1) for index in range(64))
    failed = fake(Options(faults=64), plan, RunOutcome.SAFETY)

    def other(options: Options, plan: FaultPlan) -> ScenarioReport:
        return fake(options, plan, RunOutcome.CRASH)

    small = shrink(Machines(), failed, runs_max=10, rerun=other)
    assert (small.report, small.runs, small.exhausted) == (failed, 10, True)


def test_with_fewer_ranks_faults_strike_those_that_stay() -> None:
    cut = Cut(source="rank0", target="rank2", at_ns=0, for_ns=1)
    plan: FaultPlan = (
        Crash(process="rank5", at_ns=0, for_ns=1),
        Crash(process="node", at_ns=0, for_ns=1),
        cut,
        Partition(groups=(("rank0", "rank1"), ("rank4", "rank5")), at_ns=0, for_ns=1),
        Partition(groups=(("rank0", "rank1", "rank2"), ("rank4", "rank5")), at_ns=0, for_ns=1),
    )
    found = {options.ranks: faults for options, faults in candidates(Options(ranks=6), plan)}
    assert found[4] == (
        Crash(process="rank1", at_ns=0, for_ns=1),
        Crash(process="node", at_ns=0, for_ns=1),
        cut,
    )
    assert found[1] == (Crash(process="rank0", at_ns=0, for_ns=1), plan[1])
