"""The scenario of links: what its board must notice, and that real links stand it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.actors.simulated.links_scenario import Board, InTime, LinksScenario, Number, Promises
from zbmd.transport.sim import Crash, Cut, FaultPlan, Options, RunOutcome, SimProcess, World, run_scenario

MS = 1_000_000


@given(
    seed=st.integers(0, 2**32), ranks=st.integers(1, 3), length=st.integers(1, 6), faults=st.integers(0, 4)
)
@settings(max_examples=15)
def test_links_keep_their_promises(seed: int, ranks: int, length: int, faults: int) -> None:
    report = run_scenario(
        LinksScenario(), seed, Options(ranks=ranks, length=length, faults=faults), tell=None
    )
    assert report.outcome is RunOutcome.OK, report


def test_who_is_cut_off_for_good_holds_nobody_else_up() -> None:
    plan: FaultPlan = (
        Crash(process="rank2", at_ns=1 * MS, for_ns=0),
        Cut(source="rank0", target="rank1", at_ns=2 * MS, for_ns=10**12),
    )
    cores: set[frozenset[str]] = set()
    for seed in range(12):
        report = run_scenario(LinksScenario(), seed, Options(ranks=3, length=4), plan, tell=None)
        assert report.outcome is RunOutcome.OK, report
        cores.add(report.core)
    assert len(cores) > 2


def told(number: int, **changed: int) -> Number:
    life = {"sender_life": 1, "process_life": 1, "sink_life": 1, "sure": number - 1}
    return Number(sender="rank1", number=number, **{**life, **changed})


@pytest.mark.parametrize(
    ("heard", "words"),
    [
        ([told(1), told(1)], "after number 1"),
        ([told(1), told(3)], "after number 1"),
        ([told(2), told(1)], "after number 0"),
        ([told(1), told(2), told(1, sure=0)], "after number 2"),
        ([told(1, sink_life=2)], r"#1.1 got what was sent to #1.2"),
        ([told(1, process_life=2)], r"#1.1 got what was sent to #2.1"),
        ([told(1, sender_life=2), told(1)], "after a younger life"),
    ],
)
def test_every_broken_promise_is_noticed(heard: list[Number], words: str) -> None:
    async def sink(process: SimProcess) -> None:
        for number in heard:
            board.hear(process, number, 1)

    board = Board()
    with World(1) as world:
        world.add("rank0", sink)
        world.run(for_ns=MS)
    with pytest.raises(AssertionError, match=words):
        Promises(board).check()


def test_what_may_have_been_lost_may_be_missing() -> None:
    async def sink(process: SimProcess) -> None:
        for number in (told(1), told(4, sure=1), told(5)):
            board.hear(process, number, 1)

    board = Board()
    with World(1) as world:
        world.add("rank0", sink)
        world.run(for_ns=MS)
    Promises(board).check()


def test_an_ask_that_never_ends_is_noticed_unless_its_process_stands_still() -> None:
    async def idle(process: SimProcess) -> None:
        board.asks[1] = (process, world.now_ns + MS, "someone")

    board = Board()
    with World(1) as world:
        world.add("rank0", idle)
        world.run(for_ns=10 * MS)
        process, deadline_ns, whom = board.asks[1]
        InTime(board, world).check()
        world.call_at(world.now_ns + 100 * MS, lambda: None)
        world.run(for_ns=100 * MS)
        assert process.dead
        InTime(board, world).check()
        assert not board.asks, "the dead ask for nothing"
        process.dead = False
        board.asks[1] = (process, deadline_ns, whom)
        process.paused_until_ns = world.now_ns
        InTime(board, world).check()
        process.paused_until_ns = 0
        with pytest.raises(AssertionError, match="an ask of someone is"):
            InTime(board, world).check()
