"""A TCP listener withstands strangers, floods and shortages: real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import struct
from collections.abc import AsyncGenerator

import pytest
from structlog.testing import capture_logs
from support.links.link_harness import COOKIE, Ear

from zbmd.transport.errors import OutOfDescriptors, PeerLost, RemoteProtocolError
from zbmd.transport.handshake.hello import HELLO_VERSION, MAX_BODY_BYTES
from zbmd.transport.handshake.session_setup import PeerBusy
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint, LinkLimits
from zbmd.transport.tcp.connect import TcpListener, dial, listen
from zbmd.transport.tcp.link import TcpLink

HOUR_NS = 3600 * 10**9
LINK_BYTES_MAX = 256 * 1024


def endpoint(name: str = "a", incarnation: int = 1) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=incarnation, job=7)
    return Endpoint(identity=identity, cookie=COOKIE, limits=LinkLimits())


class Listening:
    """A listener and the links that it has made."""

    def __init__(self) -> None:
        self.links: asyncio.Queue[TcpLink] = asyncio.Queue()
        self.listener: TcpListener

    async def pair(self, ours: Endpoint | None = None) -> tuple[TcpLink, TcpLink]:
        link = await dial(self.listener.address, ours or endpoint())
        return link, await self.links.get()


@contextlib.asynccontextmanager
async def listening(
    *, timeout_ns: int | None = None, half_open_max: int = 256, links_max: int = 4096
) -> AsyncGenerator[Listening]:
    server = Listening()
    server.listener = await listen(
        "127.0.0.1:0",
        server.links.put_nowait,
        endpoint("b"),
        timeout_ns=timeout_ns,
        half_open_max=half_open_max,
        links_max=links_max,
    )
    yield server
    server.listener.close()
    await server.listener.wait_closed()


async def stranger(server: Listening, words: bytes = b"") -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    address = server.listener.address
    await asyncio.get_running_loop().sock_connect(sock, (address.host, address.port))
    if words:
        sock.send(words)
    return sock


async def end_of(sock: socket.socket) -> bytes:
    """Read until the listener has closed the connection; what it had said."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while data := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
            said += data
    sock.close()
    return said


async def still_welcomes(server: Listening) -> None:
    ours, theirs = await server.pair()
    ear, our_ear = Ear(theirs), Ear(ours)
    ours.send(b"honest")
    assert await ear.frames(1) == [b"honest"]
    ours.close()
    assert await ear.end() is await our_ear.end() is None


HEADER = b"zbmd" + HELLO_VERSION.to_bytes(2, "little") + b"\x01\0"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "Garbage"),
        (bytes(1000), "Garbage"),
        (b"\x16\x03\x01\x02\0", "Garbage"),
        (HEADER[:4] + b"\x63\0" + HEADER[6:] + b"\x20\0\0\0" + bytes(32), "WrongVersion"),
        (HEADER + (MAX_BODY_BYTES + 1).to_bytes(4, "little"), "Oversized"),
        (b"ZBMD" + bytes(60), "Garbage"),
    ],
    ids=["http", "zeros", "tls", "version", "oversized", "frame"],
)
async def test_words_that_are_no_hello(words: bytes, kind: str) -> None:
    async with listening(timeout_ns=HOUR_NS) as server:
        with capture_logs() as logs:
            said = await end_of(await stranger(server, words))
        assert [entry["kind"] for entry in logs] == [kind]
        assert logs[0]["source"] == "127.0.0.1"
        assert len(said) < 100, "a stranger learns little"
        await still_welcomes(server)


async def test_many_slow_strangers_do_not_keep_an_honest_peer_out() -> None:
    """Some say nothing, some begin a hello and say a byte more now and then; all hold on for ever."""
    async with listening(timeout_ns=HOUR_NS, half_open_max=8) as server:
        with capture_logs() as logs:
            strangers = [await stranger(server, HEADER[: n % 13]) for n in range(40)]
            for _ in range(3):
                await still_welcomes(server)
                for n, sock in enumerate(strangers):
                    with contextlib.suppress(OSError):
                        sock.send(HEADER[n % 13 : n % 13 + 1])
        assert server.listener.half_open <= 8
        assert {entry["kind"] for entry in logs} <= {"Evicted", "Garbage", "HungUp"}
        for sock in strangers:
            sock.close()


async def test_a_flood_does_not_keep_an_honest_peer_out() -> None:
    async with listening(timeout_ns=HOUR_NS, half_open_max=4) as server:
        with capture_logs() as logs:
            stop = asyncio.Event()

            async def flood() -> None:
                while not stop.is_set():
                    (await stranger(server, b"zbm")).close()

            flooding = [asyncio.ensure_future(flood()) for _ in range(4)]
            for _ in range(3):
                await still_welcomes(server)
            stop.set()
            await asyncio.gather(*flooding)
        assert len(logs) <= 64, "a flood does not fill the log"


async def test_a_stranger_is_ended_by_the_deadline_however_busy_he_looks() -> None:
    async with listening(timeout_ns=30_000_000) as server:
        with capture_logs() as logs:
            await end_of(await stranger(server, HEADER))
        assert [entry["kind"] for entry in logs] == ["HelloTimeout"]


async def test_links_are_bounded_and_the_next_one_is_told() -> None:
    async with listening(links_max=2) as server:
        pairs = [await server.pair() for _ in range(2)]
        with capture_logs() as logs, pytest.raises(PeerBusy, match="try again"):
            await dial(server.listener.address, endpoint())
        assert {entry["kind"] for entry in logs} == {"PeerBusy"}
        ear, our_ear = Ear(pairs[0][1]), Ear(pairs[0][0])
        pairs[0][0].close()
        await ear.end()
        await our_ear.end()
        assert server.listener.links == 1
        await still_welcomes(server)
        for link in pairs[1]:
            link.close()


async def test_a_listener_out_of_descriptors_says_so_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept = socket.socket.accept
    failures = 5

    def exhausted(self: socket.socket) -> tuple[socket.socket, object]:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(self)

    async with listening() as server:
        monkeypatch.setattr(socket.socket, "accept", exhausted)
        with capture_logs() as logs:
            await still_welcomes(server)
        monkeypatch.undo()
        assert failures == 0
        assert [entry["event"] for entry in logs] == [
            "no connection can be accepted",
            "connections are accepted again",
        ]
        assert "ulimit -n" in logs[0]["reason"]


async def test_a_dialer_out_of_descriptors_is_told_what_to_do() -> None:
    async with listening() as server:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        holes = [os.dup(0) for _ in range(highest)]  # so that none below the limit is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(holes), limits[1]))
        try:
            with pytest.raises(OutOfDescriptors, match="ulimit -n"):
                await dial(server.listener.address, endpoint())
            with pytest.raises(OutOfDescriptors, match="ulimit -n"):
                await listen("127.0.0.1:0", server.links.put_nowait, endpoint())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in holes:
                os.close(fd)
        await still_welcomes(server)


async def test_a_thousand_links_in_one_process() -> None:
    """Both ends of 1,000 idle links: each end within 256 KiB of the process's memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    count = 1000
    try:
        async with listening() as server:
            first = await server.pair()
            before = _resident_bytes()
            dialed = [await server.pair() for _ in range(count - 1)]
            grown = _resident_bytes() - before
            assert grown / (2 * (count - 1)) < LINK_BYTES_MAX
            ears = [Ear(theirs) for _, theirs in [first, *dialed]]
            for number, (ours, _) in enumerate([first, *dialed]):
                ours.send(number.to_bytes(4, "little"))
            for number, ear in enumerate(ears):
                assert await ear.frames(1) == [number.to_bytes(4, "little")]
            for ours, theirs in [first, *dialed]:
                ours.close()
                theirs.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


async def test_many_may_dial_at_once() -> None:
    """A crowd of honest peers, more than there are places, all get in."""
    async with listening(half_open_max=16) as server:
        links = await asyncio.gather(*(dial(server.listener.address, endpoint()) for _ in range(100)))
        for link in links:
            link.close()
            (await server.links.get()).close()


async def test_peers_that_reset_their_connection_as_it_stands() -> None:
    async with listening() as server:
        with capture_logs():
            for _ in range(20):
                link = await dial(server.listener.address, endpoint())
                link._socket.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                link._fail(RemoteProtocolError("the test resets it"))
            last = await dial(server.listener.address, endpoint("last"))
            while (theirs := await server.links.get()).peer.name != "last":
                assert isinstance(await Ear(theirs).end(), PeerLost)
        ear, our_ear = Ear(theirs), Ear(last)
        last.close()
        assert await ear.end() is await our_ear.end() is None


async def test_nobody_listens() -> None:
    async with listening() as server:
        address = server.listener.address
    with pytest.raises(PeerLost, match="nobody listens"):
        await dial(address, endpoint())
