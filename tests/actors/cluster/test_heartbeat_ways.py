"""Beats that are written into memory, by the native thread: beside a stripe, which helps out where they fail.

The memory is this process's; `tests/rdma` has a device write it.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
from collections.abc import Callable, Generator

import pytest

from zbmd.actors.cluster.heartbeats._heartbeat import BEAT_BYTES, NativeHeartbeats

MS = 1_000_000
PERIOD_NS = 2 * MS
HOUR_NS = 3600 * 1000 * MS
STRIPE_KEYS = bytes(range(16)), bytes(range(16, 32))
WAY_KEYS = bytes(range(32, 48)), bytes(range(48, 64))
BROKEN = -1
PATIENCE_S = 180.0

WRITE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Way(ctypes.Structure):
    """`struct zbmd_beat_way` of beat_way.h."""

    _fields_ = [("write", WRITE), ("inbox", ctypes.c_void_p)]


class Way:
    """One end. behind: what `write` answers; a beat that is not `lost` arrives at once."""

    def __init__(self) -> None:
        self.inbox = (ctypes.c_uint64 * 4)()
        self.behind = 0
        self.lost = False
        self.other: Way | None = None
        self._write = WRITE(self._written)
        self._struct = _Way(self._write, ctypes.addressof(self.inbox))

    def _written(self, way: int, beat: int) -> int:
        if not self.lost and self.other is not None:
            ctypes.memmove(self.other.inbox, beat, BEAT_BYTES)
        return self.behind

    @property
    def capsule(self) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._struct), b"zbmd.beat_way", None)


class Node:
    """One thread with one peer, its stripe, and a way that is not used yet."""

    def __init__(self, sock: socket.socket, first: bool) -> None:
        order = slice(None) if first else slice(None, None, -1)
        self.native = NativeHeartbeats(period_ns=PERIOD_NS, lease_ns=HOUR_NS)
        self.place = self.native.place()
        self.way = Way()
        self.keys = WAY_KEYS[order]
        send, receive = STRIPE_KEYS[order]
        self.native.adopt(self.place, sock.detach(), send, receive, b"")
        self.native.observe(self.place, HOUR_NS)
        self.native.beat_to(self.place, True)
        self.native.say(True, 1, 1)
        self.arrivals = 0
        self.ended = ""

    def begin(self) -> None:
        assert self.native.add_way(self.place, self.way.capsule, *self.keys)
        self.native.use_way(self.place)

    def take(self) -> None:
        news = self.native.take(self.place)
        if news is not None:
            assert not news[2], news
            self.arrivals += len(news[0])
            self.ended = news[3] or self.ended

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.to_thread(self.take)  # lets the thread's callbacks have the GIL


@pytest.fixture
def pair() -> Generator[tuple[Node, Node]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialed = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    nodes = Node(dialed, True), Node(accepted, False)
    nodes[0].way.other, nodes[1].way.other = nodes[1].way, nodes[0].way
    yield nodes
    for node in nodes:
        node.native.close()


async def test_once_the_first_has_arrived_beats_go_by_the_way_alone(pair: tuple[Node, Node]) -> None:
    one, two = pair
    for node in pair:
        node.begin()
    for node in pair:
        await node.until(lambda node=node: node.native.sent_by_way >= 5 and node.native.come_by_way >= 5)
        heard = node.arrivals
        await node.until(lambda node=node, heard=heard: node.arrivals >= heard + 5)
    # The first is known to have arrived when the second is sent: so much went by the stripe.
    alone, sent = one.native.sent_by_way, one.native.beats_sent
    await one.until(lambda: one.native.beats_sent >= sent + 5)
    assert one.native.sent_by_way - alone >= 4 and not one.ended + two.ended


async def test_while_beats_by_the_way_do_not_arrive_the_stripe_has_them(pair: tuple[Node, Node]) -> None:
    one, two = pair
    for node in pair:
        node.begin()
    await two.until(lambda: two.native.come_by_way >= 5)
    one.way.lost, one.way.behind = True, 2
    await two.until(lambda: True)
    come = two.native.come_by_way
    heard = two.arrivals
    await two.until(lambda: two.arrivals >= heard + 10)
    assert two.native.come_by_way <= come + 1 and not one.ended
    one.way.lost, one.way.behind = False, 0
    await two.until(lambda: two.native.come_by_way >= come + 5)


async def test_a_way_that_breaks_is_told_and_its_stripe_goes_on(pair: tuple[Node, Node]) -> None:
    one, two = pair
    for node in pair:
        node.begin()
    one.way.behind = BROKEN
    await one.until(lambda: one.ended == "a beat was not acknowledged")
    await two.until(lambda: True)
    heard = two.arrivals
    await two.until(lambda: two.arrivals >= heard + 5)
    assert not two.ended


async def test_what_is_not_the_peers_ends_the_way_and_counts_for_nothing(pair: tuple[Node, Node]) -> None:
    one, two = pair
    two.begin()
    one.keys = one.keys[::-1]
    one.begin()
    await one.until(lambda: one.ended.startswith("the tag of a beat is wrong"))
    assert one.native.come_by_way == 0
    one.keys, one.ended = one.keys[::-1], ""
    one.begin()
    await one.until(lambda: one.native.come_by_way > 0)


async def test_without_a_stripe_there_is_no_way(pair: tuple[Node, Node]) -> None:
    one, _ = pair
    one.native.drop_stripe(one.place)
    assert not one.native.add_way(one.place, one.way.capsule, *one.keys)
    with pytest.raises(ValueError, match="PyCapsule"):
        one.native.add_way(one.place, object(), *one.keys)
