"""Bulk transfers between real processes, one of which is killed or stopped in the middle."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from support.bulk.bulk_host import BulkHost, deadline, stripe_of, tcp_pair
from support.processes.stopping import stop

from zbmd.transport.bulk.events import BulkLimits
from zbmd.transport.bulk.peer import BulkPeer
from zbmd.transport.errors import DeadlineExceeded, LinkFull, PeerLost
from zbmd.transport.identity import Side
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native import _native
from zbmd.transport.secure.protection import Protection

Fork = Callable[[Callable[[], None]], int]
PUT_BYTES = 2 << 20
ROWS = 16
SILENT_MS = 40
STRIPES = 2


class Ends:
    """Sockets of both processes, made before the fork, and a pipe for the child's region handle."""

    def __init__(self) -> None:
        self._pairs = [tcp_pair() for _ in range(STRIPES)]
        self._handles = os.pipe()

    @contextmanager
    def host(self, side: Side) -> Generator[tuple[BulkHost, BulkPeer]]:
        """The data plane of this process: the parent dials and has slot 0."""
        slot = 0 if side is Side.DIALER else 1
        with BulkHost(slot, nbytes=ROWS * PUT_BYTES) as host:
            peer = host.connect(1 - slot, limits=BulkLimits(silent_ms=SILENT_MS))
            for number, pair in enumerate(self._pairs):
                pair[1 - slot].close()
                pair[slot].setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
                peer.add_stripe(stripe_of(pair[slot], number, side, Protection.MAC))
            yield host, peer

    def tell(self, handle: RegionHandle) -> None:
        os.write(self._handles[1], msgspec.msgpack.encode(handle))

    def told(self) -> RegionHandle:
        return msgspec.msgpack.decode(os.read(self._handles[0], 1000), type=RegionHandle)

    def close(self) -> None:
        for fd in self._handles:
            os.close(fd)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def child_offers_inbox(ends: Ends) -> None:
    """Have the parent put into our inbox; tell it of the first arrival; then wait for ever."""
    with ends.host(Side.LISTENER) as (host, peer):
        handle = host.regions.register(host.segment.inbox.empty((ROWS, PUT_BYTES), np.uint8))
        ends.tell(handle)
        assert host.wait(0, 0, 1) == _native.WAIT_OK
        echo = RegionHandle(slot=0, incarnation=1, offset=0, nbytes=0, writable=True)
        peer.open_region(echo).notify(0, 1)
        signal.pause()


def test_a_receiver_that_is_killed_fails_the_puts_to_it(ends: Ends, fork: Fork) -> None:
    pid = fork(lambda: child_offers_inbox(ends))
    with ends.host(Side.DIALER) as (host, peer):
        region = peer.open_region(ends.told())
        source = np.ones(PUT_BYTES, np.uint8)
        region.put(source, channel=0, value=1)
        assert host.wait(1, 0, 1) == _native.WAIT_OK
        stop(pid)
        puts: list[Transfer] = []
        for value in range(2, 40):
            puts.append(region.put(source, (value % ROWS) * PUT_BYTES, channel=0, value=value))
        assert not puts[-1].done
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match="rank1"):
            puts[-1].wait(deadline())
        assert host.wait(1, 0, 2) == _native.WAIT_LOST and host.segment.lost_mask() == 1 << 1


def test_what_a_killed_sender_has_announced_is_there(ends: Ends, fork: Fork) -> None:
    def child() -> None:
        with ends.host(Side.LISTENER) as (_, peer):
            region = peer.open_region(ends.told())
            value = 0
            while True:
                try:
                    source = np.full(PUT_BYTES, (value + 1) % 251, np.uint8)
                    region.put(source, (value % ROWS) * PUT_BYTES, channel=0, value=value + 1)
                    value += 1
                except LinkFull:
                    os.sched_yield()
                if value == ROWS:
                    signal.pause()

    pid = fork(child)
    with ends.host(Side.DIALER) as (host, _):
        inbox = host.segment.inbox.empty((ROWS, PUT_BYTES), np.uint8)
        ends.tell(host.regions.register(inbox))
        assert host.wait(1, 0, 2) == _native.WAIT_OK
        os.kill(pid, signal.SIGKILL)
        assert host.wait(1, 0, 1 << 20) == _native.WAIT_LOST
        arrived = _native.load_cell(host.segment.base, 1, 0)
        assert arrived >= 2
        for row in range(arrived):
            assert (inbox[row] == row + 1).all()


def test_a_server_that_is_killed_fails_the_gets_from_it(ends: Ends, fork: Fork) -> None:
    def child() -> None:
        with ends.host(Side.LISTENER) as (host, _):
            arena = host.segment.arena.from_array(np.arange(PUT_BYTES, dtype=np.uint8))
            ends.tell(host.regions.register(arena))
            signal.pause()

    pid = fork(child)
    with ends.host(Side.DIALER) as (host, peer):
        region = peer.open_region(ends.told())
        into = np.zeros((40, PUT_BYTES), np.uint8)
        region.get(into[0]).wait(deadline())
        assert np.array_equal(into[0], np.arange(PUT_BYTES, dtype=np.uint8))
        stop(pid)
        gets = [region.get(row) for row in into]
        with pytest.raises(DeadlineExceeded):
            gets[-1].wait(1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match="rank1"):
            gets[-1].wait(deadline())
        assert all(transfer.done for transfer in gets)
        assert host.segment.lost_mask() == 1 << 1


def test_a_receiver_that_stops_for_a_while_loses_nothing(ends: Ends, fork: Fork) -> None:
    pid = fork(lambda: child_offers_inbox(ends))
    with ends.host(Side.DIALER) as (host, peer):
        region = peer.open_region(ends.told())
        region.notify(0, 1)
        assert host.wait(1, 0, 1) == _native.WAIT_OK
        stop(pid)
        data = [np.full(PUT_BYTES, row + 1, np.uint8) for row in range(ROWS)]
        puts = [region.put(src, i * PUT_BYTES, channel=0, value=i + 2) for i, src in enumerate(data)]
        with pytest.raises(DeadlineExceeded):  # many times as long as a host may be silent
            puts[-1].wait(_native.now_ns() + 20 * SILENT_MS * 1_000_000)
        os.kill(pid, signal.SIGCONT)
        for put in puts:
            put.wait(deadline())
        into = np.zeros((ROWS, PUT_BYTES), np.uint8)
        region.get(into).wait(deadline())
        assert (into == np.arange(1, ROWS + 1, dtype=np.uint8)[:, None]).all()
