"""Changes of code that come to all who are linked: those who took no part, come later, or replace another."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import PROGRAMS
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankReport
from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.errors import UnknownActorClass
from zbmd.actors.system import ActorSystem
from zbmd.actors.upgrade import ledger as u
from zbmd.actors.upgrade.local import adopt
from zbmd.actors.view import OnLoss, Outcome
from zbmd.transport import capture
from zbmd.transport.errors import RemoteProtocolError

SIZE = 4
VERSIONS = 12


class Processes:
    """Ledgers of processes that come and die; links keep the order, and lose what the dead have sent."""

    def __init__(self, seed: int, machine: type[u.CodeLedger]) -> None:
        self.rng = random.Random(seed)
        self.machine = machine
        self.lives = dict.fromkeys(range(SIZE), 0)
        self.ledgers: dict[int, u.CodeLedger] = {}
        self.ways: dict[tuple[int, int], deque[tuple[u.CodeChange, ...]]] = {}
        self.runs: dict[int, list[u.CodeChange]] = {}
        self.version = 0
        for place in range(SIZE):
            self.begin(place)

    def feed(self, place: int, event: u.Event) -> None:
        ledger = self.ledgers[place]
        actions = ledger.handle(event, now_ns=0)
        ledger.check_invariants()
        for action in actions:
            match action:
                case u.TellChanges(process=process, changes=changes):
                    self.ways[place, int(process)].append(changes)
                case u.Adopt(change=change):
                    before = self.runs[place][-1].new if self.runs[place] else "v0"
                    assert change.old == before, f"{change} comes after {before}"
                    self.runs[place].append(change)
                case u.Clash():
                    raise AssertionError(action)

    def begin(self, place: int) -> None:
        self.lives[place] += 1
        self.ledgers[place], self.runs[place] = self.machine(), []
        others = [other for other in self.ledgers if other != place]
        for one, other in [pair for o in others for pair in ((place, o), (o, place))]:
            self.ways[one, other] = deque()
            self.feed(one, u.LinkUp(process=str(other), incarnation=self.lives[other]))

    def end(self, place: int) -> None:
        del self.ledgers[place]
        for other in self.ledgers:
            del self.ways[place, other], self.ways[other, place]
            self.feed(other, u.LinkDown(process=str(place), incarnation=self.lives[place]))

    def deliver(self, one: int, other: int) -> None:
        changes = self.ways[one, other].popleft()
        self.feed(other, u.ChangesReported(process=str(one), incarnation=self.lives[one], changes=changes))

    def change(self) -> None:
        """Some of those who run the last version change, and all of these keep it."""
        last = f"v{self.version}"
        fit = [p for p in self.ledgers if (self.runs[p][-1].new if self.runs[p] else "v0") == last]
        if not fit or self.version >= VERSIONS:
            return
        self.version += 1
        for place in self.rng.sample(fit, self.rng.randint(1, len(fit))):
            self.feed(place, u.KeptHere(change=u.CodeChange(last, f"v{self.version}")))

    def step(self) -> None:
        dice = self.rng.random()
        waiting = [way for way, frames in self.ways.items() if frames]
        if dice < 0.7 and waiting:
            self.deliver(*self.rng.choice(waiting))
        elif dice < 0.8:
            self.change()
        elif dice < 0.9 and len(self.ledgers) > 1:
            self.end(self.rng.choice(list(self.ledgers)))
        elif absent := [place for place in self.lives if place not in self.ledgers]:
            self.begin(self.rng.choice(absent))

    def settle(self) -> None:
        while waiting := [way for way, frames in self.ways.items() if frames]:
            self.deliver(*self.rng.choice(waiting))
        kept = [ledger.kept for ledger in self.ledgers.values()]
        assert all(one == kept[0] for one in kept), kept
        for place, ledger in self.ledgers.items():
            heard = {o for o in self.ledgers if ledger.has_heard(str(o), self.lives[o])}
            assert heard == set(self.ledgers) - {place}


def run(seed: int, machine: type[u.CodeLedger] = u.CodeLedger) -> None:
    world = Processes(seed, machine)
    for _ in range(150):
        world.step()
    world.settle()


@given(seed=st.integers(0, 2**32))
def test_all_who_are_linked_end_with_the_same_changes_in_order(seed: int) -> None:
    run(seed)


class TellsNothingAtFirst(u.CodeLedger):
    """A process that comes later hears of later changes alone."""

    def handle(self, event: u.Event, *, now_ns: int) -> list[u.Action]:
        actions = super().handle(event, now_ns=now_ns)
        if isinstance(event, u.LinkUp):
            return [u.TellChanges(process=event.process, changes=())]
        return actions


class TellsNothingOn(u.CodeLedger):
    """Reports of others stay here: they are lost with those who knew them first."""

    def handle(self, event: u.Event, *, now_ns: int) -> list[u.Action]:
        actions = super().handle(event, now_ns=now_ns)
        return [
            a for a in actions if not (isinstance(event, u.ChangesReported) and isinstance(a, u.TellChanges))
        ]


@pytest.mark.parametrize("planted", [TellsNothingAtFirst, TellsNothingOn])
def test_planted_bugs_are_found(planted: type[u.CodeLedger]) -> None:
    def finds(seed: int) -> bool:
        try:
            run(seed, planted)
        except AssertionError:
            return True
        return False

    assert any(finds(seed) for seed in range(200))


def test_changes_are_bounded_and_the_first_of_two_holds() -> None:
    ledger = u.CodeLedger()
    ledger.handle(u.LinkUp(process="rank1", incarnation=1), now_ns=0)
    changes = tuple(u.CodeChange(f"m:{n}", f"m:{n + 1}") for n in range(u.CHANGES_MAX))
    ledger.handle(u.ChangesReported(process="rank1", incarnation=1, changes=changes), now_ns=0)
    (clash,) = ledger.handle(
        u.ChangesReported(process="rank1", incarnation=1, changes=(u.CodeChange("m:0", "m:other"),)), now_ns=0
    )
    assert isinstance(clash, u.Clash) and clash.known == "m:1"
    with pytest.raises(RemoteProtocolError, match="more than 1024 changes"):
        ledger.handle(
            u.ChangesReported(process="rank1", incarnation=1, changes=(u.CodeChange("m:a", "m:b"),)), now_ns=0
        )


class Version(Contract, id="ledger.version"):
    pass


class Runs(Contract, id="ledger.runs"):
    version: int


class Speaker(Actor, remote=True):
    @on(Version)
    async def say(self, _: Version) -> Runs:
        return Runs(self.version)


class Speaker2(Speaker, remote=True, version=2):
    pass


async def test_what_lives_and_what_is_spawned_adopts_a_change(system: ActorSystem) -> None:
    before = await system.spawn(Speaker)
    name = f"{__name__}:Speaker"
    adopt(system, name, f"{name}2")
    adopt(system, name, f"{name}2")
    for ref in (before, await system.spawn(Speaker), await system.spawn_on(system.name, name)):
        assert await ref.ask(Version(), reply=Runs, timeout=60) == Runs(2)


class Speaker3(Speaker2, remote=True, version=3):
    pass


async def test_an_actor_that_is_busy_becomes_the_last_of_several_versions(system: ActorSystem) -> None:
    ref, name = await system.spawn(Speaker), f"{__name__}:Speaker"
    asked = asyncio.ensure_future(ref.ask(Version(), reply=Runs, timeout=60))
    await asyncio.sleep(0)  # its message waits
    for old, new in ((name, f"{name}2"), (f"{name}2", f"{name}3")):
        adopt(system, old, new)
    assert await asked == Runs(3), "before its first message"


async def test_a_version_that_is_not_here_is_told_when_it_is_spawned(system: ActorSystem) -> None:
    name = f"{__name__}:Speaker"
    adopt(system, name, "elsewhere:Speaker3")
    with pytest.raises(UnknownActorClass, match="import its module before it is spawned"):
        await system.spawn(Speaker)


async def test_a_replacement_runs_the_new_version_from_its_first_message_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two changes, then a rank is killed: what its replacement spawns, also before its view, is version 3.

    The knowledge of each process is replayed from its recording.
    """
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    monkeypatch.setenv("ZBMD_CAPTURE", str(tmp_path / "run.zlog"))
    reports: list[dict[str, object]] = []

    async def observe(event: HostEvent) -> None:
        if isinstance(event, RankReport):
            reports.append(event.payload)
            if "changed" in event.payload:
                os.kill(host.ranks[1].pid, signal.SIGKILL)

    output = Lines()
    config = HostConfig(
        target=str(PROGRAMS / "actors/upgrade.py"),
        world_size=3,
        on_loss=OnLoss.REPLACE,
        arena_bytes=1 << 20,
        preload=("zbmd.actors.rank.member",),
    )
    host = Host(config, output=output, observer=observe)
    async with asyncio.timeout(60):
        result = await host.run()
    assert result.outcome is Outcome.SUCCEEDED, output.lines
    assert {"versions": [3, 3]} in reports, (reports, output.lines)
    verdicts = [v for v in capture.replay_log(tmp_path / "run.zlog") if v.stream.startswith("code of ")]
    assert len(verdicts) == 4, "of three ranks and a replacement"
    assert all(isinstance(v, capture.Identical | capture.Incomplete) for v in verdicts), verdicts
    whole = [v for v in verdicts if isinstance(v, capture.Identical) and v.events >= 3]
    assert len(whole) >= 3, verdicts  # of the killed one as much is there as had been written
