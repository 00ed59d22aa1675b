"""Checkpoints that wait for the commit log: whoever is killed, none is ahead of it or lost to it."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from zbmd.training.checkpoint.held import commitment as m
from zbmd.training.checkpoint.held.commitment import Action, Commitment, State
from zbmd.transport.errors import LocalProtocolError

SEEDS, VERSIONS = 400, 5


@dataclass
class Host:
    """The snapshot process of one host, and what it knows of one checkpoint. ranks: of this host."""

    ranks: tuple[int, ...]
    machine: Commitment
    said: deque[m.Event] = field(default_factory=deque)
    asked: set[int] = field(default_factory=set)
    is_durable: bool = False


class World:
    """Ranks of some hosts that go from step to step, each with a checkpoint, and the log of their steps."""

    def __init__(self, seed: int, make: Callable[[], Commitment], *, all_speak: bool) -> None:
        self.draw, self.make, self.all_speak = random.Random(seed), make, all_speak
        self.ranks = self.draw.randint(1, 4)
        cuts = sorted({0, *(at for at in range(self.ranks) if self.draw.random() < 0.4)})
        homes = [max(cut for cut in cuts if cut <= rank) for rank in range(self.ranks)]
        self.groups = [tuple(rank for rank in range(self.ranks) if homes[rank] == cut) for cut in cuts]
        self.log = self.published = 0
        self.begun: list[tuple[int, list[Host]]] = []
        self.living = set(range(self.ranks))
        self.seen = Counter[str]()

    def run(self) -> None:
        version = 1
        while version <= VERSIONS and self.living:
            for host in (host for _, hosts in self.begun for host in hosts):
                host.said.append(m.Deserted())  # a newer checkpoint waits
            self.begun.append((version, [Host(ranks, self.make()) for ranks in self.groups]))
            version = self.attempt(version)
        if self.living:  # the end of the job, which all have voted for
            self.leave(set(self.living))
        while self.turn_host():
            pass
        version, hosts = self.begun[-1]
        assert all(host.machine.is_decided for host in hosts if host.is_durable), "it is held for ever"
        if self.log >= version and all(host.is_durable for host in hosts) and len(hosts) == 1:
            assert self.published == version, "the log has it, and it was dropped"

    def attempt(self, version: int) -> int:
        """Make one step, with kills; return the next one."""
        work = [self.rank_turns(rank, version) for rank in range(self.ranks)]
        kill_at = self.draw.choice([None, self.draw.randint(0, 40)])
        self.voted = set[int]()
        for turn in range(10_000):
            if turn == kill_at:
                killed = self.draw.choice([{self.draw.randrange(self.ranks)}, set(range(self.ranks))])
                self.leave(killed)
                return self.meet(version)
            if self.draw.random() < 0.5 and self.turn_host():
                continue
            if not work:
                return version + 1
            one = self.draw.choice(work)
            if next(one, "over") == "over":
                work.remove(one)
        raise AssertionError("a step never ends")

    def rank_turns(self, rank: int, version: int) -> Iterator[None]:
        """Hand the version over, vote for it, and say so once all have voted."""
        host = self.host_of(rank)
        host.asked.add(rank)
        yield
        self.voted.add(rank)
        while len(self.voted) < self.ranks:
            yield
        if rank == 0:
            yield
            self.log = max(self.log, version)
        yield
        if rank == host.ranks[0] or self.all_speak:
            host.said.append(m.Committed())

    def host_of(self, rank: int) -> Host:
        return next(host for host in self.begun[-1][1] if rank in host.ranks)

    def leave(self, ranks: set[int]) -> None:
        self.living -= ranks
        for host in (host for _, hosts in self.begun for host in hosts):
            if host.ranks[0] in ranks:
                host.said.append(m.Deserted())

    def meet(self, version: int) -> int:
        """The survivors go on from the version, or from that before it; the dead are replaced."""
        if not self.living:
            return version
        chosen = version if len(self.voted) == self.ranks else version - 1
        for host in self.begun[-1][1]:
            if chosen < version and host.ranks[0] in self.living:
                host.said.append(m.Withdrawn())
        self.log = max(self.log, chosen)  # whoever saw a commit logs it for the writer
        self.living = set(range(self.ranks))
        return chosen + 1

    def turn_host(self) -> bool:
        """Have one process go on; return whether one could."""
        ready = [
            (version, host)
            for version, hosts in self.begun
            for host in hosts
            if set(host.ranks) == host.asked and (not host.is_durable or host.said)
        ]
        if not ready:
            return False
        version, host = self.draw.choice(ready)
        if not host.is_durable:
            host.is_durable = True
            return True
        for action in host.machine.handle(host.said.popleft()):
            self.seen[action.name] += 1
            if action is Action.READ_LOG:
                host.said.appendleft(m.Judged(self.log >= version))
        self.check()
        return True

    def check(self) -> None:
        for version, hosts in self.begun:
            if all(host.is_durable and host.machine.state is State.COMMITTED for host in hosts):
                self.published = max(self.published, version)
        assert self.published <= self.log, "a checkpoint is ahead of the log"


def explored(make: Callable[[], Commitment] = Commitment, *, all_speak: bool = False) -> Counter[str]:
    found = Counter[str]()
    for seed in range(SEEDS):
        world = World(seed, make, all_speak=all_speak)
        world.run()
        found += world.seen
        found["published"] += world.published == VERSIONS
        found["cut"] += not world.published
    return found


def test_no_checkpoint_is_ahead_of_the_log_whoever_is_killed() -> None:
    found = explored()
    assert min(found[action.name] for action in Action) > SEEDS / 4
    assert min(found["published"], found["cut"]) > SEEDS / 20


class Hasty(Commitment):
    """Waits for nobody."""

    def handle(self, event: m.Event) -> list[Action]:
        return super().handle(m.Committed())


class Trusting(Commitment):
    """Takes silence for a commit."""

    def handle(self, event: m.Event) -> list[Action]:
        return super().handle(m.Committed() if isinstance(event, m.Deserted) else event)


@pytest.mark.parametrize(("make", "all_speak"), [(Hasty, False), (Trusting, False), (Commitment, True)])
def test_one_that_publishes_before_the_commit_is_found(make: type[Commitment], all_speak: bool) -> None:
    """So is a rank that speaks for the one that writes the log, before that has written it."""
    with pytest.raises(AssertionError, match="ahead of the log"):
        explored(make, all_speak=all_speak)


def test_one_that_drops_what_the_log_has_is_found() -> None:
    class Timid(Commitment):
        def handle(self, event: m.Event) -> list[Action]:
            return super().handle(m.Withdrawn() if isinstance(event, m.Judged) else event)

    with pytest.raises(AssertionError, match="the log has it, and it was dropped"):
        explored(Timid)


def test_a_word_after_the_decision_changes_nothing() -> None:
    machine = Commitment()
    with pytest.raises(LocalProtocolError):
        machine.handle(m.Judged(True))
    assert machine.handle(m.Deserted()) == [Action.READ_LOG]
    assert machine.handle(m.Deserted()) == []
    assert machine.handle(m.Committed()) == [Action.GO_ON]
    assert machine.handle(m.Judged(False)) == machine.handle(m.Withdrawn()) == []
    assert machine.state is State.COMMITTED
