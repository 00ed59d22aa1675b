"""The mirror of shards: simulated ranks that are killed between any two of their moves, one or more."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.buddy import ROW_NUMBERS, HoldingsRow
from zbmd.training.redundancy.machine import MIRROR, mirror_config
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle

MOVES_MAX = 20_000
TORN = -1
Moves = Generator[None, None, None]


def content(place: int, version: int) -> int:
    """What the shard of a place holds at a version, for a digest."""
    return 1 + place + 1000 * version


@given(hosts=st.lists(st.integers(0, 4), min_size=2, max_size=24))
def test_buddies_are_on_other_hosts_where_there_are_enough(hosts: list[int]) -> None:
    found = zm.buddies(hosts)
    assert sorted(found) == list(range(len(hosts)))
    assert all(buddy != place for place, buddy in enumerate(found))
    largest = max(hosts.count(host) for host in hosts)
    apart = sum(hosts[buddy] != hosts[place] for place, buddy in enumerate(found))
    assert apart == min(len(hosts), 2 * (len(hosts) - largest))


@dataclass(slots=True)
class Operation:
    """An operation of the group: it ends for a rank once all have entered it."""

    entered: dict[int, object] = field(default_factory=dict[int, object])


@dataclass(slots=True)
class Memory:
    """Of one incarnation: two slots of its shard, two of copies, as contents. Peers read it."""

    own: list[int]
    slots: list[int] = field(default_factory=lambda: [TORN, TORN])


class Cut(Exception):
    """The epoch is over."""


class World:
    """Ranks of one job. A move is whatever happens between two moments at which a rank can be killed."""

    def __init__(
        self,
        ranks: int,
        steps: int,
        luck: random.Random,
        hosts: Sequence[int] = (),
        keys: Sequence[int] = (),
    ) -> None:
        self.ranks, self.steps, self.luck = ranks, steps, luck
        self.keys, self.replicas = tuple(keys) or tuple(range(ranks)), bool(keys)
        self.hosts = tuple(hosts) or (0,) * ranks
        self.epoch = 0
        self.over = False
        self.known = 0
        """The commit log."""
        self.lost = ""
        self.finished: set[int] = set()
        self.ended: dict[int, int] = {}
        """What those who have come to the end of the run hold."""
        self.present = list(range(ranks))
        """Ranks that are there, or will be replaced."""
        self.members = list(self.present)
        """Of the epoch."""
        self.waiting: set[int] = set()
        self.operations: dict[tuple[int, str], Operation] = {}
        self.memories = [Memory([self.content(place, 0), TORN]) for place in range(ranks)]
        self.machines = [self.made(place) for place in range(ranks)]
        self.processes: list[Moves] = [self.process(place) for place in range(ranks)]

    def made(self, place: int) -> zm.Mirror:
        return zm.Mirror(place=place, ranks=self.ranks, known=self.known, replicas=self.replicas)

    def content(self, place: int, version: int) -> int:
        """What the shard of a place holds: ranks with equal keys hold the same."""
        return content(self.keys[place], version)

    def run(self, kills: Sequence[tuple[int, int]] = ()) -> int:
        """Go on to the end; at move k of each `(k, place)` that one is killed. Returns how many moves."""
        due = sorted(kills, reverse=True)
        for move in range(MOVES_MAX):
            while due and due[-1][0] <= move:
                self.kill(due.pop()[1])
            left = [place for place in self.present if place not in self.finished]
            if self.lost or not left:
                return move
            if self.over and self.waiting == set(self.present):
                self.epoch, self.over, self.members = self.epoch + 1, False, list(self.present)
                self.waiting.clear()
            place = self.luck.choice(left)
            try:
                next(self.processes[place])
            except StopIteration:
                self.finished.add(place)
        raise AssertionError(f"it does not end: {[machine.state for machine in self.machines]}")

    def kill(self, place: int) -> None:
        """A process ends between two moves; its replacement begins."""
        if self.ended:
            return
        self.over = True
        self.waiting.discard(place)
        self.memories[place] = Memory([self.content(place, 0), TORN])
        self.machines[place] = self.made(place)
        self.processes[place] = self.process(place)

    def process(self, place: int) -> Moves:
        """One incarnation, from its start to its end."""
        while not self.ended:  # who has ended, has left weights that are safe
            try:
                yield from self.in_epoch(place)
            except Cut:
                self.feed(place, zm.EpochOver())
            else:
                self.ended[place] = self.memories[place].own[self.steps % 2]
            epoch = self.epoch
            while not self.ended and (self.epoch == epoch or self.over):
                self.waiting.add(place)
                yield

    def feed(self, place: int, event: zm.Event) -> list[zm.Action]:
        return self.machines[place].handle(event, now_ns=0)

    def together(self, place: int, name: str, value: object = None) -> Generator[None, None, list[object]]:
        """Enter an operation, and wait for its end; it may be cut short though all have entered it."""
        operation = self.operations.setdefault((self.epoch, name), Operation())
        operation.entered[place] = value
        yield
        while len(operation.entered) < len(self.members):
            if self.over:
                raise Cut
            yield
        if self.over and self.luck.random() < 0.5:
            raise Cut
        return [operation.entered[other] for other in self.members]

    def in_epoch(self, place: int) -> Moves:
        if self.over:
            raise Cut
        machine = self.machines[place]
        held = yield from self.together(place, "meet", machine.held)
        entered = zm.Entered(
            held=tuple(h for h in held if isinstance(h, zm.Held)),
            hosts=tuple(self.hosts[rank] for rank in self.members),
            place=self.members.index(place),
            keys=tuple(self.keys[rank] for rank in self.members),
        )
        for action in self.feed(place, entered):
            yield from self.restore(place, action)
        if self.lost:
            return
        yield from self.together(place, "restored")
        while self.replicas and machine.version < self.steps:
            yield from self.step(place, machine)
        while machine.version < self.steps:
            if machine.version % 2:  # as before a checkpoint
                yield from self.commit(place, machine, "at once")
            yield from self.commit(place, machine)
            yield from self.update(place, machine)
        if not self.replicas:
            yield from self.commit(place, machine)  # of the last version, which no step follows
        yield from self.together(place, "end")

    def restore(self, place: int, action: zm.Action) -> Moves:
        memory = self.memories[place]
        match action:
            case zm.Restore(version=version, source=source):
                memory.own[version % 2] = TORN
                yield
                if self.over and self.luck.random() < 0.5:
                    raise Cut
                where = self.memories[self.members[source.place]]
                found = memory.own[version % 2] = (where.own if source.own else where.slots)[source.slot]
                assert found == self.content(place, version) or self.over, (
                    "a copy is not what it is said to be"
                )
                if self.over and found != self.content(place, version):
                    raise Cut
                for more in self.feed(place, zm.Restored(digest=found)):
                    yield from self.restore(place, more)
            case zm.StartAnew():
                memory.own[0] = self.content(place, 0)
            case zm.Resume(version=version):
                assert memory.own[version % 2] == self.content(place, version), (
                    "it goes on from what it does not hold"
                )
            case zm.Fail(lost=True, reason=reason):
                self.check_lost()
                self.lost = reason
            case _:
                raise AssertionError(action)

    def commit(self, place: int, machine: zm.Mirror, name: str = "") -> Moves:
        memory, version = self.memories[place], machine.version
        yield from self.together(place, f"first {name} {version}")
        for action in self.feed(place, zm.AllHold(version=version)):
            assert isinstance(action, zm.CopyWard)
            memory.slots[action.slot] = TORN
            yield
            whole = not (self.over and self.luck.random() < 0.5)
            if whole:
                copied = self.memories[action.ward].own[version % 2]
                if not self.over:
                    assert copied == self.content(action.ward, version), "a shard changed while it was copied"
                whole = copied == self.content(action.ward, version)  # of a dead ward nothing may be left
                memory.slots[action.slot] = copied if whole else TORN
            yield
            self.feed(place, zm.Copied(digest=memory.slots[action.slot] if whole else None))
            if not whole:
                raise Cut
        vote = (memory.own[version % 2], memory.slots[version % zm.SLOTS])
        votes = yield from self.together(place, f"norm {name} {version}", vote)
        actions = self.feed(place, zm.Voted(votes=tuple(v for v in votes if isinstance(v, tuple))))
        assert [type(action) for action in actions] == [zm.Commit]
        self.known = max(self.known, version)
        self.check_safe(version)

    def step(self, place: int, machine: zm.Mirror) -> Moves:
        """Among replicas: the update, then the vote."""
        memory, version = self.memories[place], machine.version + 1
        yield from self.together(place, f"reduce {version}")
        memory.own[version % 2] = TORN
        yield
        memory.own[version % 2] = self.content(place, version)
        self.feed(place, zm.Updated())
        yield
        told = yield from self.together(place, f"vote {version}", (memory.own[version % 2], 0))
        votes = tuple(vote for vote in told if isinstance(vote, tuple))
        actions = self.feed(place, zm.Voted(votes=votes))
        assert actions == [zm.Commit(version=version, digests=tuple(own for own, _ in votes))]
        self.known = max(self.known, version)
        self.check_safe(version)

    def update(self, place: int, machine: zm.Mirror) -> Moves:
        memory, version = self.memories[place], machine.version
        memory.own[(version + 1) % 2] = TORN
        yield
        memory.own[(version + 1) % 2] = self.content(place, version + 1)
        self.feed(place, zm.Updated())
        yield

    def where(self, place: int, version: int) -> bool:
        """Whether the shard of a place at a version is anywhere."""
        wanted = self.content(place, version)
        return any(wanted in one.own or wanted in one.slots for one in self.memories)

    def check_safe(self, version: int) -> None:
        """A version is committed only when each shard of it has its copy."""
        if not self.over and self.ranks > 1:
            for place in self.present:
                wanted, alike = self.content(place, version), [place]
                held = [memory.own if self.replicas else memory.slots for memory in self.memories]
                if self.replicas:
                    alike = [other for other in self.present if self.keys[other] == self.keys[place]]
                assert sum(wanted in slots for slots in held) >= len(alike)

    def check_lost(self) -> None:
        """The state is said to be lost only if it is."""
        for version in range(self.known, self.steps + 1):
            assert not all(self.where(place, version) for place in range(self.ranks)), version


def test_a_kill_at_any_moment_loses_nothing() -> None:
    for ranks, hosts in ((2, ()), (3, (0, 0, 1))):
        moves = World(ranks, 3, random.Random(ranks), hosts).run()
        for moment in range(moves):
            for place in range(ranks):
                world = World(ranks, 3, random.Random(ranks), hosts)
                world.run([(moment, place)])
                assert not world.lost and world.ended, (ranks, moment, place)
                assert world.ended == {rank: content(rank, 3) for rank in world.ended}


MESHES = [(0, 0, 0), (0, 1, 0, 1), (0, 0, 1, 1)]
"""Keys of `dp=3`, `dp=2,pp=2` and of a mesh whose last axis is `dp`."""


@pytest.mark.parametrize("keys", MESHES, ids=str)
def test_a_kill_at_any_moment_loses_nothing_that_another_rank_holds(keys: tuple[int, ...]) -> None:
    def made(seed: int) -> World:
        return World(len(keys), 3, random.Random(seed), (), keys)

    for moment in range(made(1).run()):
        for place in range(len(keys)):
            world = made(1)
            world.run([(moment, place)])
            assert not world.lost and world.ended, (moment, place)
            assert world.ended == {rank: content(keys[rank], 3) for rank in world.ended}


@given(
    seed=st.integers(0, 2**32),
    keys=st.sampled_from(MESHES),
    kills=st.lists(st.tuples(st.integers(0, 250), st.integers(0, 3)), max_size=5),
)
def test_any_kills_lose_only_what_no_rank_holds(
    seed: int, keys: tuple[int, ...], kills: list[tuple[int, int]]
) -> None:
    world = World(len(keys), 4, random.Random(seed), (), keys)
    world.run([(moment, place) for moment, place in kills if place < len(keys)])
    if not world.lost:
        assert world.ended == {rank: content(keys[rank], 4) for rank in world.ended}


def test_ranks_with_equal_keys_and_other_bits_end_the_run() -> None:
    mirror = zm.Mirror(place=0, ranks=2, replicas=True)
    mirror.handle(entered(mirror.held, mirror.held), now_ns=0)
    assert mirror.handle(zm.Updated(), now_ns=0) == []
    (action,) = mirror.handle(zm.Voted(votes=((4, 0), (6, 0))), now_ns=0)
    assert isinstance(action, zm.Fail) and not action.lost
    assert "places 0 and 1 hold the same state, and version 1 of it" in action.reason


def entered(*held: zm.Held) -> zm.Entered:
    """An epoch of replicas on one host, as the first one sees it."""
    return zm.Entered(held=held, hosts=(0,) * len(held), place=0, keys=(0,) * len(held))


class Shrinking(World):
    """Ranks of one key. A killed rank is not replaced, as long as another one is left."""

    def kill(self, place: int) -> None:
        if self.ended or place not in self.present:
            return
        super().kill(place)
        if len(self.present) > 1:
            self.present.remove(place)


@given(
    seed=st.integers(0, 2**32),
    kills=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 3)), max_size=5),
)
def test_replicas_go_on_with_fewer_ranks(seed: int, kills: list[tuple[int, int]]) -> None:
    world = Shrinking(4, 4, random.Random(seed), (), (0, 0, 0, 0))
    world.run(kills)
    if not world.lost:
        assert world.ended == {rank: content(0, 4) for rank in world.ended} and world.ended


def test_what_only_a_dead_rank_may_know_of_is_computed_again() -> None:
    """A version is prepared everywhere, and nobody is left who knows what it was made of."""
    held = zm.Held(own=(4, 5), known=4, copies=(None, None))
    found = zm.choose([held, held], keys=(0, 0), beyond=False)
    assert isinstance(found, zm.Choice) and found.version == 4
    knows = zm.Held(own=(None, None), known=5, copies=(None, None))
    found = zm.choose([held, knows], keys=(0, 0), beyond=False)
    assert isinstance(found, zm.Choice) and found.version == 5 and found.sources[1] is not None


@pytest.mark.parametrize("replicas", [True, False])
def test_what_is_written_again_is_not_held(replicas: bool) -> None:
    """A rank was ahead, and goes back: until the step is done again, its other slot may be torn."""
    mirror = zm.Mirror(place=0, ranks=2, replicas=replicas, own=(4, 5), known=4)
    other = zm.Held(own=(4, 3), known=4, copies=(None, None))
    mirror.handle(zm.Entered(held=(mirror.held, other), hosts=(0, 0), place=0), now_ns=0)
    assert (mirror.version, mirror.held.own) == (4, (4, None))


def test_a_mirror_goes_on_from_any_of_its_states() -> None:
    class Followed(World):
        """Before each event a machine is made anew, from its state: it answers alike."""

        def feed(self, place: int, event: zm.Event) -> list[zm.Action]:
            machine, states = self.machines[place], MIRROR.states
            follower = MIRROR.build(mirror_config(self.made(place)))
            assert states is not None
            states.restore(follower, states.encode(machine))
            answer = super().feed(place, event)
            assert follower.handle(event, now_ns=0) == answer
            assert states.encode(follower) == states.encode(machine)
            return answer

    for seed in range(20):
        Followed(3, 4, random.Random(seed)).run([(10 + 3 * seed, seed % 3)])


class InFiles(World):
    """What a rank holds outlives it; what was being written when it was killed is not whole."""

    def made(self, place: int) -> zm.Mirror:
        found = [
            next((v for v in range(self.steps + 1) if content(place, v) == held), None)
            for held in self.memories[place].own
        ]
        own = (found[0], found[1])
        return zm.Mirror(place=place, ranks=self.ranks, known=self.known, own=own, outlives=True)

    def kill(self, place: int) -> None:
        before = self.memories[place]
        super().kill(place)
        if not self.ended:
            self.memories[place] = before
            self.machines[place] = self.made(place)

    def check_safe(self, version: int) -> None:
        for place, memory in enumerate(self.memories):
            assert self.over or content(place, version) in memory.own


@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(1, 4),
    kills=st.lists(st.tuples(st.integers(0, 250), st.integers(0, 3)), max_size=8),
)
def test_what_lies_in_files_outlives_any_kills(seed: int, ranks: int, kills: list[tuple[int, int]]) -> None:
    world = InFiles(ranks, 4, random.Random(seed))
    world.run([(moment, place) for moment, place in kills if place < ranks])
    assert not world.lost
    assert world.ended == {rank: content(rank, 4) for rank in world.ended}


def test_a_file_that_is_gone_is_told_as_lost_state() -> None:
    moves = InFiles(2, 3, random.Random(0)).run()
    world = InFiles(2, 3, random.Random(0))
    made = world.made

    def without_file(place: int) -> zm.Mirror:
        if place == 1:
            world.memories[1] = Memory([TORN, TORN])
        return made(place)

    world.made = without_file  # type: ignore[method-assign]
    world.run([(moves - 20, 1)])
    assert "its file is gone" in world.lost


class Hasty(zm.Mirror):
    """A planted bug: a copy is taken for whole before it is written."""

    def check_invariants(self) -> None:
        pass

    def _all_hold(self, version: int) -> list[zm.Action]:
        actions = super()._all_hold(version)
        if actions:
            self.state = zm.State.COPIED
            self.copies[version % zm.SLOTS] = zm.Copy(ward=self.ward, version=version, digest=0)
        return []

    def _voted(self, votes: tuple[tuple[int, int], ...]) -> list[zm.Action]:
        own = [vote[0] for vote in votes]
        return super()._voted(tuple((one, own[self._buddies.index(at)]) for at, one in enumerate(own)))


class Forgetful(zm.Mirror):
    """A planted bug: a rank that is ahead goes on from its own version, whatever the others hold."""

    def _enter(self, event: zm.Entered) -> list[zm.Action]:
        ahead = max((version for version in self.own if version is not None), default=0)
        actions = super()._enter(event)
        if actions and isinstance(actions[0], zm.Resume) and ahead > self.version:
            self._target = ahead
            return self._resume()
        return actions


@pytest.mark.parametrize("bug", [Hasty, Forgetful])
def test_a_planted_bug_is_found(bug: type[zm.Mirror]) -> None:
    class Wrong(World):
        def made(self, place: int) -> zm.Mirror:
            return bug(place=place, ranks=self.ranks, known=self.known)

    with pytest.raises((AssertionError, LocalProtocolError)):
        for moment in range(200):
            for place in range(3):
                Wrong(3, 3, random.Random(moment)).run([(moment, place)])


@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(1, 5),
    kills=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 4)), max_size=5),
)
def test_any_kills_lose_only_what_is_nowhere_left(
    seed: int, ranks: int, kills: list[tuple[int, int]]
) -> None:
    luck = random.Random(seed)
    world = World(ranks, 4, luck, [luck.randrange(3) for _ in range(ranks)])
    world.run([(moment, place) for moment, place in kills if place < ranks])
    if not world.lost:
        assert world.ended == {rank: content(rank, 4) for rank in world.ended}


def test_a_rank_and_its_buddy_at_once_are_told_as_lost_state() -> None:
    held = [zm.Held(own=(6, 7), known=6, copies=(zm.Copy(ward=2, version=6, digest=1), None))]
    fresh = zm.Held(own=(0, None), known=0, copies=(None, None))
    found = zm.choose([*held, fresh, fresh])
    assert isinstance(found, zm.Lost)
    assert found.places == (1,)
    assert "a rank and its buddy were lost at once" in found.reason
    moves = World(2, 3, random.Random(0)).run()
    world = World(2, 3, random.Random(0))
    world.run([(moves - 20, 0), (moves - 20, 1)])
    assert "were lost at once" in world.lost


def test_a_copy_with_other_bits_ends_the_run() -> None:
    mirror = zm.Mirror(place=0, ranks=2)
    fresh = mirror.held
    entered = mirror.handle(zm.Entered(held=(fresh, fresh), hosts=(0, 0), place=0), now_ns=0)
    assert entered == [zm.StartAnew(), zm.Resume(version=0)]
    assert mirror.handle(zm.AllHold(version=0), now_ns=0) == [zm.CopyWard(ward=1, version=0, slot=0)]
    mirror.handle(zm.Copied(digest=5), now_ns=0)
    (action,) = mirror.handle(zm.Voted(votes=((4, 5), (6, 4))), now_ns=0)
    assert isinstance(action, zm.Fail) and not action.lost
    assert "at place 0 of version 0 of place 1 has digest 0000000000000005" in action.reason


def test_events_out_of_place_are_refused() -> None:
    mirror = zm.Mirror(place=0, ranks=2)
    for event in (zm.AllHold(version=0), zm.Copied(digest=1), zm.Voted(votes=()), zm.Updated()):
        with pytest.raises(LocalProtocolError):
            mirror.handle(event, now_ns=0)
    wrong = zm.Held(own=(0, None), known=0, copies=(zm.Copy(ward=2, version=0, digest=0), None))
    with pytest.raises(RemoteProtocolError):
        mirror.handle(zm.Entered(held=(mirror.held, wrong), hosts=(0, 0), place=0), now_ns=0)
    with pytest.raises(LocalProtocolError):
        zm.Mirror(place=2, ranks=2)


@given(
    own=st.tuples(st.sampled_from([None, 0, 6]), st.sampled_from([None, 7])),
    copies=st.tuples(*(st.none() | st.tuples(st.integers(0, 61), st.integers(0, 2**64 - 1)) for _ in "01")),
    places=st.lists(st.integers(0, 2**62), min_size=8, max_size=8),
)
def test_what_a_rank_says_comes_as_it_was_said(
    own: tuple[int | None, int | None],
    copies: tuple[tuple[int, int] | None, tuple[int, int] | None],
    places: list[int],
) -> None:
    first, second = (
        None if copy is None else zm.Copy(ward=copy[0], version=6 + slot, digest=copy[1])
        for slot, copy in enumerate(copies)
    )
    handles = tuple(
        RegionHandle(slot=3, incarnation=2, offset=offset, nbytes=nbytes, writable=False)
        for offset, nbytes in zip(places[::2], places[1::2], strict=True)
    )
    said = HoldingsRow(held=zm.Held(own=own, known=5, copies=(first, second)), handles=handles)
    assert HoldingsRow.decoded(said.encoded(), 3, 2) == said


@given(st.lists(st.integers(0, 2**64 - 1), min_size=0, max_size=20))
def test_whatever_numbers_a_peer_sends_are_a_row_or_refused(numbers: list[int]) -> None:
    padded = np.array(numbers + [0] * (ROW_NUMBERS - len(numbers)), np.uint64)
    for row in (padded[:ROW_NUMBERS], padded[:-1]):
        try:
            found = HoldingsRow.decoded(row, 0, 1)
        except RemoteProtocolError:
            continue
        assert found.held.known < 2**41
