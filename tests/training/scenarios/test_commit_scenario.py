"""Kills between two effects as faults of a plan, and the commit scenario on the simulator's frame."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.collectives.scenarios.hosted_job import draw_kills, names_of
from zbmd.tools.entry.zbmd import main
from zbmd.training.scenarios.commit import CommitScenario, build
from zbmd.training.scenarios.grouped_process import Moves
from zbmd.training.scenarios.rank import RankProcess
from zbmd.training.scenarios.world import CommitOptions
from zbmd.transport.sim import (
    Crash,
    Fault,
    HistoryKind,
    Options,
    RunOutcome,
    ScenarioReport,
    format_plan,
    parse_plan,
    run_scenario,
)

OFTEN = 2
WAYS = (
    *("replicas", "files", "buddies", "equal keys beside buddies", "pulls", "rolls back", "follows", "waits"),
    *("is recut", "reshards", "is a spare", "waits for a copy"),
    *("saves", "stops", "logs for another", "shrinks", "is lost", "is stranded", "noticed", "finished"),
)
OPTIONS = CommitOptions(world_size=2, steps=1, kills=0)


def test_every_kill_point_is_a_fault() -> None:
    calm, _ = build(3, OPTIONS)
    calm.run()
    names = names_of(2)
    points = [point for point in calm.kill_points() if point.process in names]
    faults = calm.kill_faults(names)
    assert len(points) == len(faults) > 30
    for point, fault in zip(points, faults, strict=True):
        by_point, _ = build(3, OPTIONS)
        by_point.crash_during(point)
        by_point.run()
        by_plan, _ = build(3, OPTIONS)
        for read in parse_plan(format_plan((fault,))):
            by_plan.apply(read)
        by_plan.run()
        assert without_faults(by_plan.history) == without_faults(by_point.history), point


def without_faults(history: object) -> list[str]:
    return [str(record) for record in history if record.kind is not HistoryKind.FAULT]  # type: ignore[attr-defined]


def test_a_healed_world_kills_nobody() -> None:
    simulation, world = build(3, OPTIONS)
    for at_ns in range(10**6, 10**8, 10**6):
        simulation.apply(Crash(process="rank0", at_ns=at_ns, for_ns=0))
    simulation.heal(frozenset(names_of(2)), revive=False)
    simulation.run()
    assert world.finished == {0, 1}
    assert not any(record.kind is HistoryKind.CRASH for record in simulation.history)


@given(seed=st.integers(0, 2**32), count=st.integers(0, 9))
@settings(max_examples=15)
def test_a_plan_is_drawn_by_its_seed_alone(seed: int, count: int) -> None:
    def draw() -> tuple[Fault, ...]:
        rng = random.Random(seed)
        return draw_kills(rng, names_of(2), count, lambda: build(seed, OPTIONS)[0])

    plan = draw()
    assert plan == draw()
    assert len(plan) == count
    assert [fault.at_ns for fault in plan] == sorted(fault.at_ns for fault in plan)


def test_a_second_kill_falls_into_the_recovery_from_the_first() -> None:
    again = 0
    for seed in range(40):
        plan = CommitScenario().draw_plan(seed, Options(ranks=2, length=1, faults=2))
        simulation, _ = build(seed, CommitScenario().options_of(seed, Options(ranks=2, length=1, faults=2)))
        for fault in plan:
            simulation.apply(fault)
        simulation.run()
        crashes = [record for record in simulation.history if record.kind is HistoryKind.CRASH]
        again += len(crashes) == 2 and max(crash.incarnation for crash in crashes) == 2
    assert again >= 3


def run(seed: int, options: Options) -> ScenarioReport:
    scenario = CommitScenario()
    return run_scenario(scenario, seed, options, scenario.draw_plan(seed, options), tell=None)


@given(
    seed=st.integers(0, 2**32), ranks=st.integers(1, 5), length=st.integers(1, 4), faults=st.integers(0, 4)
)
@settings(max_examples=25)
def test_the_job_stands_what_it_is_meant_to(seed: int, ranks: int, length: int, faults: int) -> None:
    report = run(seed, Options(ranks=ranks, length=length, faults=faults))
    assert report.outcome is RunOutcome.OK, report


def test_the_runs_are_of_all_kinds() -> None:
    """Everything that the scenario provides for happens in some of its runs."""
    ways: Counter[str] = Counter()
    for seed in range(700):
        options = Options(ranks=(2, 3, 4)[seed % 3], length=3, faults=3)
        job = CommitScenario().options_of(seed, options)
        simulation, world = build(seed, job)
        for fault in CommitScenario().draw_plan(seed, options):
            simulation.apply(fault)
        simulation.run(until=partial(getattr, world, "is_over"))
        ways.update(world.ways)
        kinds = {
            "shrinks": any(len(record.members) < job.world_size for record in world.log.records),
            "is lost": world.state_lost,
            "is stranded": world.stranded,
            "noticed": world.corruption_noticed,
            "finished": world.finished == set(range(job.world_size)),
            "replicas": job.replicas,
            "files": job.files,
            "buddies": not job.files and not job.replicas,
            "equal keys beside buddies": len(set(job.keys(job.world_size))) < job.world_size
            and not job.files
            and not job.replicas,
        }
        ways.update(kind for kind, so in kinds.items() if so)
        assert not world.corruption_noticed or job.corrupting
        if all(ways[way] >= OFTEN for way in WAYS):
            break
    few = {way: ways[way] for way in WAYS if ways[way] < OFTEN}
    assert not few, ways


def test_the_same_seed_gives_the_same_history() -> None:
    options = CommitOptions(world_size=3, steps=3, sharded=True, per_host=2)
    first, _ = build(11, options)
    second, _ = build(11, options)
    first.run()
    second.run()
    assert first.digest() == second.digest()


@pytest.mark.parametrize("sharded", [False, True])
def test_every_second_kill_during_a_recovery(sharded: bool) -> None:
    """Rank 0 dies in a step; then one more process dies at every point of what follows."""
    options = CommitOptions(world_size=3, steps=2, sharded=sharded)
    calm, _ = build(29, options)
    calm.run()
    ours = [point for point in calm.kill_points() if point.process == "rank0"]
    first = ours[len(ours) // 2]
    disturbed, _ = build(29, options)
    disturbed.crash_during(first)
    disturbed.run()
    points = [p for p in disturbed.kill_points() if p.process != "node" and p > first]
    assert {p.process for p in points if p.incarnation == 2} == {"rank0"}
    for point in points:
        simulation, world = build(29, options)
        simulation.crash_during(first)
        simulation.crash_during(point)
        simulation.run(until=partial(getattr, world, "is_over"))
        if not world.state_lost or not sharded:  # a rank and its buddy may be lost at once
            assert set(world.ended.values()) == {options.last}, point


@pytest.mark.parametrize("sharded", [False, True])
def test_an_update_that_does_not_wait_for_the_copy_of_a_checkpoint_is_found(
    sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CommitOptions(world_size=3, steps=6, sharded=sharded, saving=True)
    build(7, options)[0].run()

    def staged(self: RankProcess, slot: int | None = None) -> Moves:
        yield from ()

    monkeypatch.setattr(RankProcess, "_staged", staged)
    with pytest.raises(Exception, match="the slot being read has changed"):
        build(7, options)[0].run()


FOUND = [
    (
        "a version is logged with as many digests as ranks, of which one is lost then",
        "commit --seed 613 --ranks 2 --length 6 --faults "
        "crash-within:process=rank0,effects=1,at=161464716ns,for=0ns",
    ),
    (
        "who alone saw a commit tells others of it, and dies before they have its record",
        "commit --seed 1375 --ranks 3 --length 1 --faults "
        "crash-within:process=rank2,effects=1,at=15042781ns,for=0ns;"
        "crash-within:process=rank1,effects=1,at=27877980ns,for=0ns",
    ),
    (
        "all go on from a version after the one that its writer did not see committed",
        "commit --seed 2848 --ranks 6 --length 6 --faults crash:process=rank2,at=29948492ns,for=0ns;"
        "crash-within:process=rank2,effects=1,at=126300059ns,for=0ns;"
        "crash-within:process=rank4,effects=0,at=245545682ns,for=0ns",
    ),
    (
        "a version is logged of which a member has the record, and all go on from the one before",
        "training --seed 45471279076715 --ranks 4 --length 2 --faults "
        "crash-within:process=rank3,effects=0,at=22814847ns,for=0ns;"
        "crash-within:process=rank2,effects=0,at=50561451ns,for=0ns;"
        "crash-within:process=rank3,effects=0,at=61770748ns,for=0ns;crash:process=rank0,at=87951728ns,for=0ns",
    ),
    (
        "two that hold the same are lost, and there is a copy of one's shard",
        "commit --seed 503552 --ranks 6 --length 2 --faults "
        "crash-within:process=rank4,effects=0,at=36152498ns,for=0ns;"
        "crash:process=rank5,at=46919585ns,for=0ns;"
        "crash-within:process=rank0,effects=0,at=49943618ns,for=0ns",
    ),
]


@pytest.mark.parametrize(("what", "command"), FOUND, ids=[what for what, _ in FOUND])
def test_what_hunts_have_found_stays_mended(what: str, command: str) -> None:
    assert main(["sim", "run", *command.split()]) == 0, what
