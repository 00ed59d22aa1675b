"""Rings of tag machines over links that keep order: no message is lost, doubled, or passed by another."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.collectives.p2p import tag_machine as tm
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

RANKS = (0, 1, 2)


class World:
    """Three members; what is in flight between two of them stays in order."""

    def __init__(self) -> None:
        self.machines = {rank: tm.TagMachine(RANKS) for rank in RANKS}
        self.links: dict[tuple[int, int], deque[Any]] = {(a, b): deque() for a in RANKS for b in RANKS}
        self.tags: dict[int, int] = {}
        self.wants: dict[int, tuple[int, int | None, int | None]] = {}
        self.numbered: dict[tuple[int, int, int], int] = {}
        self.got: dict[int, int] = {}
        self.taken: list[tuple[int, int]] = []
        self.sent: list[int] = []
        self.held: list[tuple[int, tm.Match]] = []

    def put(self, rank: int, event: tm.TagEvent) -> None:
        machine = self.machines[rank]
        for action in machine.handle(event, now_ns=0):
            match action:
                case tm.Transmit(key=key, to=to, number=number):
                    self.numbered[rank, to, number] = key
                    self.links[rank, to].append(tm.Arrived(source=rank, number=number, tag=self.tags[key]))
                case tm.Match():
                    self.held.append((rank, action))
                case tm.TellTaken(to=to, number=number):
                    self.links[rank, to].append(tm.TakenThere(by=rank, number=number))
                case tm.Sent(key=key):
                    self.sent.append(key)
                case tm.FailSend() | tm.FailReceive():
                    raise AssertionError(f"nobody has left, and {action}")
        machine.check_invariants()

    def settle(self, at: int, *, back: bool) -> None:
        """A matched message is taken, or given back."""
        rank, match = self.held.pop(at % len(self.held))
        key = self.numbered[match.source, rank, match.number]
        if back:
            self.put(rank, tm.GaveBack(source=match.source, number=match.number))
            return
        source, tag = self.wants[match.key][1:]
        assert source in (None, match.source) and tag in (None, self.tags[key])
        assert key not in self.got, "a message was taken twice"
        self.got[key] = match.key
        self.taken.append((rank, key))
        self.put(rank, tm.Took(source=match.source, number=match.number))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "receive", "any", "carry", "carry", "take", "back", "withdraw"]),
        st.sampled_from(RANKS),
        st.sampled_from(RANKS),
        st.integers(0, 2),
        st.integers(0, 50),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_every_message_is_taken_once_by_who_fits(steps: list[tuple[str, int, int, int, int]]) -> None:
    world, keys = World(), 0
    for what, rank, other, tag, at in steps:
        keys += 1
        links = [link for link in world.links.values() if link]
        if what == "send":
            world.tags[keys] = tag
            world.put(rank, tm.SendPosted(key=keys, to=other, tag=tag))
        elif what in ("receive", "any"):
            source, wanted = (other, tag) if what == "receive" else (None, None)
            world.wants[keys] = (rank, source, wanted)
            world.put(rank, tm.ReceivePosted(key=keys, source=source, tag=wanted))
        elif what == "carry" and links:
            (_, to), link = [(ends, link) for ends, link in world.links.items() if link][at % len(links)]
            world.put(to, link.popleft())
        elif what in ("take", "back") and world.held:
            world.settle(at, back=what == "back")
        elif what == "withdraw" and world.wants:
            key = list(world.wants)[at % len(world.wants)]
            world.put(world.wants[key][0], tm.ReceiveWithdrawn(key=key))
    _drain(world, keys)
    assert set(world.got) == set(world.tags) == set(world.sent)


def _drain(world: World, keys: int) -> None:
    """Everybody asks for whatever comes until nothing is left."""
    while len(world.sent) < len(world.tags):
        for (_, to), link in world.links.items():
            while link:
                world.put(to, link.popleft())
        while world.held:
            world.settle(0, back=False)
        for rank in RANKS:
            if world.machines[rank].unexpected:
                keys += 1
                world.wants[keys] = (rank, None, None)
                world.put(rank, tm.ReceivePosted(key=keys, source=None, tag=None))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=200), st.lists(st.integers(0, 2) | st.none(), max_size=200))
def test_messages_of_one_member_do_not_pass_each_other(tags: list[int], wants: list[int | None]) -> None:
    world = World()
    for key, tag in enumerate(tags, start=1):
        world.tags[key] = tag
        world.put(0, tm.SendPosted(key=key, to=1, tag=tag))
    expected = list(range(1, len(tags) + 1))
    for key, want in enumerate(wants, start=1_000):
        world.wants[key] = (1, 0, want)
        world.put(1, tm.ReceivePosted(key=key, source=0, tag=want))
        while world.links[0, 1]:
            world.put(1, world.links[0, 1].popleft())
        assert world.machines[1].unexpected <= tm.UNTAKEN_MAX
        if world.held:
            held = world.held[0][1]
            message = world.numbered[0, 1, held.number]
            fitting = [k for k in expected if want is None or world.tags[k] == want]
            assert message == fitting[0]
            expected.remove(message)
            world.settle(0, back=False)
            while world.links[1, 0]:
                world.put(0, world.links[1, 0].popleft())
        else:
            world.put(1, tm.ReceiveWithdrawn(key=key))


def test_who_has_closed_the_group_is_waited_for_no_more_and_what_it_sent_can_be_taken() -> None:
    machine = tm.TagMachine(RANKS)

    def put(event: tm.TagEvent | tm.MemberLeft) -> list[tm.TagAction]:
        actions = machine.handle(event, now_ns=0)
        machine.check_invariants()
        return actions

    for key in range(tm.UNTAKEN_MAX + 1):  # the last one waits for room
        put(tm.SendPosted(key=key, to=1, tag=0))
    put(tm.Arrived(source=1, number=1, tag=7))
    put(tm.ReceivePosted(key=100, source=1, tag=8))
    put(tm.ReceivePosted(key=101, source=2, tag=None))
    failed = put(tm.MemberLeft(source=1))
    sends = [tm.FailSend(key=key, to=1, cause=tm.Cause.LEFT) for key in range(tm.UNTAKEN_MAX + 1)]
    assert failed == [*sends, tm.FailReceive(key=100, ranks=(1,), cause=tm.Cause.LEFT)]
    assert put(tm.MemberLeft(source=1)) == [] and machine.has_left(1)
    assert put(tm.ReceivePosted(key=102, source=None, tag=None)) == [tm.Match(key=102, source=1, number=1)]
    assert put(tm.Took(source=1, number=1)) == [], "nobody is left to receive it"
    told = put(tm.ReceivePosted(key=103, source=None, tag=None))
    assert told == [tm.FailReceive(key=103, ranks=(1,), cause=tm.Cause.LEFT)]
    assert put(tm.ReceivePosted(key=104, source=None, tag=None)) == [], "it has its notice"
    assert put(tm.SendPosted(key=105, to=1, tag=0)) == [tm.FailSend(key=105, to=1, cause=tm.Cause.LEFT)]
    assert put(tm.Arrived(source=2, number=1, tag=0)) == [tm.Match(key=101, source=2, number=1)]
    with pytest.raises(RemoteProtocolError, match="behind its close"):
        put(tm.Arrived(source=1, number=2, tag=0))
    with pytest.raises(RemoteProtocolError, match="not in"):
        put(tm.MemberLeft(source=9))


def test_what_breaks_the_rules_is_refused() -> None:
    machine = tm.TagMachine(RANKS)
    with pytest.raises(RemoteProtocolError, match="out of order"):
        machine.handle(tm.Arrived(source=1, number=2, tag=0), now_ns=0)
    with pytest.raises(RemoteProtocolError, match="out of order"):
        machine.handle(tm.Arrived(source=7, number=1, tag=0), now_ns=0)
    with pytest.raises(RemoteProtocolError, match="never had"):
        machine.handle(tm.TakenThere(by=1, number=1), now_ns=0)
    with pytest.raises(LocalProtocolError, match="not a member"):
        machine.handle(tm.SendPosted(key=1, to=9, tag=0), now_ns=0)
    with pytest.raises(LocalProtocolError, match="not a member"):
        machine.handle(tm.ReceivePosted(key=1, source=9, tag=0), now_ns=0)
    for number in range(1, tm.UNTAKEN_MAX + 1):
        machine.handle(tm.Arrived(source=1, number=number, tag=0), now_ns=0)
        machine.check_invariants()
    with pytest.raises(RemoteProtocolError, match="more than"):
        machine.handle(tm.Arrived(source=1, number=tm.UNTAKEN_MAX + 1, tag=0), now_ns=0)
    for key in range(tm.UNTAKEN_MAX + tm.WAITING_MAX):
        machine.handle(tm.SendPosted(key=key, to=2, tag=0), now_ns=0)
    with pytest.raises(LocalProtocolError, match="it takes none"):
        machine.handle(tm.SendPosted(key=-1, to=2, tag=0), now_ns=0)
