"""A stranger that connects ends its own connection, with one log line, and nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from structlog.testing import capture_logs

from zbmd.transport.handshake.hello import (
    HELLO_MAGIC,
    HELLO_VERSION,
    MAX_BODY_BYTES,
    HelloError,
    Oversized,
    WrongCookie,
    WrongJob,
    WrongUser,
    WrongVersion,
)
from zbmd.transport.identity import Identity, Side
from zbmd.transport.memory.memfd import create_memfd
from zbmd.transport.memory.segment import Segment
from zbmd.transport.shm.connect import Endpoint, ShmListener, _hello, dial, listen
from zbmd.transport.shm.link import ShmLink, link_memory_bytes

Fork = Callable[[Callable[[], None]], int]
COOKIE = b"a cookie of the tests, 32 bytes "
NOBODY = 65534
SECONDS = 1_000_000_000


@pytest.fixture
def address() -> str:
    return f"zbmd-test-{os.getpid()}-{os.urandom(4).hex()}"


def endpoint(name: str = "rank0", cookie: bytes = COOKIE, job: int = 7) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1, job=job)
    return Endpoint(identity=identity, cookie=cookie)


@asynccontextmanager
async def listening(address: str, **limits: int) -> AsyncGenerator[tuple[ShmListener, list[ShmLink]]]:
    links: list[ShmLink] = []
    listener = listen(address, links.append, endpoint("node"), **limits)
    try:
        yield listener, links
    finally:
        listener.close()
        await listener.wait_closed()
        for link in links:
            link.close()


def connect(address: str, kind: socket.SocketKind = socket.SOCK_SEQPACKET) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.setblocking(False)
    try:
        sock.connect(b"\0" + address.encode())
    except OSError:
        sock.close()
        raise
    return sock


async def end_of(sock: socket.socket) -> bytes:
    """Read until the listener has closed the connection; return all it had said."""
    loop = asyncio.get_running_loop()
    said = b""
    try:
        while data := await loop.sock_recv(sock, 1 << 18):
            said += data
    except ConnectionResetError:
        pass
    sock.close()
    return said


async def still_welcomes(address: str) -> None:
    link = await dial(address, endpoint("rank1"))
    assert link.peer.name == "node"
    link.close()


def hello_header(version: int = HELLO_VERSION, body_bytes: int = 32) -> bytes:
    return struct.pack("<4sHHI", HELLO_MAGIC, version, 1, body_bytes)


@pytest.mark.parametrize(
    ("first_words", "kind"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "Garbage"),
        (b"\0" * 1000, "Garbage"),
        (b"zbm", "HungUp"),
        (hello_header(version=99) + bytes(32), "WrongVersion"),
        (hello_header(body_bytes=MAX_BODY_BYTES + 1), "Oversized"),
        (hello_header() + bytes(32) + hello_header() + bytes(32), "Garbage"),
        (hello_header() + bytes(31), "HungUp"),
        (b"", "HungUp"),
    ],
    ids=["http", "zeros", "cut-short", "version", "oversized", "out-of-turn", "half-a-nonce", "silence"],
)
async def test_words_that_are_no_hello(address: str, first_words: bytes, kind: str) -> None:
    async with listening(address) as (listener, links):
        with capture_logs() as logs:
            stranger = connect(address)
            if first_words:
                stranger.send(first_words)
            if kind == "HungUp":
                stranger.shutdown(socket.SHUT_WR)
            await end_of(stranger)
            while listener.half_open:
                await asyncio.wait(set(listener._tasks))
        assert [(entry["event"], entry["kind"]) for entry in logs] == [("connection refused", kind)]
        assert logs[0]["peer_pid"] == os.getpid()
        await still_welcomes(address)
        assert [link.peer.name for link in links] == ["rank1"]


async def test_a_message_larger_than_any_hello(address: str) -> None:
    async with listening(address) as (_, links):
        stranger = connect(address)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        stranger.send(b"zbmd" + bytes(MAX_BODY_BYTES + 5000))
        await end_of(stranger)
        await still_welcomes(address)
        assert len(links) == 1


async def test_a_stream_socket_finds_nobody(address: str) -> None:
    async with listening(address):
        with pytest.raises(ConnectionRefusedError):
            connect(address, socket.SOCK_STREAM)


@pytest.mark.parametrize(
    ("stranger", "error"),
    [
        (endpoint(cookie=b"another cookie, as long as ours "), WrongCookie),
        (endpoint(job=8), WrongJob),
    ],
    ids=["cookie", "job"],
)
async def test_a_process_of_ours_that_does_not_belong_here(
    address: str, stranger: Endpoint, error: type[HelloError]
) -> None:
    async with listening(address) as (_, links):
        with capture_logs() as logs, pytest.raises(error):
            await dial(address, stranger)
        assert [entry["kind"] for entry in logs] == [error.__name__]
        assert not links
        await still_welcomes(address)


async def test_a_listener_that_does_not_hold_our_cookie_is_not_believed(address: str) -> None:
    impostor = listen(
        address, lambda link: None, endpoint("node", cookie=b"another cookie, as long as ours ")
    )
    with pytest.raises(WrongCookie):
        await dial(address, endpoint())
    impostor.close()
    await impostor.wait_closed()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused_even_with_the_cookie(address: str, fork: Fork) -> None:
    us = endpoint()

    def other_user() -> None:
        os.setresuid(NOBODY, NOBODY, NOBODY)

        async def main() -> None:
            with pytest.raises(WrongUser):
                await dial(address, us)  # it lies: its identity says our uid

        asyncio.run(main())

    async with listening(address) as (_, links):
        with capture_logs() as logs:
            pid = fork(other_user)
            _, status = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert [(entry["kind"], entry["peer_uid"]) for entry in logs] == [("WrongUser", NOBODY)]
        assert not links
        await still_welcomes(address)


async def test_connections_that_say_nothing_are_bounded_in_number(address: str) -> None:
    async with listening(address, half_open_max=2, timeout_ns=3600 * SECONDS) as (listener, _):
        with capture_logs() as logs:
            silent = [connect(address) for _ in range(4)]
            await end_of(silent[0])
            await end_of(silent[1])
            await still_welcomes(address)
        assert {entry["kind"] for entry in logs} == {"Evicted"}
        assert listener.half_open <= 2
        for sock in silent:
            sock.close()


async def test_connections_that_say_nothing_are_bounded_in_time(address: str) -> None:
    async with listening(address, timeout_ns=1_000_000):
        with capture_logs() as logs:
            await end_of(connect(address))
        assert [entry["kind"] for entry in logs] == ["HelloTimeout"]


# --- after a good hello: what a peer may hand over ------------------------------------------------------


class Hands:
    """Descriptors to hand over, good and bad ones; all closed at the end."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def memory(self, nbytes: int = link_memory_bytes(1 << 12)) -> int:
        return self._keep(create_memfd("test-link", nbytes))

    def unsealed(self) -> int:
        fd = self._keep(os.memfd_create("test-unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(fd, link_memory_bytes(1 << 12))
        return fd

    def eventfd(self, flags: int = os.EFD_NONBLOCK) -> int:
        return self._keep(os.eventfd(0, flags | os.EFD_CLOEXEC))

    def segment(self, slot: int, incarnation: int) -> int:
        made = Segment.create(slot=slot, incarnation=incarnation, arena_bytes=0, inbox_bytes=0)
        fd = self._keep(os.dup(made.fds[0]))
        made.close()
        return fd

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def _keep(self, fd: int) -> int:
        self.fds.append(fd)
        return fd


def offer(ring_bytes: object = 1 << 12, slot: object = None) -> bytes:
    return msgspec.msgpack.encode(["offer", ring_bytes, slot])


Handover = Callable[[Hands], tuple[bytes, list[int]]]
HANDOVERS: dict[str, Handover] = {
    "garbage": lambda h: (b"\xc1garbage", [h.memory(), h.eventfd(), h.eventfd()]),
    "too long": lambda h: (bytes(1000), [h.memory(), h.eventfd(), h.eventfd()]),
    "no descriptors": lambda h: (offer(), []),
    "one too few": lambda h: (offer(), [h.memory(), h.eventfd()]),
    "one too many": lambda h: (offer(), [h.memory(), h.eventfd(), h.eventfd(), h.eventfd()]),
    "far too many": lambda h: (offer(), [h.eventfd() for _ in range(20)]),
    "a slot without a segment": lambda h: (offer(slot=1), [h.memory(), h.eventfd(), h.eventfd()]),
    "no power of two": lambda h: (offer(5000), [h.memory(), h.eventfd(), h.eventfd()]),
    "enormous rings": lambda h: (offer(1 << 40), [h.memory(), h.eventfd(), h.eventfd()]),
    "negative rings": lambda h: (offer(-4096), [h.memory(), h.eventfd(), h.eventfd()]),
    "rings of text": lambda h: (offer("4096"), [h.memory(), h.eventfd(), h.eventfd()]),
    "memory too small": lambda h: (offer(), [h.memory(4096), h.eventfd(), h.eventfd()]),
    "memory that can shrink": lambda h: (offer(), [h.unsealed(), h.eventfd(), h.eventfd()]),
    "no memory": lambda h: (offer(), [h.eventfd(), h.eventfd(), h.eventfd()]),
    "no eventfd": lambda h: (offer(), [h.memory(), h.memory(), h.eventfd()]),
    "an eventfd that blocks": lambda h: (offer(), [h.memory(), h.eventfd(0), h.eventfd()]),
    "a forged segment": lambda h: (offer(slot=1), [h.memory(), h.eventfd(), h.eventfd(), h.memory()]),
    "a segment of another slot": lambda h: (
        offer(slot=1),
        [h.memory(), h.eventfd(), h.eventfd(), h.segment(2, 1)],
    ),
    "a segment of another incarnation": lambda h: (
        offer(slot=1),
        [h.memory(), h.eventfd(), h.eventfd(), h.segment(1, 9)],
    ),
    "a slot out of range": lambda h: (
        offer(slot=1024),
        [h.memory(), h.eventfd(), h.eventfd(), h.segment(1, 1)],
    ),
}


async def after_hello(address: str) -> socket.socket:
    sock = connect(address)
    loop = asyncio.get_running_loop()
    await _hello(sock, endpoint(), Side.DIALER, int(loop.time() * SECONDS) + 3600 * SECONDS)
    return sock


@pytest.mark.parametrize("name", HANDOVERS)
async def test_a_peer_that_hands_over_something_else(address: str, name: str) -> None:
    hands = Hands()
    async with listening(address) as (_, links):
        sock = await after_hello(address)
        data, fds = HANDOVERS[name](hands)
        with capture_logs() as logs:
            socket.send_fds(sock, [data], fds)
            await end_of(sock)
        assert [entry["kind"] for entry in logs] == ["RemoteProtocolError"]
        assert not links
        await still_welcomes(address)
    hands.close()


async def test_the_hands_above_make_a_link_when_nothing_is_wrong(address: str) -> None:
    hands = Hands()
    async with listening(address) as (_, links):
        sock = await after_hello(address)
        fds = [hands.memory(), hands.eventfd(), hands.eventfd(), hands.segment(1, 1)]
        socket.send_fds(sock, [offer(slot=1)], fds)
        answer = await asyncio.get_running_loop().sock_recv(sock, 100)
        assert msgspec.msgpack.decode(answer) == ["answer", None]
        assert len(links) == 1 and links[0].peer_segment is not None
        sock.close()
    hands.close()


async def test_a_peer_that_ends_after_its_hello(address: str) -> None:
    async with listening(address) as (_, links):
        with capture_logs() as logs:
            sock = await after_hello(address)
            sock.shutdown(socket.SHUT_WR)
            await end_of(sock)
        assert [entry["kind"] for entry in logs] == ["PeerLost"]
        assert not links


async def test_a_peer_that_hangs_after_its_hello(address: str) -> None:
    async with listening(address, timeout_ns=SECONDS) as (_, links):  # enough for its hello
        with capture_logs() as logs:
            await end_of(await after_hello(address))
        assert [entry["kind"] for entry in logs] == ["DeadlineExceeded"]
        assert not links


def test_every_refusal_of_the_hello_is_typed() -> None:
    assert {WrongVersion, Oversized} <= set(HelloError.__subclasses__())
