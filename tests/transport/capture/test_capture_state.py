"""States of machines: what is restored goes on as the machine would have, and replays begin there."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.directory import events as de
from zbmd.actors.directory.machine import DIRECTORY, DirectoryMachine
from zbmd.tools.replay import players as replay_kinds
from zbmd.transport import capture
from zbmd.transport.capture import tap as tap_module
from zbmd.transport.capture.records import EventTaken, StateTaken
from zbmd.transport.capture.registry import STATE_BYTES_MAX, MachineKind, StateCodec, StateTag
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import LocalProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Keep an item; every other one twice, in one list."""

    item: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The number of items kept, and the oldest of the last three."""

    count: int
    oldest: int


@dataclass(slots=True)
class Shelf:
    """Something of the machine's own that changes."""

    items: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class Rack:
    """`Shelf` under a new name."""

    captured_as: ClassVar[str] = "Shelf"

    items: list[int] = field(default_factory=list[int])


class Keeper:
    """Its two shelves may be one; its state has one of everything else that a state may have."""

    def __init__(self) -> None:
        self.first = Shelf()
        self.second = self.first
        self.last: deque[int] = deque(maxlen=3)
        self.seen: set[tuple[str, int]] = set()
        self.sizes: dict[int, frozenset[bytes]] = {}

    def handle(self, event: Put, *, now_ns: int) -> list[Kept]:
        """Keep it."""
        if event.item == 7:
            self.second = Shelf()
        self.first.items.append(event.item)
        self.second.items.append(event.item)
        del self.first.items[:-10], self.second.items[:-10]
        self.last.append(event.item)
        self.seen.add((f"at {now_ns % 3}", event.item))
        self.sizes[event.item] = frozenset({bytes([event.item % 256]), b""})
        return [Kept(count=len(self.first.items) + 100 * len(self.seen), oldest=self.last[0])]

    def check_invariants(self) -> None:
        """At most three are the last."""
        assert len(self.last) <= 3


KEEPER: MachineKind[Put, Kept] = capture.register(
    "test.keeper", 1, lambda config: Keeper(), events=Put, actions=Kept, states=(Keeper,)
)


def codec(kind: MachineKind[Any, Any]) -> StateCodec:
    assert kind.states is not None
    return kind.states


@given(st.lists(st.integers(0, 20)), st.lists(st.integers(0, 20)))
def test_what_is_restored_goes_on_as_the_machine_would(before: list[int], after: list[int]) -> None:
    machine, restored = Keeper(), Keeper()
    for at_ns, item in enumerate(before):
        machine.handle(Put(item=item), now_ns=at_ns)
    state = codec(KEEPER).encode(machine)
    codec(KEEPER).restore(restored, state)
    assert (restored.first is restored.second) == (machine.first is machine.second)
    for at_ns, item in enumerate(after):
        assert restored.handle(Put(item=item), now_ns=at_ns) == machine.handle(Put(item=item), now_ns=at_ns)
    assert codec(KEEPER).encode(restored) == codec(KEEPER).encode(machine)


class ShelfHolder:
    """A machine with a shelf."""

    captured_as: ClassVar[str] = "Holder"

    def __init__(self) -> None:
        self.kept = Shelf()


class RackHolder:
    """The same machine after its class and that of its shelf were renamed."""

    captured_as: ClassVar[str] = "Holder"

    def __init__(self) -> None:
        self.kept = Rack()


def test_a_state_survives_that_its_classes_are_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def codec_without(hidden: str, root: type[Any]) -> StateCodec:
        """The codec that `root` would have if the module did not name the class `hidden`."""
        with monkeypatch.context() as patch:
            patch.delattr(sys.modules[__name__], hidden)
            return StateCodec((root,))

    before, after = codec_without("Rack", ShelfHolder), codec_without("Shelf", RackHolder)
    assert after.fingerprint == before.fingerprint
    machine, restored = ShelfHolder(), RackHolder()
    machine.kept.items.extend([3, 4])
    after.restore(restored, before.encode(machine))
    assert restored.kept == Rack(items=[3, 4])


def test_a_directory_goes_on_from_any_of_its_states() -> None:
    me, other = ("rank0", 1), ("rank1", 1)
    key: de.Key = ("rank1", 1, "worker", 1)
    mine: de.Key = ("rank0", 1, "worker", 1)
    machine, followers = DIRECTORY.build({"me": list(me)}), list[Any]()
    probe = DirectoryMachine(me)
    probe.handle(de.ViewBegun(epoch=1, members=(me, other)), now_ns=0)
    kept_here = next(name for name in "abcdef" if probe.home(name) == me)
    asked = de.NameAsk(epoch=1, call=1, what=de.What.REGISTER, name=kept_here, key=key)
    events: list[de.Event] = [
        de.GroupJoined(group="g", key=mine),
        de.ViewBegun(epoch=1, members=(me, other)),
        de.Asked(call=1, what=de.What.REGISTER, name="first", key=mine),
        de.LinkUp(process=other),
        de.MessageReceived(source=other, message=de.Here(epoch=1, groups={"g": [key]}, names={})),
        *(de.Asked(call=2 + i, what=de.What.LOOK_UP, name=name) for i, name in enumerate("abcdef")),
        de.MessageReceived(source=other, message=asked),
        de.GivenUp(call=3),
        de.LinkDown(process=other),
        de.ViewBegun(epoch=2, members=(me,)),
        de.Ended(key=mine),
    ]
    for at_ns, event in enumerate(events):
        followers.append(DIRECTORY.build({"me": list(me)}))
        codec(DIRECTORY).restore(followers[-1], codec(DIRECTORY).encode(machine))
        answer = machine.handle(event, now_ns=at_ns)
        assert all(follower.handle(event, now_ns=at_ns) == answer for follower in followers)
        assert {codec(DIRECTORY).encode(follower) for follower in followers} == {
            codec(DIRECTORY).encode(machine)
        }


def test_every_machine_that_decides_can_be_played_from_a_state() -> None:
    without = {
        kind.name for kind in vars(replay_kinds).values() if isinstance(kind, MachineKind) and not kind.states
    }
    assert without <= {"actor", "hello"}  # an actor is any code; a hello holds the cookie, and is short


# ---- in logs


def ring(ring_bytes: int = 64 << 10) -> capture.RingRecorder:
    origin = capture.Origin(process="rank0", incarnation=1)
    return capture.RingRecorder(origin, capture.Clocks(hybrid=HybridClock()), ring_bytes=ring_bytes)


def test_a_ring_that_forgot_the_beginning_is_replayed_from_a_state(tmp_path: Path) -> None:
    memory = ring()
    tap = capture.Tap(memory, KEEPER, "keeper", Keeper(), {})
    for at_ns in range(2000):
        tap.handle(Put(item=at_ns % 5), now_ns=at_ns)
    memory.dump(tmp_path, "to see")
    (verdict,) = capture.replay_log(tmp_path)
    assert isinstance(verdict, capture.Identical) and verdict.begun_at > 0
    (log,) = capture.open_log(tmp_path).processes
    recorded = sum(isinstance(entry.record, EventTaken) for entry in log.entries())
    assert memory.forgotten > 0 and recorded / 2 < verdict.events < recorded


def test_a_log_whose_oldest_segments_are_gone_is_replayed_from_a_state(tmp_path: Path) -> None:
    origin = capture.Origin(process="rank0", incarnation=1)
    limits = capture.LogLimits(disk=capture.DiskLimits(segment_bytes=1 << 13, disk_bytes=1 << 15))
    log = capture.LogRecorder(tmp_path, origin, capture.Clocks(hybrid=HybridClock()), limits=limits)
    tap = capture.Tap(log, KEEPER, "keeper", Keeper(), {})
    noise = random.Random(1)
    for at_ns in range(6000):
        tap.handle(Put(item=at_ns % 5), now_ns=at_ns)
        log.note(noise.randbytes(64).hex())
        if not at_ns % 200:
            log.flush()
    log.close()
    (verdict,) = capture.replay_log(tmp_path)
    assert isinstance(verdict, capture.Identical) and verdict.begun_at > 0 and verdict.events > 100


def test_a_machine_of_another_thread_is_replayed_from_a_state_too(tmp_path: Path) -> None:
    origin = capture.Origin(process="rank0", incarnation=1)
    limits = capture.LogLimits(disk=capture.DiskLimits(segment_bytes=1 << 13, disk_bytes=1 << 15))
    log = capture.LogRecorder(tmp_path, origin, capture.Clocks(hybrid=HybridClock()), limits=limits)
    noise = random.Random(1)

    async def main() -> None:
        post = asyncio.get_running_loop().call_soon_threadsafe
        tap = capture.ThreadTap(log, KEEPER, "keeper", Keeper(), {}, post=post)
        for at_ns in range(0, 6000, 200):
            await asyncio.to_thread(hand_over, tap, range(at_ns, at_ns + 200))
            log.note(noise.randbytes(3000).hex())
            log.flush()
        tap.close("over")

    def hand_over(tap: capture.ThreadTap[Put, Kept], items: range) -> None:
        for at_ns in items:
            tap.handle(Put(item=at_ns % 5), now_ns=at_ns)

    asyncio.run(main())
    log.close()
    (verdict,) = capture.replay_log(tmp_path)
    assert isinstance(verdict, capture.Identical) and verdict.begun_at > 0 and verdict.events > 100


def test_what_another_thread_says_while_the_loop_stands_still_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_module, "WAITING_MAX", 20)
    log = capture.LogRecorder(
        tmp_path, capture.Origin(process="rank0", incarnation=1), capture.Clocks(hybrid=HybridClock())
    )
    posted: list[Any] = []
    tap = capture.ThreadTap(log, KEEPER, "keeper", Keeper(), {}, post=posted.append)
    answers = [tap.handle(Put(item=1), now_ns=at_ns) for at_ns in range(30)]
    tap.close("over")
    (take,) = posted
    take()
    log.close()
    alone = Keeper()
    assert answers == [alone.handle(Put(item=1), now_ns=at_ns) for at_ns in range(30)]
    (verdict,) = capture.replay_log(tmp_path)
    assert isinstance(verdict, capture.Incomplete) and "were not taken in time" in verdict.reason
    assert 0 < verdict.events < 20


def test_a_replay_from_a_state_finds_a_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ring()
    tap = capture.Tap(memory, KEEPER, "keeper", Keeper(), {})
    for at_ns in range(2000):
        tap.handle(Put(item=at_ns % 5), now_ns=at_ns)
    memory.dump(tmp_path, "to see")
    handle = Keeper.handle

    def hasty(self: Keeper, event: Put, *, now_ns: int) -> list[Kept]:
        return [] if now_ns == 1999 else handle(self, event, now_ns=now_ns)

    monkeypatch.setattr(Keeper, "handle", hasty)
    (verdict,) = capture.replay_log(tmp_path)
    assert isinstance(verdict, capture.Divergence) and "item=4" in verdict.event


def test_a_state_of_other_code_is_not_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ring()
    tap = capture.Tap(memory, KEEPER, "keeper", Keeper(), {})
    for at_ns in range(2000):
        tap.handle(Put(item=1), now_ns=at_ns)
    memory.dump(tmp_path, "to see")
    monkeypatch.setattr(codec(KEEPER), "fingerprint", "another")
    (verdict,) = capture.replay_log(tmp_path)
    assert isinstance(verdict, capture.Incomplete) and verdict.events == 0
    assert "its state was recorded by other code" in verdict.reason


def test_a_state_that_cannot_be_recorded_costs_the_log_a_note(tmp_path: Path) -> None:
    memory = ring()
    keeper = Keeper()
    keeper.sizes[1] = object()  # type: ignore[assignment]  # pyright: ignore[reportArgumentType]
    tap = capture.Tap(memory, KEEPER, "keeper", keeper, {})
    for at_ns in range(2000):
        tap.handle(Put(item=2), now_ns=at_ns)
    memory.dump(tmp_path, "to see")
    (verdict,) = capture.replay_log(tmp_path)
    assert isinstance(verdict, capture.Incomplete) and "no state to play it from" in verdict.reason
    (log,) = capture.open_log(tmp_path).processes
    texts = [capture.describe(entry.record) for entry in log.entries()]
    assert any("an instance of object in a machine's state cannot be recorded" in text for text in texts)
    assert not any(isinstance(entry.record, StateTaken) for entry in log.entries())


# ---- what is refused


def test_what_a_state_may_not_hold() -> None:
    keeper = Keeper()
    keeper.first.items = list(range(STATE_BYTES_MAX))
    with pytest.raises(capture.CaptureMismatch, match="bytes, and may have"):
        codec(KEEPER).encode(keeper)
    keeper.first.items = []
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    keeper.first.items = nested
    with pytest.raises(capture.CaptureMismatch, match="cannot be recorded"):
        codec(KEEPER).encode(keeper)
    with pytest.raises(LocalProtocolError, match="its secrets"):
        capture.register(
            "test.secret",
            1,
            lambda config: Keeper(),
            events=Put,
            actions=Kept,
            secrets=("key",),
            states=(Keeper,),
        )


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        [StateTag.OBJECT, 0, {}],
        [StateTag.OBJECT, 99, {}],
        [StateTag.LIST, 1],
    ],
)
def test_trees_that_are_no_state_are_refused(tree: object) -> None:
    with pytest.raises(capture.CaptureMismatch):
        codec(KEEPER).restore(Keeper(), msgspec.msgpack.encode(tree))


@pytest.mark.parametrize("name", ["first", "more", "handle", "__class__"])
def test_only_attributes_that_the_class_has_are_set(name: str) -> None:
    states = codec(KEEPER)
    tree = msgspec.msgpack.decode(states.encode(Keeper()))
    if name in tree[2]:
        del tree[2][name]
    else:
        tree[2][name] = 1
    with pytest.raises(capture.CaptureMismatch, match="has changed"):
        states.restore(Keeper(), msgspec.msgpack.encode(tree))


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=4))
def test_a_damaged_state_is_refused_or_restored_and_nothing_else(at: int, patch: bytes) -> None:
    keeper = Keeper()
    for item in (1, 7, 2):
        keeper.handle(Put(item=item), now_ns=item)
    state = codec(KEEPER).encode(keeper)
    at %= len(state)
    damaged = state[:at] + patch + state[at + len(patch) :]
    with contextlib.suppress(capture.CaptureMismatch):
        codec(KEEPER).restore(Keeper(), damaged)
