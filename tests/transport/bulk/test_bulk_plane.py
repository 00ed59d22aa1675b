"""The data plane over real sockets: transfers, bounds, bad peers, and what is never touched again."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from support.bulk.bulk_host import BulkHost, deadline, join, stripe_of, tcp_pair

from zbmd.transport.bulk import stripe_io as bulk_stripe
from zbmd.transport.bulk.events import BulkLimits
from zbmd.transport.bulk.peer import BulkPeer
from zbmd.transport.bulk.records import BulkError, Error, Forged, Goodbye, Put
from zbmd.transport.bulk.stream import StripeReader, StripeWriter
from zbmd.transport.errors import (
    DeadlineExceeded,
    LinkClosed,
    LinkFull,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
)
from zbmd.transport.host.tcp_silence import Progress
from zbmd.transport.identity import Side
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.native import _native
from zbmd.transport.secure.protection import Protection


@pytest.fixture
def hosts() -> Iterator[tuple[BulkHost, BulkHost]]:
    with BulkHost(0, nbytes=10 << 20) as a, BulkHost(1, nbytes=10 << 20) as b:
        yield a, b


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("protection", [Protection.MAC, Protection.NONE])
@pytest.mark.parametrize("stripes", [1, 3])
def test_put_and_get_of_all_sizes(
    hosts: tuple[BulkHost, BulkHost], stripes: int, protection: Protection
) -> None:
    a, b = hosts
    to_b, _ = join(a, b, stripes=stripes, protection=protection)
    inbox = b.segment.inbox.empty(9 << 20, np.uint8)
    arena = b.segment.arena.from_array(random_bytes(9 << 20, 1))
    target = to_b.open_region(b.regions.register(inbox))
    source = to_b.open_region(b.regions.register(arena))
    for value, nbytes in enumerate((0, 1, 4095, 70_001, (1 << 20) + 1, 8 << 20), 1):
        data = random_bytes(nbytes, value)
        put = target.put(data, value, channel=2, value=value)
        assert b.wait(0, 2, value) == _native.WAIT_OK
        assert np.array_equal(inbox[value : value + nbytes], data)
        put.wait(deadline())
        into = np.zeros(nbytes, np.uint8)
        source.get(into, value).wait(deadline())
        assert np.array_equal(into, arena[value : value + nbytes])
    target.notify(2, 100)
    assert b.wait(0, 2, 100) == _native.WAIT_OK


def test_puts_from_many_threads_and_both_directions(hosts: tuple[BulkHost, BulkHost]) -> None:
    a, b = hosts
    ends = dict(zip(hosts, join(a, b, stripes=2), strict=True))
    inboxes = {host: host.segment.inbox.empty((8, 20_000), np.int64) for host in hosts}

    def work(us: BulkHost, them: BulkHost, row: int) -> None:
        region = ends[us].open_region(them.regions.register(inboxes[them][row]))
        for value in range(1, 21):
            region.put(np.full(20_000, row * 100 + value), channel=row, value=value).wait(deadline())

    threads = [
        threading.Thread(target=work, args=(us, them, row))
        for us, them in ((a, b), (b, a))
        for row in range(8)
    ]
    for thread in threads:
        thread.start()
    for us, them in ((a, b), (b, a)):
        for row in range(8):
            assert us.wait(them.slot, row, 20) == _native.WAIT_OK
            assert (inboxes[us][row] == row * 100 + 20).all()
    for thread in threads:
        thread.join()


def test_buffers_of_other_kinds(hosts: tuple[BulkHost, BulkHost]) -> None:
    a, b = hosts
    to_b, _ = join(a, b)
    inbox = b.segment.inbox.empty(4, np.float64)
    region = to_b.open_region(b.regions.register(inbox))
    region.put(struct.pack("<2d", 1.5, 2.5), 8, channel=0, value=1)
    region.put(np.empty((0, 3)), channel=0, value=2)
    region.put(b"", channel=0, value=3)
    assert b.wait(0, 0, 3) == _native.WAIT_OK and inbox[1:3].tolist() == [1.5, 2.5]
    into = bytearray(16)
    region.get(into, 8).wait(deadline())
    assert into == struct.pack("<2d", 1.5, 2.5)
    assert region.view() is None and region.handle.nbytes == 32


def test_what_cannot_be_asked_for(hosts: tuple[BulkHost, BulkHost]) -> None:
    a, b = hosts
    to_b, _ = join(a, b)
    handle = b.regions.register(b.segment.inbox.empty(8, np.uint8))
    region = to_b.open_region(handle)
    read_only = to_b.open_region(b.regions.register(b.segment.arena.empty(8, np.uint8)))
    one = np.ones(1, np.uint8)
    with pytest.raises(RemoteProtocolError, match="read-only"):
        read_only.put(one, channel=0, value=1)
    for offset in (-1, 8, 1 << 70):
        with pytest.raises(RemoteProtocolError, match="outside a region"):
            region.put(one, offset, channel=0, value=1)
        with pytest.raises(RemoteProtocolError, match="outside a region"):
            region.get(one, offset)
    with pytest.raises(RemoteProtocolError, match="outside a region"):
        region.view(0, 9)
    for channel, value in ((-1, 1), (_native.CHANNELS, 1), (0, -1), (0, 1 << 64)):
        with pytest.raises(LocalProtocolError):
            region.notify(channel, value)
    for src in (np.ones((2, 2), np.uint8).T[:1], memoryview(b"abcd")[::2], 3):
        with pytest.raises(LocalProtocolError):
            region.put(src, channel=0, value=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(LocalProtocolError, match="cannot be written"):
        region.get(b"readonly")
    region.close()
    region.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        region.put(one, channel=0, value=1)


@pytest.mark.parametrize(
    "change",
    [
        {"slot": 2},
        {"incarnation": 1},
        {"offset": -1},
        {"nbytes": -1},
        {"nbytes": 1 << 63},
        {"offset": 1 << 63},
    ],
)
def test_handles_that_cannot_be_the_peers(hosts: tuple[BulkHost, BulkHost], change: dict[str, int]) -> None:
    to_b, _ = join(*hosts)
    numbers = {"slot": 1, "incarnation": 2, "offset": 1 << 17, "nbytes": 8} | change
    with pytest.raises(RemoteProtocolError):
        to_b.open_region(RegionHandle(**numbers, writable=True))


def test_a_put_into_a_released_region_fails_alone_and_writes_nothing(
    hosts: tuple[BulkHost, BulkHost],
) -> None:
    a, b = hosts
    to_b, _ = join(a, b)
    inbox = b.segment.inbox.empty(8 << 20, np.uint8)
    inbox[:] = 7
    handle = b.regions.register(inbox)
    b.regions.release(handle)
    region = to_b.open_region(handle)
    put = region.put(random_bytes(8 << 20), channel=0, value=1)
    region.notify(1, 1)
    with pytest.raises(RemoteProtocolError, match=r"refuses a put.*no region"):
        put.wait(deadline())
    assert b.wait(0, 1, 1) == _native.WAIT_OK
    assert (inbox == 7).all() and _native.load_cell(b.segment.base, 0, 0) == 0
    assert a.segment.lost_mask() == b.segment.lost_mask() == 0


def test_a_get_of_a_released_region_fails_alone(hosts: tuple[BulkHost, BulkHost]) -> None:
    a, b = hosts
    to_b, _ = join(a, b)
    handle = b.regions.register(b.segment.arena.empty(64, np.uint8))
    region = to_b.open_region(handle)
    region.get(bytearray(64)).wait(deadline())
    b.regions.release(handle)
    with pytest.raises(RemoteProtocolError, match="no region"):
        region.get(bytearray(64)).wait(deadline())
    region.notify(0, 1)
    assert b.wait(0, 0, 1) == _native.WAIT_OK


# -- a peer that we play ourselves -----------------------------------------------------------------------


class Puppet:
    """A peer whose bytes the test writes. Slot 1, without a MAC unless keyed."""

    def __init__(self, host: BulkHost, *, keyed: bool = False, limits: BulkLimits | None = None) -> None:
        self.peer: BulkPeer = host.connect(1, limits=limits)
        sock, self.sock = tcp_pair()
        self.sock.settimeout(30)
        protection = Protection.MAC if keyed else Protection.NONE
        self.peer.add_stripe(stripe_of(sock, 0, Side.DIALER, protection))

    def say(self, data: bytes) -> None:
        self.sock.sendall(data)


def put_record(handle: RegionHandle, nbytes: int) -> bytes:
    record = Put(
        transfer=0, handle=handle, at=0, total=nbytes, fragment_bytes=nbytes, offset=0, nbytes=nbytes,
        channel=0, value=1,
    )  # fmt: skip
    writer = StripeWriter(None)
    writer.add(record, memoryview(bytes(nbytes)))
    return b"".join(writer.pending(2))[: -nbytes or None]


@pytest.fixture
def host() -> Iterator[BulkHost]:
    with BulkHost(0, nbytes=10 << 20) as made:
        yield made


def test_a_peer_that_ends_is_lost_to_waits_and_transfers(host: BulkHost) -> None:
    puppet = Puppet(host)
    inbox = host.segment.inbox.empty(100, np.uint8)
    puppet.say(put_record(host.regions.register(inbox), 100) + b"x" * 50)
    handle = RegionHandle(slot=1, incarnation=2, offset=0, nbytes=100, writable=True)
    region = puppet.peer.open_region(handle)
    got = region.get(bytearray(10))
    puppet.sock.recv(1)
    puppet.sock.close()
    assert host.wait(1, 0, 1) == _native.WAIT_LOST
    assert host.segment.lost_mask() == 1 << 1
    with pytest.raises(PeerLost):
        got.wait(deadline())
    with pytest.raises(PeerLost):
        region.put(b"x", channel=0, value=1)


@pytest.mark.parametrize("keyed", [True, False])
def test_garbage_ends_its_own_connection_and_no_other(host: BulkHost, keyed: bool) -> None:
    with BulkHost(2) as other:
        to_other, _ = join(host, other)
        puppet = Puppet(host, keyed=keyed)
        puppet.say(random_bytes(1000).tobytes())
        with pytest.raises(Forged if keyed else BulkError):
            puppet.peer.ended.wait(deadline())
        assert host.wait(1, 0, 1) == _native.WAIT_LOST
        region = to_other.open_region(other.regions.register(other.segment.inbox.empty(8, np.uint8)))
        region.notify(0, 1)
        assert other.wait(0, 0, 1) == _native.WAIT_OK


def test_a_peer_is_told_what_is_wrong_with_it(host: BulkHost) -> None:
    puppet = Puppet(host)
    puppet.say(random_bytes(1000).tobytes())
    reader = StripeReader(None)
    said: list[object] = []
    while len(said) < 2:
        came = reader.filled(puppet.sock.recv_into(reader.want()))
        if isinstance(came, Error):
            reader.receive_text()
        if came is not None:
            said.append(came)
    assert isinstance(said[0], Error)
    puppet.sock.close()


def test_nothing_is_written_after_the_end(host: BulkHost) -> None:
    puppet = Puppet(host)
    inbox = host.segment.inbox.empty(1 << 20, np.uint8)
    inbox[:] = 7
    puppet.say(put_record(host.regions.register(inbox), 1 << 20))
    puppet.peer.abort(PeerLost(1, "a replacement has joined"))
    with pytest.raises(PeerLost, match="replacement"):
        puppet.peer.ended.wait(deadline())
    with pytest.raises(OSError):
        while True:
            puppet.say(bytes(1 << 20))
    assert (inbox == 7).all()


def test_a_peer_that_does_not_read_holds_up_only_itself(host: BulkHost) -> None:
    with BulkHost(2) as other:
        to_other, _ = join(host, other)
        puppet = Puppet(host, limits=BulkLimits(transfers_max=50))
        handle = RegionHandle(slot=1, incarnation=2, offset=0, nbytes=8 << 20, writable=True)
        region = puppet.peer.open_region(handle)
        source = bytes(8 << 20)
        stuck = region.put(source, channel=0, value=0)
        with pytest.raises(LinkFull, match="50 transfers"):
            for value in range(1, 1000):
                stuck = region.put(source, channel=0, value=value)
        with pytest.raises(DeadlineExceeded):
            stuck.wait(1)
        region2 = to_other.open_region(other.regions.register(other.segment.inbox.empty(8, np.uint8)))
        for value in range(1, 200):
            region2.put(bytes(8), channel=0, value=value).wait(deadline())
        assert other.wait(0, 0, 199) == _native.WAIT_OK
        assert not stuck.done
        puppet.peer.abort(PeerLost(1, "given up"))
        with pytest.raises(PeerLost, match="given up"):
            stuck.wait(deadline())


class Held(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """An array that tells when it is gone."""


async def test_a_cancelled_await_leaves_the_buffer_with_the_transfer(host: BulkHost) -> None:
    puppet = Puppet(host)
    handle = RegionHandle(slot=1, incarnation=2, offset=0, nbytes=8 << 20, writable=True)
    region = puppet.peer.open_region(handle)
    into = np.zeros(100, np.uint8).view(Held)
    gone = threading.Event()
    weakref.finalize(into, gone.set)

    async def fetch(target: Held) -> None:
        await region.get(target)

    task = asyncio.ensure_future(fetch(into))
    del into
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    assert not gone.is_set()
    puppet.sock.close()
    with pytest.raises(PeerLost):
        await puppet.peer.ended
    await asyncio.sleep(0)  # the loop lets go of the task
    gc.collect()
    assert gone.wait(180)


def test_a_host_that_acknowledges_nothing_is_lost(host: BulkHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pulled cable, as TCP_INFO shows it; nothing here can pull one."""
    dead = Progress(unacknowledged=3, unanswered_probes=0, quiet_ms=1 << 20)
    monkeypatch.setattr(bulk_stripe, "read_progress", lambda _: dead)
    puppet = Puppet(host, limits=BulkLimits(silent_ms=1))
    handle = RegionHandle(slot=1, incarnation=2, offset=0, nbytes=8, writable=True)
    puppet.peer.open_region(handle).notify(0, 1)
    with pytest.raises(PeerLost, match="acknowledged nothing for 1 ms"):
        puppet.peer.ended.wait(deadline())


# -- the end ---------------------------------------------------------------------------------------------


async def test_an_orderly_end_loses_nothing_and_marks_nobody(hosts: tuple[BulkHost, BulkHost]) -> None:
    a, b = hosts
    to_b, to_a = join(a, b, stripes=3)
    inbox = b.segment.inbox.empty(8 << 20, np.uint8)
    region = to_b.open_region(b.regions.register(inbox))
    data = random_bytes(8 << 20)
    put = region.put(data, channel=0, value=1)
    to_b.close()
    to_b.close()
    with pytest.raises(LinkClosed):
        region.notify(0, 2)
    await put
    await to_b.ended
    await to_a.ended
    assert _native.load_cell(b.segment.base, 0, 0) == 1 and np.array_equal(inbox, data)
    assert a.segment.lost_mask() == b.segment.lost_mask() == 0


def test_a_stripe_for_what_has_ended_is_closed(host: BulkHost) -> None:
    peer = host.connect(1)
    peer.close()
    peer.ended.wait(deadline())
    ours, theirs = tcp_pair()
    theirs.settimeout(30)
    peer.add_stripe(stripe_of(ours, 0, Side.DIALER, Protection.NONE))
    assert theirs.recv(1) == b""


def test_what_the_handshake_has_read_already_is_not_lost(host: BulkHost) -> None:
    writer = StripeWriter(None)
    writer.add(Goodbye())
    peer = host.connect(1)
    ours, theirs = tcp_pair()
    surplus = b"".join(writer.pending(1))
    peer.add_stripe(stripe_of(ours, 0, Side.DIALER, Protection.NONE, surplus))
    peer.ended.wait(deadline())
    theirs.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_closing_the_plane_ends_everything_and_leaves_no_file_open() -> None:
    before = open_files()
    threads = threading.active_count()
    with BulkHost(0) as a, BulkHost(1) as b:
        to_b, _ = join(a, b, stripes=2)
        stuck = a.connect(2).open_region(
            RegionHandle(slot=2, incarnation=3, offset=0, nbytes=8, writable=True)
        )
        waiting = stuck.put(bytes(8), channel=0, value=1)
        a.plane.close()
        for transfer in (waiting, to_b.ended):
            with pytest.raises(LinkClosed, match="data plane"):
                transfer.wait(deadline())
        with pytest.raises(LocalProtocolError, match="data plane is closed"):
            a.connect(3)
        with pytest.raises(LinkClosed):
            stuck.notify(0, 1)
        to_b.close()
    assert open_files() == before and threading.active_count() == threads


def test_a_slot_that_no_segment_has(host: BulkHost) -> None:
    with pytest.raises(LocalProtocolError, match="slot 1024"):
        host.connect(1024)


def test_a_reset_is_a_death(host: BulkHost) -> None:
    puppet = Puppet(host)
    puppet.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    puppet.sock.close()
    with pytest.raises(PeerLost, match="reset"):
        puppet.peer.ended.wait(deadline())
