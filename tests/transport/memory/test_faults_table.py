"""Faults that docs/FAULTS.md lists: each ends in a typed error, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import time
from collections.abc import AsyncGenerator, Generator

import pytest
from structlog.testing import capture_logs

from zbmd.transport.errors import (
    LocalProtocolError,
    OutOfDescriptors,
    OutOfMemory,
    RemoteProtocolError,
    ZbmdError,
)
from zbmd.transport.frames import FrameHeader
from zbmd.transport.identity import Identity
from zbmd.transport.memory.memfd import SEALS
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native._native import now_ns
from zbmd.transport.shm.connect import Endpoint, ShmListener, dial, link_pair, listen
from zbmd.transport.shm.link import ShmLink

SECONDS = 1_000_000_000


@pytest.fixture
def address() -> str:
    return f"zbmd-test-{os.getpid()}-{os.urandom(4).hex()}"


def endpoint(name: str) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1, job=7)
    return Endpoint(identity=identity, cookie=bytes(32))


@contextlib.contextmanager
def descriptors_left(count: int) -> Generator[None]:
    """Only so many more descriptors can be opened by this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filler = [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)]
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + count + 2, hard)
        )
        with contextlib.suppress(OSError):
            while True:
                filler.append(os.dup(filler[0]))
        for _ in range(count):
            os.close(filler.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in filler:
            os.close(fd)


@contextlib.asynccontextmanager
async def listening(address: str) -> AsyncGenerator[tuple[ShmListener, asyncio.Queue[ShmLink]]]:
    links: asyncio.Queue[ShmLink] = asyncio.Queue()
    listener = listen(address, links.put_nowait, endpoint("node"))
    try:
        yield listener, links
    finally:
        listener.close()
        await listener.wait_closed()
        while not links.empty():
            links.get_nowait().close()


# ---- descriptors


async def test_a_listener_that_gets_no_descriptor_says_what_to_do(address: str) -> None:
    with descriptors_left(0), pytest.raises(OutOfDescriptors, match=r"the listener at .*ulimit -n"):
        listen(address, lambda link: None, endpoint("node"))
    listen(address, lambda link: None, endpoint("node")).close()


async def test_a_dial_without_descriptors_fails_alone_and_can_be_repeated(address: str) -> None:
    async with listening(address) as (_, links):
        before = await dial(address, endpoint("rank1"))
        kept = await links.get()
        with descriptors_left(0), pytest.raises(OutOfDescriptors, match=r"a link to .*ulimit -n"):
            await dial(address, endpoint("rank2"))
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        kept.on_frame = lambda header, payload: heard.put_nowait(bytes(payload))
        before.send(b"still here")
        assert await heard.get() == b"still here"
        again = await dial(address, endpoint("rank2"))
        for link in (before, again):
            link.close()


@pytest.mark.parametrize("left", range(1, 12))
async def test_descriptors_that_run_out_anywhere_in_a_handshake(address: str, left: int) -> None:
    """Both ends are this process. At either of them it is typed, and the next dial works."""
    async with listening(address) as (listener, links):
        with capture_logs() as logs, descriptors_left(left):
            try:
                link = await dial(address, endpoint("rank1"), timeout_ns=SECONDS // 5)
            except ZbmdError as error:
                found: str | None = type(error).__name__
            else:
                found = None
                link.close()
        told = [entry.get("kind") for entry in logs if entry["event"] == "connection refused"]
        # The other end hears that we have gone, or, if nobody could accept it, nothing until its time is up.
        known = {
            None,
            "OutOfDescriptors",
            "PeerLost",
            "HungUp",
            "DeadlineExceeded",
            "HelloTimeout",
            "Evicted",
        }
        assert {found, *told} <= known, (found, logs)
        again = await dial(address, endpoint("rank2"))
        assert again.peer.name == "node"
        again.close()
        assert listener.half_open <= 1
        while not links.empty():
            links.get_nowait().close()


async def test_a_listener_that_could_accept_nothing_accepts_again(address: str) -> None:
    async with listening(address) as (_, links):
        with capture_logs() as logs:
            with descriptors_left(1):  # for the dialer's socket, and none for the listener's
                dialing = asyncio.ensure_future(dial(address, endpoint("rank1")))
                while not any(entry["event"] == "no connection can be accepted" for entry in logs):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            link = await dialing
        accepted = await links.get()
        assert (link.peer.name, accepted.peer.name) == ("node", "rank1")
        accepted.close()
        assert "ulimit -n" in next(e["reason"] for e in logs if e["event"] == "no connection can be accepted")
        link.close()


def test_a_segment_without_descriptors_says_what_to_do() -> None:
    with descriptors_left(0), pytest.raises(OutOfDescriptors, match="ulimit -n"):
        Segment.create(slot=1, incarnation=1, arena_bytes=0, inbox_bytes=0)


# ---- memory


def test_a_peers_segment_that_cannot_be_mapped_is_refused() -> None:
    fd = os.memfd_create("test-huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 1 << 50)
        made = Segment.create(slot=2, incarnation=1, arena_bytes=0, inbox_bytes=0)
        header = bytearray(made.mapping.view(0, 64))
        made.close()
        header[8:16] = (1 << 50).to_bytes(8, "little")
        os.pwrite(fd, header, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        with pytest.raises(OutOfMemory, match=r"1,024\.0 TiB.*ulimit -v"):
            PeerSegment.attach([fd], slot=2)
    finally:
        os.close(fd)


@pytest.mark.parametrize("how", ["sealed against writing", "open for reading alone"])
def test_a_peers_segment_that_cannot_be_written_is_refused(how: str) -> None:
    made = Segment.create(slot=2, incarnation=1, arena_bytes=0, inbox_bytes=0)
    fd = os.memfd_create("test-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, made.mapping.view(0, made.nbytes))
    made.close()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | (fcntl.F_SEAL_WRITE if how.startswith("sealed") else 0))
    handed = (
        os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC) if how.startswith("open") else os.dup(fd)
    )
    os.close(fd)
    try:
        with pytest.raises(RemoteProtocolError, match="cannot be mapped"):
            PeerSegment.attach([handed], slot=2)
    finally:
        os.close(handed)


# ---- addresses


async def test_an_address_in_use_says_what_to_do(address: str) -> None:
    async with listening(address):
        with pytest.raises(LocalProtocolError, match=r"already in use.*another address"):
            listen(address, lambda link: None, endpoint("other"))
        link = await dial(address, endpoint("rank1"), timeout_ns=now_ns())
        assert link.peer.name == "node", "the one that was there first goes on"
        link.close()


# ---- clocks


@pytest.mark.parametrize("jump_s", [-30 * 365 * 24 * 3600, -3600, -1, 1, 3600])
async def test_frames_and_their_order_outlive_a_jump_of_the_wall_clock(jump_s: int) -> None:
    """Whichever way it goes: stamps only grow, frames come, and what waits by the other clock waits on."""
    ours, theirs = link_pair(endpoint("a"), endpoint("b"))
    stamps: list[int] = []
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    def hear(header: FrameHeader, payload: memoryview) -> None:
        stamps.append(header.hlc)
        heard.put_nowait(bytes(payload))

    theirs.on_frame = hear
    ours.send(b"before")
    async with asyncio.timeout(60):
        assert await heard.get() == b"before"
    jumped_ns = time.time_ns() + jump_s * SECONDS
    ours._wall_ns = lambda: jumped_ns
    for number in range(3):
        ours.send(bytes([number]))
        async with asyncio.timeout(60):
            assert await heard.get() == bytes([number])
    assert stamps == sorted(set(stamps)), "a stamp has gone back"
    for link in (ours, theirs):
        link.close()
