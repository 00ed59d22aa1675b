"""The machine of checkpoints: ranks with any speeds, failures and losses agree on each checkpoint."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from zbmd.training.checkpoint import saving
from zbmd.training.checkpoint.saving import BACK_OFF_NS_MAX, HURRIED_TRIES, TRIES, Progress, Report, Saving

SEEDS = 200
STEPS = 60


@dataclass
class Rank:
    """One rank: its machine, and the work of its thread that has not ended."""

    machine: Saving = field(default_factory=Saving)
    work: list[saving.Action] = field(default_factory=list)
    told: list[saving.Action] = field(default_factory=list)
    now_ns: int = 0

    def put(self, event: saving.Event) -> None:
        for action in self.machine.handle(event, now_ns=self.now_ns):
            if isinstance(action, saving.Rehearse):
                assert action.version == self.machine.published
            elif isinstance(action, (saving.TellFailure, saving.TellSuccess)):
                self.told.append(action)
            else:
                self.work.append(action)


class World:
    """Ranks, the storage that they share, a snapshot process now and then, and what breaks."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.ranks = [Rank() for _ in range(self.draw.randint(1, 4))]
        self.every, self.wrote, self.published = (
            self.draw.randint(1, 7),
            set[tuple[int, int, int]](),
            list[int](),
        )
        self.breaks, self.view, self.asked = True, 0, False
        self.held: int | None = None
        """The version that a snapshot process writes,"""
        self.apart = False
        """or several ones, each for one rank."""
        self.enter()

    def enter(self) -> None:
        self.view += 1
        for number, rank in enumerate(self.ranks):
            rank.put(saving.NewView(first=number == 0))

    def lose(self) -> None:
        """One rank is replaced by one that knows nothing; its thread ends with it."""
        number = self.draw.randrange(len(self.ranks))
        self.ranks[number] = Rank(now_ns=self.ranks[number].now_ns)
        for rank in self.ranks:
            rank.work.clear()
        self.held = None
        self.enter()

    def work(self, number: int) -> None:
        """Do the next work of a thread, or fail."""
        rank = self.ranks[number]
        if not rank.work:
            return
        action = rank.work.pop(0)
        if isinstance(action, (saving.Write, saving.Publish)):
            assert action.at_ns - rank.now_ns <= BACK_OFF_NS_MAX
            rank.now_ns = max(rank.now_ns, action.at_ns)
        match action:
            case saving.Stage(version=version) | saving.Write(version=version):
                if self.breaks and self.draw.random() < 0.5:
                    rank.put(saving.Failed(version, "full"))
                    return
                self.wrote.add((self.view, version, number))
                has = number == 0 or self.draw.random() < 0.8
                rank.put(saving.Wrote(version, has, number + 1))
            case saving.Publish(version=version, headers=headers):
                assert number == 0 and all(header == rank + 1 for rank, header in headers)
                every = {(self.view, version, other) for other in range(len(self.ranks))}
                assert every <= self.wrote, "published before all have written"
                if self.breaks and self.draw.random() < 0.3:
                    rank.put(saving.Failed(version, "full"))
                    return
                self.published.append(version)
                rank.put(saving.Published(version))
            case saving.Remove(version=version):
                assert number == 0, "others than the first remove"
                assert not self.apart or version != self.held, "others may make it whole"
            case _:
                raise AssertionError(f"a thread does {action}")

    def hold(self, version: int) -> None:
        """The snapshot process writes, publishes, gives up, or is lost, which not all ranks see at once."""
        end, ranks = self.draw.random(), self.ranks
        if self.apart and end >= 0.2:
            self.hold_apart(version, end)
            return
        if self.breaks and end < 0.2:
            for rank in self.draw.sample(ranks, self.draw.randint(1, len(ranks))):
                rank.put(saving.WriterLost(version))
        elif self.breaks and end < 0.3:
            ranks[0].put(saving.Failed(version, "full", final=True))
        elif end < 0.7:
            ranks[0].put(saving.Failed(version, "full", retried=True))
            return
        else:
            if self.held is not None:
                self.published.append(version)
            for rank in ranks:
                rank.put(saving.Published(version))
        self.held = None

    def hold_apart(self, version: int, end: float) -> None:
        """One process writes its shard, gives up, or publishes if all have written theirs."""
        number = self.draw.randrange(len(self.ranks))
        rank, wrote = self.ranks[number], [(self.view, version, each) for each in range(len(self.ranks))]
        if self.wrote.issuperset(wrote):
            self.published.append(version)
            rank.put(saving.Published(version))
            self.held = None  # the others leave: they have said that theirs are written
        elif self.breaks and end < 0.3:
            rank.put(saving.Failed(version, "full", final=True))
            self.held = None
        else:
            self.wrote.add(wrote[number])
            rank.put(saving.Wrote(version, True, number + 1))

    def step(self, version: int) -> None:
        """All ranks do one step: they vote, take the votes, and come to `version`."""
        reports = tuple(rank.machine.report for rank in self.ranks)
        wishes = any(rank.machine.asks for rank in self.ranks)
        for number in self.draw.sample(range(len(self.ranks)), len(self.ranks)):
            for _ in range(self.draw.randint(0, 2)):
                self.work(number)
        for rank in self.ranks:
            rank.put(saving.Voted(reports))
        if self.held is not None:
            self.hold(self.held)
        due, pending = version % self.every == 0 or wishes, self.ranks[0].machine.pending
        for rank in self.ranks:
            rank.put(saving.Reached(version, due))
        if pending is None and self.ranks[0].machine.pending == version and self.draw.random() < 0.5:
            self.held, self.apart = version, self.draw.random() < 0.5
            for rank in self.ranks:
                assert rank.work[-1] == saving.Stage(version)
                rank.work.clear()
                if self.apart:
                    rank.put(saving.Apart(version))
        assert len({rank.machine.pending for rank in self.ranks}) == 1, "ranks differ"


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_ranks_agree_whatever_fails(first: int) -> None:
    """And once nothing breaks any more, a checkpoint is published, which all know of."""
    for seed in range(first, first + 50):
        world = World(seed)
        for version in range(1, STEPS):
            if world.draw.random() < 0.1:
                world.lose()
            world.step(version)
        world.breaks = False
        known = len(world.published)
        for version in range(STEPS, STEPS + 30):
            world.step(version)
        assert len(world.published) > known, seed
        assert len({rank.machine.published for rank in world.ranks}) == 1
        assert world.published == sorted(world.published)
        for rank in world.ranks:  # failures and successes take turns
            kinds = [type(each) for each in rank.told]
            assert all(one is not two for one, two in itertools.pairwise(kinds)), seed
            assert not rank.machine.asks


@pytest.mark.parametrize("apart", [False, True])
def test_a_lost_snapshot_process_is_lost_to_all_and_its_checkpoint_follows_at_once(apart: bool) -> None:
    """Its files are removed, unless there are other processes, which may make it whole."""
    ranks = [begun(), begun(first=False)]
    for rank in ranks if apart else []:
        rank.put(saving.Apart(3))
    ranks[0].put(saving.Failed(3, "full", retried=True))
    assert ranks[0].told == [saving.TellFailure(3, "full")] and not ranks[0].work, "it tries again by itself"
    ranks[1].put(saving.WriterLost(3))
    reports = tuple(rank.machine.report for rank in ranks)
    for rank in ranks:
        rank.put(saving.Voted(reports))
        assert rank.machine.pending is None and rank.machine.asks and rank.machine.lost
    assert ranks[0].work == ([] if apart else [saving.Remove(3)]) and not ranks[1].work
    ranks[0].put(saving.Reached(4, due=True))
    assert not ranks[0].machine.asks and not ranks[0].machine.lost


def test_what_is_published_is_so_even_if_its_process_is_lost_then() -> None:
    rank = begun()
    rank.put(saving.Published(3))
    rank.put(saving.WriterLost(3))
    rank.put(saving.Voted((Report(Progress.LOST), Report(Progress.GAVE_UP), rank.machine.report)))
    assert rank.machine.published == 3 and not rank.machine.asks


def begun(first: bool = True) -> Rank:
    rank = Rank()
    rank.put(saving.NewView(first=first))
    rank.put(saving.Reached(3, due=True))
    assert rank.work == [saving.Stage(3)]
    rank.work.clear()
    return rank


def test_tries_are_bounded_and_wait_longer_each_time() -> None:
    rank, waits = begun(), list[int]()
    while rank.machine.report.progress is Progress.UNDER_WAY:
        rank.put(saving.Failed(3, "full"))
        waits += [each.at_ns for each in rank.work if isinstance(each, saving.Write)]
        rank.work.clear()
    assert len(waits) == TRIES - 1 and waits == sorted(set(waits))
    assert rank.told == [saving.TellFailure(3, "full")]
    rank.put(saving.Voted((rank.machine.report, Report())))
    assert rank.machine.pending is None and rank.work == [saving.Remove(3)]
    rank.put(saving.Reached(4, due=True))
    rank.put(saving.Failed(4, "full"))
    assert len(rank.told) == 1, "it is reported once"
    rank.put(saving.Wrote(4, True, 9))
    rank.put(saving.Voted((rank.machine.report,)))
    rank.put(saving.Published(4))
    rank.put(saving.Voted((rank.machine.report,)))
    assert rank.told[1:] == [saving.TellSuccess(4)]


def test_those_who_wait_do_not_wait_for_its_time() -> None:
    rank = begun()
    rank.put(saving.Hurry())
    for left in reversed(range(HURRIED_TRIES)):
        rank.put(saving.Failed(3, "full"))
        assert (rank.machine.report.progress is Progress.GAVE_UP) == (left == 0)
    assert rank.work == [saving.Write(3, 0)]


def test_what_is_due_meanwhile_follows() -> None:
    rank = begun(first=False)
    rank.put(saving.Reached(4, due=True))
    assert not rank.work
    rank.put(saving.Wrote(3, False, 0))
    rank.put(saving.Voted((Report(Progress.PUBLISHED, 1), rank.machine.report)))
    assert rank.machine.published == 3
    rank.put(saving.Reached(5, due=False))
    assert rank.work == [saving.Stage(5)]
    rank.put(saving.Wrote(3, True, 7))
    assert rank.machine.report == Report(), "an end that came late is of another checkpoint"
