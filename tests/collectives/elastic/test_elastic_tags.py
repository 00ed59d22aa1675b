"""Tagged messages of members that die, come back and lose their links: seeded histories of the machines."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.machines.state_followers import follow_all

from zbmd.actors.view import MemberId
from zbmd.collectives.p2p import elastic_machine as em
from zbmd.collectives.p2p import tag_machine as tm
from zbmd.collectives.p2p.elastic_machine import ELASTIC_TAGS, ElasticTagMachine, Way, tags_config
from zbmd.transport import capture
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import LocalProtocolError

FRESH = random.SystemRandom().randrange(2**32)
RANKS = 3
STEPS = 400
TAGS = 2

Pair = tuple[MemberId, MemberId]


@dataclass
class Process:
    """One life of a rank, and what it waits for."""

    machine: ElasticTagMachine
    tap: capture.Tap[em.ElasticTagEvent, em.ElasticTagAction]
    epoch: int = 0
    notices: list[MemberId] = field(default_factory=list[MemberId])
    sends: dict[int, int] = field(default_factory=dict[int, int])
    receives: dict[int, tuple[int | None, int | None]] = field(
        default_factory=dict[int, tuple[int | None, int | None]]
    )
    held: list[tm.Match] = field(default_factory=list[tm.Match])
    here: dict[tuple[int, int], tuple[MemberId, int, int]] = field(
        default_factory=dict[tuple[int, int], tuple[MemberId, int, int]]
    )


class World:
    """Processes, links that keep order, and the views that membership makes of them."""

    def __init__(self, seed: int, log: capture.Recorder | None = None) -> None:
        self.log = log
        self.rng = random.Random(seed)
        self.keys = 0
        self.epoch = 0
        self.living: dict[int, MemberId] = {}
        self.processes: dict[MemberId, Process] = {}
        self.links: dict[Pair, deque[Any]] = {}
        self.parted: set[frozenset[MemberId]] = set()
        self.tag_of: dict[int, int] = {}
        self.taken: set[int] = set()
        self.last: dict[tuple[MemberId, MemberId, int], int] = {}
        self.failed = 0
        for rank in range(RANKS):
            self.start(rank, 1)
        self.install()

    def start(self, rank: int, incarnation: int) -> None:
        member = MemberId(rank=rank, incarnation=incarnation)
        machine = ElasticTagMachine(rank)
        tap = capture.Tap(self.log, ELASTIC_TAGS, f"{member}", machine, tags_config(machine))
        self.processes[member] = Process(machine, tap)
        self.living[rank] = member

    def install(self) -> None:
        """A view of all who live: links between them stand again."""
        self.epoch += 1
        self.view = tuple(self.living[rank] for rank in sorted(self.living))
        self.entered: set[MemberId] = set()
        for a in self.view:
            for b in self.view:
                self.links.setdefault((a, b), deque())

    def put(self, me: MemberId, event: em.ElasticTagEvent) -> None:
        process = self.processes[me]
        actions = process.tap.handle(event, now_ns=0)
        process.tap.check_invariants()
        for action in actions:
            self.perform(me, process, action)

    def perform(self, me: MemberId, process: Process, action: em.ElasticTagAction) -> None:
        match action:
            case tm.Transmit(key=key, to=to, number=number):
                self.say(me, to, tm.Arrived(source=me.rank, number=number, tag=self.tag_of[key]), key)
            case tm.TellTaken(to=to, number=number):
                self.say(me, to, tm.TakenThere(by=me.rank, number=number))
            case em.Greet(to=to, epoch=epoch, since=since):
                self.say(me, to, em.Greeted(source=me.rank, epoch=epoch, since=since))
            case tm.Match(key=key):
                source, tag = process.receives.pop(key)
                by, sent, its_tag = process.here[action.source, action.number]
                assert source in (None, by.rank) and tag in (None, its_tag)
                # Of one life to another, messages with one tag are matched in the order in which they went.
                order = (by, me, its_tag)
                assert self.last.get(order, 0) < sent, "one has passed another, or came twice"
                self.last[order] = sent
                process.held.append(action)
            case tm.Sent(key=key):
                assert key in self.taken, "nobody has it"
                del process.sends[key]
            case tm.FailSend(key=key, to=to, cause=cause):
                assert process.sends.pop(key) == to
                self.check_failure(me, (to,), cause)
            case tm.FailReceive(key=key, ranks=ranks, cause=cause):
                source, _ = process.receives.pop(key)
                assert source is None or ranks == (source,)
                self.check_failure(me, ranks, cause)
            case em.Dropped(source=source, number=number):
                process.here.pop((source, number), None)

    def check_failure(self, me: MemberId, ranks: tuple[int, ...], cause: tm.Cause) -> None:
        self.failed += 1
        for rank in ranks:
            dead = any(m.rank == rank and m not in self.living.values() for m in self.processes)
            parted = any({m.rank for m in pair} == {rank, me.rank} for pair in self.parted)
            assert dead or parted or rank not in self.living, f"{me} hears that rank {rank} is {cause}"

    def say(self, me: MemberId, to: int, message: Any, key: int = 0) -> None:
        """To whoever is linked under this rank: it may be a later life than the machine knows of."""
        member = self.living.get(to)
        # A rank that has not noticed the end of a link sends into nothing; only then there is another link.
        if member is not None and member not in self.processes[me].notices:
            self.links[me, member].append((message, key))

    # ---- steps

    def step(self) -> None:
        me = self.rng.choice(list(self.living.values()))
        process = self.processes[me]
        kind = self.rng.random()
        if kind < 0.005 and len(self.living) > 1:
            self.kill(me)
        elif kind < 0.01:
            self.part(me, self.rng.choice(list(self.living.values())))
        elif kind < 0.02:
            self.start_missing()
        elif kind < 0.1:
            self.enter(me)
            self.settle(me)
        elif kind < 0.15 and process.notices:
            self.put(me, em.MemberLost(member=process.notices.pop(0)))
        elif kind < 0.35 and process.epoch:
            self.send(me, self.rng.randrange(RANKS), self.rng.randrange(TAGS))
        elif kind < 0.55 and process.epoch:
            self.receive(me, self.rng.choice([None, *range(RANKS)]), self.rng.choice([None, *range(TAGS)]))
        elif kind < 0.7 and process.held:
            self.take(me)
        else:
            self.deliver(self.rng.choice(list(self.links)))

    def send(self, me: MemberId, to: int, tag: int) -> None:
        self.keys += 1
        self.tag_of[self.keys] = tag
        self.processes[me].sends[self.keys] = to
        self.put(me, tm.SendPosted(key=self.keys, to=to, tag=tag))

    def receive(self, me: MemberId, source: int | None, tag: int | None) -> None:
        self.keys += 1
        self.processes[me].receives[self.keys] = (source, tag)
        self.put(me, tm.ReceivePosted(key=self.keys, source=source, tag=tag))

    def take(self, me: MemberId) -> None:
        process = self.processes[me]
        match = process.held.pop(0)
        by, key, _ = process.here.pop((match.source, match.number))
        assert key not in self.taken, f"{by}'s message was taken twice"
        self.taken.add(key)
        self.put(me, tm.Took(source=match.source, number=match.number))

    def deliver(self, pair: Pair) -> None:
        source, to = pair
        link = self.links[pair]
        parted = source in self.living.values() and source in self.processes[to].notices
        if not link or parted or to not in self.living.values():
            return
        message, key = link.popleft()
        process = self.processes[to]
        if isinstance(message, tm.Arrived):
            known = self.tag_of[key]
            place = (source.rank, message.number)
            assert place not in process.here, "a number was used twice"
            process.here[place] = (source, key, known)
        self.put(to, message)

    def kill(self, victim: MemberId) -> None:
        del self.living[victim.rank]
        for member in self.living.values():
            self.processes[member].notices.append(victim)
        self.install()

    def start_missing(self) -> None:
        missing = [rank for rank in range(RANKS) if rank not in self.living]
        if missing:
            rank = self.rng.choice(missing)
            self.start(rank, 1 + max(m.incarnation for m in self.processes if m.rank == rank))
            self.install()

    def part(self, a: MemberId, b: MemberId) -> None:
        """The link between two who live ends, and with it what is under way; the next view has another."""
        if a == b:
            return
        self.parted.add(frozenset((a, b)))
        for one, other in ((a, b), (b, a)):
            self.links.pop((one, other), None)
            self.processes[one].notices.append(other)
        self.install()

    def enter(self, me: MemberId) -> None:
        """The process enters the newest view: notices of before have been heard."""
        process = self.processes[me]
        while me not in self.entered and process.notices:
            self.put(me, em.MemberLost(member=process.notices.pop(0)))
        self.entered.add(me)

    def settle(self, me: MemberId) -> None:
        """It knows that all members of the view have entered it, if they have."""
        process = self.processes[me]
        if process.epoch == self.epoch or not self.entered.issuperset(self.view):
            return
        process.epoch = self.epoch
        self.put(me, em.Settled(epoch=self.epoch, members=self.view))

    def heal(self) -> None:
        """No more faults: all come to the last view, and everything that is under way arrives."""
        for me in self.living.values():
            self.enter(me)
        for me in self.living.values():
            self.settle(me)
        busy = True
        while busy:
            busy = False
            for pair in list(self.links):
                while self.links[pair] and pair[1] in self.living.values():
                    self.deliver(pair)
                    busy = True
            for me in self.living.values():
                while self.processes[me].held:
                    self.take(me)
                    busy = True


def test_histories_of_deaths_returns_and_lost_links() -> None:
    print(f"fresh seeds from {FRESH}")
    failed = taken = 0
    for seed in range(FRESH, FRESH + 60):
        world = World(seed)
        for _ in range(STEPS):
            world.step()
        world.heal()
        failed, taken = failed + world.failed, taken + len(world.taken)
        for me in world.living.values():
            process = world.processes[me]
            for rank in world.living:
                assert process.machine.way(rank) is Way.UP, (seed, me, rank)
            for source, _ in process.receives.values():
                assert source is None or source in world.living, (seed, me, f"waits for rank {source}")
            # What has not been taken is there: nobody has asked for it yet.
            for key, to in process.sends.items():
                there = world.processes[world.living[to]].here.values()
                assert any(key == its for _, its, _ in there), (seed, me, to)
        for me in world.living.values():  # and every two can still talk
            for to in world.living:
                for tag in range(TAGS):
                    world.send(me, to, tag)
        world.heal()
        for me in list(world.living.values()):
            while world.processes[me].machine.unexpected:
                world.receive(me, None, None)
                world.heal()
            assert not world.processes[me].here
        assert all(not world.processes[me].sends for me in world.living.values()), seed
    assert failed > 100 and taken > 1000, (failed, taken)


def _tell_nobody(self: ElasticTagMachine, rank: int, cause: tm.Cause) -> list[em.ElasticTagAction]:
    return []


def test_recorded_histories_replay_identical_from_any_state_and_a_mutant_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    origin = capture.Origin(process="rank0", incarnation=1)
    recorder = capture.LogRecorder(tmp_path, origin, capture.Clocks(hybrid=HybridClock()))
    world = World(seed, recorder)
    for victim in (1, 2):  # one who is waited for in vain, whatever else the history has
        for _ in range(STEPS // 2):
            world.step()
        world.start_missing()
        world.start_missing()
        world.heal()
        world.receive(world.living[0], victim, TAGS)
        world.kill(world.living[victim])
        world.heal()
    recorder.close()
    found = list(capture.replay_log(tmp_path, secrets={}))
    assert len(found) == len(world.processes)
    assert all(isinstance(verdict, capture.Identical) for verdict in found), found
    (log,) = capture.open_log(tmp_path).processes
    assert follow_all(log, random.Random(seed)) == {"elastic-tags"}
    monkeypatch.setattr(ElasticTagMachine, "_lose", _tell_nobody)
    assert any(isinstance(v, capture.Divergence) for v in capture.replay_log(tmp_path, secrets={}))


def members(*ranks: int, incarnation: int = 1) -> tuple[MemberId, ...]:
    return tuple(MemberId(rank=rank, incarnation=incarnation) for rank in ranks)


def opened(*ranks: int) -> ElasticTagMachine:
    """Rank 0's machine, in a session with these."""
    machine = ElasticTagMachine(0)
    machine.handle(em.Settled(epoch=1, members=members(0, *ranks)), now_ns=0)
    for rank in ranks:
        machine.handle(em.Greeted(source=rank, epoch=1, since=1), now_ns=0)
    return machine


def receive(machine: ElasticTagMachine, key: int, source: int | None) -> list[em.ElasticTagAction]:
    found = machine.handle(tm.ReceivePosted(key=key, source=source, tag=None), now_ns=0)
    machine.check_invariants()
    return found


def test_a_loss_is_told_at_once_to_who_waits_and_once_to_who_receives_from_anybody() -> None:
    machine = opened(1, 2)
    first = (1 << em.SESSION_BITS) + 1
    for key, source in ((1, 1), (2, 2)):
        assert receive(machine, key, source) == []
    machine.handle(tm.SendPosted(key=3, to=1, tag=0), now_ns=0)
    machine.handle(tm.Arrived(source=2, number=first, tag=0), now_ns=0)
    lost = machine.handle(em.MemberLost(member=members(1)[0]), now_ns=0)
    assert lost == [
        tm.FailSend(key=3, to=1, cause=tm.Cause.LOST),
        tm.FailReceive(key=1, ranks=(1,), cause=tm.Cause.LOST),
    ]
    assert receive(machine, 4, None) == [tm.FailReceive(key=4, ranks=(1,), cause=tm.Cause.LOST)]
    assert receive(machine, 5, None) == [], "it has its notice, and waits for the living"
    (failed,) = machine.handle(tm.SendPosted(key=6, to=1, tag=0), now_ns=0)
    assert failed == tm.FailSend(key=6, to=1, cause=tm.Cause.LOST)
    assert receive(machine, 7, 3) == [tm.FailReceive(key=7, ranks=(3,), cause=tm.Cause.ABSENT)]
    told = machine.handle(tm.MemberLeft(source=2), now_ns=0)
    assert told == [tm.FailReceive(key=5, ranks=(2,), cause=tm.Cause.LEFT)]


def test_what_came_before_a_death_can_be_taken_until_the_next_view() -> None:
    machine = opened(1)
    first = (1 << em.SESSION_BITS) + 1
    for number in (first, first + 1):
        machine.handle(tm.Arrived(source=1, number=number, tag=0), now_ns=0)
    machine.handle(em.MemberLost(member=members(1)[0]), now_ns=0)
    assert receive(machine, 1, 1) == [tm.Match(key=1, source=1, number=first)]
    assert machine.handle(tm.Took(source=1, number=first), now_ns=0) == [], "nobody is left to receive it"
    back = (*members(0), *members(1, incarnation=2))
    actions = machine.handle(em.Settled(epoch=2, members=back), now_ns=0)
    assert actions == [em.Dropped(source=1, number=first + 1), em.Greet(to=1, epoch=2, since=2)]
    assert receive(machine, 2, 1) == [], "it waits for the replacement"
    with pytest.raises(LocalProtocolError, match="cannot follow"):
        machine.handle(em.Settled(epoch=2, members=back), now_ns=0)
