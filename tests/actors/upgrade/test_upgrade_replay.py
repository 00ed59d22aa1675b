"""The events of the machines of a change of code are recorded, and replayed to the same actions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.machines.state_followers import follow_all

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.errors import UpgradeUndone
from zbmd.actors.system import ActorSystem
from zbmd.actors.upgrade import events as ev
from zbmd.actors.upgrade import ledger as u
from zbmd.actors.upgrade.coordinator import COORDINATOR, UPGRADE_AGENT, UpgradeAgent
from zbmd.actors.upgrade.ledger import UPGRADE_LEDGER
from zbmd.transport import capture
from zbmd.transport.capture.tap import Tap
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import RemoteProtocolError

PATIENCE_S = 120.0


class Poke(Contract, id="upgrade_replay.poke"):
    pass


class First(Actor, remote=True):
    @on(Poke)
    async def poke(self, _: Poke) -> None:
        pass


class Second(First, remote=True, version=2):
    pass


class Wrong(First, remote=True, version=3):
    @on(Poke)
    async def poke(self, _: Poke) -> None:
        raise RuntimeError("a bad version")


@pytest.fixture
def log(tmp_path: Path) -> capture.LogRecorder:
    origin = capture.Origin(process="rank0", incarnation=1)
    return capture.LogRecorder(tmp_path / "log", origin, capture.Clocks(hybrid=HybridClock()))


@pytest.fixture
async def recorded(log: capture.LogRecorder) -> AsyncIterator[ActorSystem]:
    system = ActorSystem("rank0", recorder=log)
    yield system
    await system.stop()


def replayed(log: capture.LogRecorder, path: Path) -> list[int]:
    """The number of events of each stream."""
    log.close("the end")
    verdicts = list(capture.replay_log(path))
    assert all(isinstance(verdict, capture.Identical) for verdict in verdicts), verdicts
    (process,) = capture.open_log(path).processes
    assert follow_all(process, random.Random(len(verdicts))) <= {"upgrade", "upgrade-agent", "upgrade-ledger"}
    return [verdict.events for verdict in verdicts if isinstance(verdict, capture.Identical)]


async def test_a_change_that_is_kept_and_one_that_is_taken_back_replay_identical(
    recorded: ActorSystem, log: capture.LogRecorder, tmp_path: Path
) -> None:
    ref = await recorded.spawn(First)
    await recorded.upgrade(First, Second, probation_s=0.01)

    async def poke() -> None:
        while True:
            await ref.ask(Poke(), timeout=PATIENCE_S)

    poking = asyncio.create_task(poke())
    with pytest.raises(UpgradeUndone):
        await recorded.upgrade(Second, Wrong, probation_s=PATIENCE_S)
    poking.cancel()
    await asyncio.gather(poking, return_exceptions=True)
    events = replayed(log, tmp_path / "log")
    assert len(events) == 4 and min(events) >= 5


@pytest.mark.parametrize("seed", range(20))
def test_an_agent_whose_leaders_die_replays_identical(
    seed: int, log: capture.LogRecorder, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    processes = [f"p{number}" for number in range(4)]
    config = {"me": "p1", "processes": processes}
    tap = Tap(log, UPGRADE_AGENT, "agent", UpgradeAgent("p1", processes), config)
    others = [process for process in processes if process != "p1"]
    history: list[ev.LocalEvent] = [
        ev.Ordered(leader=COORDINATOR, order=ev.Order.PREPARE),
        ev.LocalChecked(why=""),
        ev.Ordered(leader=COORDINATOR, order=ev.Order.CHANGE),
        ev.LocalChanged(actors=2, why=""),
    ]
    gone = rng.sample([COORDINATOR, *others], 3)
    loose: list[ev.LocalEvent] = [
        *(ev.LeaderLost(process=process) for process in gone),
        *(ev.FateReported(process=process, fate=rng.choice(list(ev.Fate))) for process in others),
        *(ev.FateAsked(leader=process) for process in others),
        *(ev.FollowerSettled(process=process) for process in others),
        ev.LocalBroke(why="boom"),
        ev.LocalSettled(),
        ev.LocalSettled(),
    ]
    rng.shuffle(loose)
    for number, event in enumerate([*history[: rng.randint(1, 4)], *loose]):
        try:
            tap.handle(event, now_ns=number)
        except RemoteProtocolError:
            break
    assert min(replayed(log, tmp_path / "log")) >= 4


@pytest.mark.parametrize("seed", range(10))
def test_a_ledger_that_hears_of_changes_replays_identical(
    seed: int, log: capture.LogRecorder, tmp_path: Path
) -> None:
    rng, changes = random.Random(seed), [u.CodeChange(f"m:{n}", f"m:{n + 1}") for n in range(8)]
    tap = Tap(log, UPGRADE_LEDGER, "code", u.CodeLedger(), {})
    linked: dict[str, int] = {}
    for now_ns in range(60):
        process, clash = rng.choice(("rank1", "rank2")), u.CodeChange("m:0", "m:other")
        told = tuple(rng.sample(changes, rng.randint(0, 3)))
        kept, incarnation = u.KeptHere(change=rng.choice((*changes, clash))), linked.get(process, 0)
        heard = u.ChangesReported(process=process, incarnation=incarnation, changes=told)
        choices: list[u.Event] = [kept, heard]
        if incarnation:
            choices.append(u.LinkDown(process=process, incarnation=incarnation))
        else:
            choices.append(u.LinkUp(process=process, incarnation=now_ns + 1))
        event = rng.choice(choices)
        if isinstance(event, u.LinkUp):
            linked[process] = event.incarnation
        elif isinstance(event, u.LinkDown):
            del linked[process]
        tap.handle(event, now_ns=now_ns)
        tap.check_invariants()
    assert replayed(log, tmp_path / "log") == [60]
