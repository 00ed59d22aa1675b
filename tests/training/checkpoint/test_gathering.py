"""Hosts that write a checkpoint together: whatever is killed, slow or refused, what counts is whole."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.held import gathering
from zbmd.training.checkpoint.held.gathering import Do, Gathering, Seen, Sight, Task
from zbmd.training.checkpoint.held.messages import SaveShard
from zbmd.training.checkpoint.held.shared import Published, Shared
from zbmd.training.checkpoint.index import SHARDS_NAME, Retention, read_index
from zbmd.training.checkpoint.parts import PART_FORMAT, HostPart, decode_part, part_name
from zbmd.training.checkpoint.saving import TRIES
from zbmd.training.checkpoint.sharded import name_written, shard_name, stem_of
from zbmd.training.checkpoint.storage import Buffer, StoredFile
from zbmd.transport.errors import LocalProtocolError, UserError

SEEDS, VERSIONS, TASKS_MAX = 200, 5, 200


class Killed(BaseException):
    """The process that uses the store is killed, before or after what it asks for is done."""


class Store:
    """Files in memory, as one host sees them; `risk` of each call: to fail, or to kill its process."""

    def __init__(self, files: dict[str, bytes], draw: random.Random) -> None:
        self.files, self.draw = files, draw
        self.fails = self.kills = 0.0

    def risk(self) -> None:
        chance = self.draw.random()
        if chance < self.kills:
            raise Killed
        if chance < self.kills + self.fails:
            raise OSError("it answers nothing")

    def where(self, name: str = "") -> str:
        return f"store/{name}"

    def put(self, name: str, fragments: Sequence[Buffer]) -> None:
        data = b"".join(fragments)
        try:
            self.risk()
            assert name == SHARDS_NAME or self.files.get(name, data) == data, "two write other bytes"
            self.files[name] = data
            self.risk()  # or its answer is lost
        except OSError as error:
            raise UserError(f"cannot write {name}: {error}") from error

    def get(self, name: str, bytes_max: int) -> bytes:
        self.risk()
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name][:bytes_max]

    def open(self, name: str) -> StoredFile:
        raise AssertionError("no shard is read")

    def names(self) -> list[str]:
        self.risk()
        return sorted(self.files)

    def remove(self, name: str) -> None:
        self.risk()
        self.files.pop(name, None)

    def tidy(self, name: str) -> None:
        pass


def asked(version: int, homes: tuple[int, ...], place: int) -> SaveShard:
    return SaveShard(
        version=version, stem=stem_of(version, version), rank=place, place=place, homes=homes, block="b",
        counter=0, count=0, storage="store", log="log", plan="{}", loss_scale=(), keep=2, every=0,
        codec=Codec.NONE, pieces=(),
    )  # fmt: skip


@dataclass
class Host:
    """One snapshot process after the other, and the checkpoints that its ranks have asked for."""

    first: int
    store: Store
    queue: deque[SaveShard] = field(default_factory=deque)
    now_ns: int = 1
    work: Iterator[None] | None = None
    looked: int = 0
    """Checkpoints whose parts were all there when it looked, with nothing refused."""

    def turn(self) -> None:
        """Go on by one task; whoever is killed forgets what it was asked for."""
        if self.work is None and self.queue:
            self.work = self.written(self.queue[0])
        try:
            if self.work is not None:
                next(self.work)
        except StopIteration:
            self.work = None
            self.queue.popleft()
        except Killed:
            self.work = None
            self.queue.clear()

    def written(self, request: SaveShard) -> Iterator[None]:
        """Write one checkpoint, as `HeldCheckpoints` does."""
        shared = Shared(self.store, request, Published.of(self.store))
        headers = {place: f"{request.version:08x}{place:08x}" if place % 3 else "" for place in request.here}
        for place in [place for place in headers if headers[place]]:
            try:
                self.store.put(shard_name(request.stem, place), [b"shard"])
            except UserError:
                return  # it gives up before its part is there
            yield
        machine, superseded, failed, whole = Gathering(), False, False, False
        parts = {part_name(request.stem, home) for home in request.homes}
        actions = machine.begin(now_ns=self.now_ns)
        for _ in range(TASKS_MAX):
            todo = [each for each in actions if isinstance(each, Do)]
            assert len(todo) <= 1
            if not todo:
                assert machine.task is None
                if whole and not failed:
                    self.looked += 1
                    assert read_index(Store(self.store.files, self.store.draw)).version >= request.version
                return
            yield
            if len(self.queue) > 1 and not superseded:
                superseded = True
                event: gathering.Event = gathering.Superseded()
            else:
                self.now_ns = max(self.now_ns, todo[0].at_ns)
                whole = whole or (todo[0].task is Task.LOOK and parts <= self.store.files.keys())
                event = shared.done(todo[0].task, headers)
                failed = failed or isinstance(event, gathering.Failed)
            actions = machine.handle(event, now_ns=self.now_ns)
        raise AssertionError("it never ends")


class World:
    """Hosts with a rank or more each, and the store that they share."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        ranks = self.draw.randint(2, 6)
        cuts = sorted({0, *self.draw.sample(range(1, ranks), self.draw.randint(1, min(3, ranks - 1)))})
        self.homes = tuple(max(cut for cut in cuts if cut <= place) for place in range(ranks))
        self.files: dict[str, bytes] = {}
        self.hosts = [Host(first, Store(self.files, self.draw)) for first in cuts]
        self.counted = 0

    def break_things(self, fails: float, kills: float) -> None:
        for host in self.hosts:
            host.store.fails, host.store.kills = fails, kills

    def hand_over(self, version: int, hosts: Sequence[Host]) -> None:
        for host in hosts:
            host.queue.append(asked(version, self.homes, host.first))

    def turn(self) -> None:
        self.draw.choice(self.hosts).turn()
        self.check()

    def write_by_ranks(self, version: int) -> None:
        """The ranks have lost a snapshot process: they write a checkpoint themselves."""
        store, stem = Store(self.files, self.draw), stem_of(version, 99)
        headers = {place: f"{place:016x}" for place in range(len(self.homes)) if place % 3}
        for place in headers:
            store.put(shard_name(stem, place), [b"shard"])
        name_written(store, stem, headers, version=version, plan="{}")
        self.check()

    def check(self) -> None:
        """Require that what counts is whole, and never older than before."""
        if SHARDS_NAME not in self.files:
            return
        names = read_index(Store(self.files, self.draw))
        assert set(names.files) <= self.files.keys(), "what counts is not whole"
        assert names.files == tuple(
            shard_name(names.stem, place) for place in range(len(self.homes)) if place % 3
        )
        assert names.version >= self.counted
        self.counted = names.version

    def finish(self) -> None:
        self.break_things(0.0, 0.0)
        for _ in range(5000):
            if not any(host.queue for host in self.hosts):
                return
            self.turn()
        raise AssertionError("hosts never end")


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_what_counts_is_whole_whatever_is_killed(first: int) -> None:
    """And what all hosts have written is published if one of them lives to look, or a later one is."""
    published = dropped = looked = 0
    for seed in range(first, first + 50):
        world = World(seed)
        draw = world.draw
        for version in range(1, VERSIONS):
            world.break_things(draw.choice([0.0, 0.1, 0.4]), draw.choice([0.0, 0.0, 0.05, 0.2]))
            hosts = world.hosts if draw.random() < 0.7 else draw.sample(world.hosts, len(world.hosts) - 1)
            world.hand_over(version, hosts)  # a rank of the others was killed before it could ask
            for _ in range(draw.randint(0, 60)):
                world.turn()
            if draw.random() < 0.2:
                world.write_by_ranks(version)
        world.finish()
        published, dropped = published + (world.counted > 0), dropped + (world.counted < VERSIONS - 1)
        world.hand_over(VERSIONS, world.hosts)
        world.finish()
        assert world.counted == VERSIONS, seed
        looked += sum(host.looked for host in world.hosts)
        names = read_index(world.hosts[0].store)
        assert not Retention().removed(world.files, names), "nothing is left but what is kept"
    assert published > 10 and dropped > 10 and looked > 100


def test_whoever_lives_publishes_what_the_others_have_written() -> None:
    """All processes but one are killed at each call of the store, from their part on."""
    for kill_at in range(1, 40):
        world = World(1)
        world.hand_over(1, world.hosts)
        *others, survivor = world.hosts
        for host in others:
            calls = 0

            def risk(store: Store = host.store, host: Host = host, at: int = kill_at) -> None:
                nonlocal calls
                calls += part_name(stem_of(1, 1), host.first) in store.files
                if calls == at:
                    raise Killed

            host.store.risk = risk  # type: ignore[method-assign]
        while any(host.queue for host in world.hosts):
            for host in (*others, survivor):  # it looks last, in each turn
                host.turn()
            world.check()
        assert world.counted == 1, kill_at


def begun() -> Gathering:
    machine = Gathering()
    assert machine.begin(now_ns=5) == [Do(Task.PUT_PART, 5)]
    return machine


def test_a_part_that_is_refused_is_given_up_and_told_once() -> None:
    machine, told = begun(), list[gathering.Action]()
    for _ in range(TRIES):
        told += machine.handle(gathering.Failed(Task.PUT_PART, "full"), now_ns=5)
    assert [each.gave_up for each in told if isinstance(each, gathering.TellFailure)] == [False, True]
    waits = [each.at_ns for each in told if isinstance(each, Do)]
    assert len(waits) == TRIES - 1 and waits == sorted(set(waits)) and machine.task is None


def test_looks_are_bounded_and_a_newer_one_ends_them() -> None:
    machine, now_ns, looks = begun(), 5, 0
    actions = machine.handle(gathering.Done(Task.PUT_PART), now_ns=now_ns)
    assert actions[0] == gathering.TellPart()
    while actions:
        (todo,) = (each for each in actions if isinstance(each, Do))
        now_ns, looks = todo.at_ns, looks + 1
        actions = machine.handle(Seen(Sight.MISSING), now_ns=now_ns)
    assert now_ns - 5 <= gathering.LOOKING_NS_MAX and 10 < looks < 30 and not machine.is_published
    machine = begun()
    machine.handle(gathering.Done(Task.PUT_PART), now_ns=5)
    machine.handle(Seen(Sight.MISSING), now_ns=5)
    assert machine.handle(gathering.Superseded(), now_ns=6) == [Do(Task.LOOK, 6)]
    assert machine.handle(Seen(Sight.WHOLE), now_ns=6) == [Do(Task.PUBLISH, 6)]
    assert machine.handle(gathering.Done(Task.PUBLISH), now_ns=7) == [gathering.TellPublished()]
    assert machine.handle(Seen(Sight.MISSING), now_ns=8) == []


def test_an_index_that_cannot_be_written_is_looked_for_again() -> None:
    machine = begun()
    machine.handle(gathering.Done(Task.PUT_PART), now_ns=5)
    machine.handle(Seen(Sight.WHOLE), now_ns=5)
    told, todo = machine.handle(gathering.Failed(Task.PUBLISH, "full"), now_ns=5)
    assert isinstance(told, gathering.TellFailure) and isinstance(todo, Do) and todo.task is Task.LOOK
    with pytest.raises(LocalProtocolError):
        machine.handle(gathering.Done(Task.PUBLISH), now_ns=6)
    assert machine.handle(Seen(Sight.PUBLISHED), now_ns=6) == [gathering.TellPublished()]


def test_a_later_one_that_was_published_meanwhile_counts_and_stays() -> None:
    """The hosts are slow, and the ranks have written another one themselves."""
    world = World(1)
    requests = [asked(5, world.homes, host.first) for host in world.hosts]
    shared = [Shared(host.store, each, Published()) for host, each in zip(world.hosts, requests, strict=True)]
    for one, request in zip(shared, requests, strict=True):
        headers = {place: f"{place:016x}" for place in request.here}
        for place in headers:
            one.storage.put(shard_name(request.stem, place), [b"shard"])
        assert one.done(Task.PUT_PART, headers) == gathering.Done(Task.PUT_PART)
    assert {one.done(Task.LOOK, {}) for one in shared} == {Seen(Sight.WHOLE)}
    there = dict(world.files)
    world.write_by_ranks(6)
    assert not [name for name in there if name in world.files], "it has taken their place"
    world.files |= there  # a removal that is slower than the look
    assert {one.done(Task.LOOK, {}) for one in shared} == {Seen(Sight.OVERTAKEN)}
    for one in shared:
        failed = one.done(Task.PUBLISH, {})
        assert isinstance(failed, gathering.Failed) and "a later one was published" in failed.reason
    world.check()
    later = {name: data for name, data in world.files.items() if "-6-" in name}
    del world.files[SHARDS_NAME]  # as a host saw it before, whose publication comes late
    assert shared[0].done(Task.PUBLISH, {}) == gathering.Done(Task.PUBLISH)
    assert later.items() <= world.files.items()
    assert {one.done(Task.LOOK, {}) for one in shared} == {Seen(Sight.PUBLISHED)}


def test_parts_of_others_are_refused() -> None:
    world = World(2)
    host = world.hosts[0]
    shared = Shared(host.store, asked(5, world.homes, 0), Published())
    other = Shared(host.store, msgspec.structs.replace(asked(5, world.homes, 0), plan="2"), Published())
    for each in world.hosts:
        places = asked(5, world.homes, each.first).here
        other.done(Task.PUT_PART, dict.fromkeys(places, "0" * 16))
    seen = shared.done(Task.LOOK, {})
    assert isinstance(seen, gathering.Failed) and "of another plan or version" in seen.reason
    name = part_name(stem_of(5, 5), 0)
    for data in (b"", b"{}", world.files[name].replace(b"0000", b"0001", 1), b"x" * (1 << 20) + b"x"):
        world.files[name] = data
        assert isinstance(other.done(Task.LOOK, {}), gathering.Failed)


def test_no_byte_of_a_part_changes_unnoticed() -> None:
    headers = {0: "0123456789abcdef", 1: "", 2: "f" * 16}
    data = HostPart(format=PART_FORMAT, checkpoint="a" * 16, headers=headers).encode()
    assert decode_part(data, "a" * 16) == headers
    for at in range(len(data)):
        for mask in (0x01, 0x11, 0x80):
            damaged = data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
            with pytest.raises(ValueError):
                decode_part(damaged, "a" * 16)
    for cut in range(len(data)):
        with pytest.raises(ValueError):
            decode_part(data[:cut], "a" * 16)
