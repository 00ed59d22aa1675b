"""TCP links: addresses, interfaces, socket options, stripes, and readers that pause."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from pathlib import Path

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from support.links.link_harness import COOKIE, Ear, fill
from support.tcp.tcp_machine import has_ipv6

from zbmd.transport.bulk.stripe_io import Stripe
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, PeerLost, UserError, ZbmdError
from zbmd.transport.handshake.session_setup import JoinRefused, ProtectionDiffers
from zbmd.transport.host.link_choice import parse_interface_filter
from zbmd.transport.host.tcp_silence import Progress, Silence, read_progress
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.native._native import now_ns
from zbmd.transport.secure.protection import STRIPES_MAX, Protection, Purpose
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp import sockets
from zbmd.transport.tcp.address import TcpAddress, TcpSettings, parse_address, source_of
from zbmd.transport.tcp.link import TcpLink
from zbmd.transport.tcp.sockets import connect, free_port, listen_on, resolve

SHORT_NS = 100_000_000
"""A recovery budget by which little silence is a loss."""
PATIENCE_NS = 60_000_000_000
ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def endpoint(name: str = "a", budget_ns: int = 10**9) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1, job=7)
    return Endpoint(identity=identity, cookie=COOKIE, deadlines=derive(budget_ns))


class Server:
    """A listener that collects its links."""

    def __init__(self, listener: tcp.TcpListener, links: asyncio.Queue[TcpLink]) -> None:
        self.listener, self.links = listener, links

    @classmethod
    async def start(cls, address: str = "127.0.0.1:0", settings: TcpSettings | None = None) -> Server:
        links: asyncio.Queue[TcpLink] = asyncio.Queue()
        return cls(await tcp.listen(address, links.put_nowait, endpoint("b"), settings=settings), links)

    async def pair(self, settings: TcpSettings | None = None) -> tuple[TcpLink, TcpLink]:
        link = await tcp.dial(self.listener.address, endpoint(), settings=settings)
        return link, await self.links.get()

    async def stop(self, *links: TcpLink) -> None:
        for link in links:
            link.close()
        self.listener.close()
        await self.listener.wait_closed()


# --- addresses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node1:29400", "node1", 29400),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[::1]:65535", "::1", 65535),
        ("[fe80::1%eth0]:5", "fe80::1%eth0", 5),
        (":0", "", 0),
        (" *:7 ", "", 7),
    ],
)
def test_addresses_as_users_write_them(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert (address.host, address.port) == (host, port)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "node1", "node1:", "::1:5", "[::1]", "[::g]:5", "a:70000", "[node]:5", "a:-1"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UserError):
        parse_address(text)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_user_error(text: str) -> None:
    try:
        address = parse_address(text)
    except UserError:
        return
    assert parse_address(str(address)) == address


def test_sources_of_strangers() -> None:
    assert source_of("10.0.0.1") == source_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff%eth0") != source_of("2001:db8:0:1::1")


# --- listening and dialing ------------------------------------------------------------------------------


async def test_a_port_in_use() -> None:
    server = await Server.start()
    with pytest.raises(UserError, match="in use"):
        await Server.start(str(server.listener.address))
    await server.stop()


async def test_an_address_of_another_machine() -> None:
    with pytest.raises(UserError, match="ip addr"):
        await Server.start("203.0.113.7:0")


async def test_a_host_that_nobody_knows() -> None:
    for make in (Server.start, lambda at: tcp.dial(at, endpoint())):
        with pytest.raises(UserError, match="no-such-host"):
            await make("no-such-host.invalid:5")


async def test_a_name_that_has_several_addresses_is_tried_in_turn() -> None:
    """Nobody listens at the first; the second answers."""
    server = await Server.start()
    address = server.listener.address
    dead = socket.create_server(("127.0.0.2", 0))
    port = dead.getsockname()[1]
    dead.close()

    async def two(where: TcpAddress, deadline_ns: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
        return [(socket.AF_INET, ("127.0.0.2", port)), (socket.AF_INET, (address.host, address.port))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zbmd.transport.tcp.sockets.resolve", two)
        link, other = await server.pair()
    await server.stop(link, other)


async def test_an_address_that_does_not_answer_does_not_hold_up_the_next() -> None:
    """The first one's backlog is full: it neither takes nor refuses."""
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(full.getsockname())
    server = await Server.start()
    at = server.listener.address

    async def two(where: TcpAddress, deadline_ns: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
        return [(socket.AF_INET, full.getsockname()), (socket.AF_INET, (at.host, at.port))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zbmd.transport.tcp.sockets.resolve", two)
        sock = await connect(at, now_ns() + 10 * 10**9)
        assert sock.getpeername() == (at.host, at.port)
        sock.close()
        patch.setattr("zbmd.transport.tcp.sockets.resolve", lambda *_: two_full())

        async def two_full() -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
            return [(socket.AF_INET, full.getsockname())]

        with pytest.raises(DeadlineExceeded, match="firewall"):
            await connect(at, now_ns() + 20_000_000)
    for sock in [full, *fillers]:
        sock.close()
    await server.stop()


@ipv6
async def test_everywhere_is_both_families_on_one_port() -> None:
    server = await Server.start(":0")
    ports = {address.port for address in server.listener.addresses}
    assert len(ports) == 1
    for host in ("127.0.0.1", "::1"):
        link = await tcp.dial(TcpAddress(host=host, port=ports.copy().pop()), endpoint())
        assert link.remote_address.host == host
        link.close()
        (await server.links.get()).close()
    await server.stop()


async def test_families_are_tried_in_turn() -> None:
    found = await resolve(TcpAddress(host="localhost", port=5), now_ns() + 10**10)
    assert {sockaddr[1] for _, sockaddr in found} == {5}


async def test_a_cancellation_that_comes_with_the_answer_of_the_name_server_is_kept() -> None:
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "getaddrinfo", lambda *_, **__: answer, raising=False)
        looking = loop.create_task(resolve(TcpAddress(host="localhost", port=5), now_ns() + 10**11))
        await asyncio.sleep(0)
        answer.set_result([])
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking


async def test_interfaces_that_the_user_names() -> None:
    loopback = TcpSettings(interfaces=parse_interface_filter("=lo"))
    server = await Server.start(":0", loopback)
    assert {address.host for address in server.listener.addresses} <= {"127.0.0.1", "::1"}
    link, other = await server.pair(loopback)
    assert link.local_address.host in ("127.0.0.1", "::1")
    await server.stop(link, other)
    nothing = TcpSettings(interfaces=parse_interface_filter("=no-such-interface"))
    with pytest.raises(UserError, match=r"There are: .*lo"):
        await Server.start(":0", nothing)


def test_a_family_that_is_missing_is_left_out() -> None:
    both = [(socket.AF_INET6, ("2001:db8::5", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))]
    (sock,) = listen_on(both, asked="a test")
    assert sock.family == socket.AF_INET
    sock.close()


def test_a_free_port_is_none_that_the_kernel_gives_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless there are only such: it chooses one then, as where all others are taken."""
    kernels = tmp_path / "range"
    monkeypatch.setattr(sockets, "PORT_RANGE_FILE", kernels)
    kernels.write_text("20000\t60999\n")
    found = [free_port() for _ in range(40)]
    assert all(sockets.FREE_PORTS.start <= port < 20_000 for port in found)
    assert len({*found}) > 1
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setattr(sockets, "FREE_PORTS", (taken.getsockname()[1],))
        kernels.write_text("1024\t2048\n")
        assert free_port() not in sockets.FREE_PORTS
    monkeypatch.setattr(sockets, "FREE_PORTS", range(25_000, 29_000))
    kernels.write_text("1024\t65535\n")
    assert free_port() > 0
    kernels.unlink()
    assert free_port() in sockets.FREE_PORTS


# --- options and pauses ---------------------------------------------------------------------------------


async def test_socket_options_follow_from_the_budget() -> None:
    server = await Server.start()
    link, other = await server.pair()
    deadlines = derive()
    for sock in (link._socket.sock, other._socket.sock):
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for option, value in (
            (socket.TCP_KEEPIDLE, deadlines.tcp_keepalive_idle_s),
            (socket.TCP_KEEPINTVL, deadlines.tcp_keepalive_interval_s),
            (socket.TCP_KEEPCNT, deadlines.tcp_keepalive_count),
            (socket.TCP_USER_TIMEOUT, 0),
        ):
            assert sock.getsockopt(socket.IPPROTO_TCP, option) == value
    await server.stop(link, other)


async def test_a_reader_may_pause_for_longer_than_a_dead_host_is_waited_for() -> None:
    """A shut window is not silence: the kernel's own user timeout would end this link."""
    server = await Server.start()
    links: asyncio.Queue[TcpLink] = asyncio.Queue()
    quick = await tcp.listen("127.0.0.1:0", links.put_nowait, endpoint("c"))
    ours = await tcp.dial(quick.address, endpoint(budget_ns=SHORT_NS), timeout_ns=PATIENCE_NS)
    theirs = await links.get()
    sent = await fill(ours, bytes(4000))
    checks: list[Progress] = []

    def noted(sock: socket.socket) -> Progress:
        checks.append(read_progress(sock))
        return checks[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zbmd.transport.tcp.link.read_progress", noted)
        while len(checks) < 6:  # each comes a quarter of a user timeout after the one before
            await asyncio.wait([asyncio.ensure_future(ours.flush())], timeout=0.05)
            assert not ours.closed
    ear = Ear(theirs)
    await ear.frames(sent)
    quick.close()
    await server.stop(ours, theirs)


def test_what_silence_is() -> None:
    second_ns = 1_000_000_000

    def looks(*seen: tuple[int, int, int, int]) -> list[bool]:
        """The verdicts of looks at (ms, unacknowledged, probes, quiet ms)."""
        silence = Silence()
        return [
            silence.look(
                Progress(unacknowledged=unacknowledged, unanswered_probes=probes, quiet_ms=quiet_ms),
                at_ms * 1_000_000,
                second_ns,
            )
            for at_ms, unacknowledged, probes, quiet_ms in seen
        ]

    assert looks((1000, 1, 0, 50), (1500, 1, 0, 550), (2000, 1, 0, 1050)) == [False, False, True]
    assert looks((1000, 0, 1, 50), (1500, 0, 3, 550), (2000, 0, 4, 1050))[-1], "probes of a shut window"
    assert not any(looks((1000, 1, 0, 50), (1500, 1, 0, 550), (1999, 1, 0, 1049))), "not yet"
    late = (1000, 1, 0, 50), (9000, 1, 0, 8050), (9250, 1, 0, 8300), (9500, 1, 0, 8550)
    assert looks(*late) == [False, False, False, True], "we were kept from looking for eight seconds"
    assert looks((1000, 0, 0, 50), (90_000, 0, 0, 89_050)) == [False, False], "there was nothing to say"
    assert looks((90_000, 1, 0, 89_000), (90_010, 1, 0, 89_010)) == [False, False], "it was sent just now"
    assert looks((1000, 1, 0, 50), (2000, 1, 0, 900)) == [False, False], "it has acknowledged meanwhile"


async def test_a_silent_host_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Progress(unacknowledged=1, unanswered_probes=0, quiet_ms=1 << 20)
    monkeypatch.setattr("zbmd.transport.tcp.link.read_progress", lambda sock: dead)
    server = await Server.start()
    ours = await tcp.dial(server.listener.address, endpoint(budget_ns=SHORT_NS), timeout_ns=PATIENCE_NS)
    theirs = await server.links.get()
    ours.send(b"?")
    ear = Ear(ours)
    error = await ear.end()
    assert isinstance(error, PeerLost)
    assert "acknowledged nothing" in str(error)
    await server.stop(theirs)


def test_a_reset_that_comes_with_the_last_frame_is_heard() -> None:
    """libuv reports it once: a read that takes the frame alone would miss it, and the link stay open."""

    async def play() -> ZbmdError | None:
        server = await Server.start()
        ours, theirs = await server.pair()
        ear = Ear(ours)
        theirs.send(b"last words")
        sock = theirs._socket.sock  # the end of a process that has not read all that we sent
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs._loop.remove_reader(sock.fileno())
        sock.close()
        async with asyncio.timeout(120):
            error = await ear.end()
        server.listener.close()
        await server.listener.wait_closed()
        return error

    assert isinstance(uvloop.run(play()), PeerLost)


async def test_a_jump_of_the_wall_clock_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await Server.start()
    real = time.time_ns
    for jump_ns in (-(10**18), 10**18):
        monkeypatch.setattr(time, "time_ns", lambda jump_ns=jump_ns: real() + jump_ns)
        link, other = await server.pair()
        ear = Ear(other)
        link.send(b"what time is it")
        assert await ear.frames(1) == [b"what time is it"]
        link.close()
        assert await ear.end() is None
    await server.stop()


async def test_sides_that_differ_in_protection() -> None:
    none = TcpSettings(protection=Protection.NONE)
    with capture_logs() as logs:
        server = await Server.start(settings=none)
        with pytest.raises(ProtectionDiffers, match=r"none.*mac"):
            await tcp.dial(server.listener.address, endpoint())
        await server.stop()
    assert "not protected" in logs[0]["event"]


# --- stripes ----------------------------------------------------------------------------------------------


async def test_stripes_join_their_link_and_carry_bytes_of_their_own() -> None:
    server = await Server.start()
    ours, theirs = await server.pair()
    early = await tcp.open_stripe(ours, 0, endpoint())
    joined: asyncio.Queue[Stripe] = asyncio.Queue()
    theirs.on_stripe = joined.put_nowait
    late = await tcp.open_stripe(ours, STRIPES_MAX - 1, endpoint())
    stripes = {0: early, STRIPES_MAX - 1: late}
    for _ in range(2):
        other = await joined.get()
        stripe = stripes[other.session.stripe]
        assert stripe.session.purpose is other.session.purpose is Purpose.STRIPE
        assert stripe.session.control_id == other.session.control_id == ours.session.session_id
        assert stripe.session.keys and other.session.keys
        assert stripe.session.keys.send == other.session.keys.receive
        assert stripe.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000
        stripe.sock.send(b"bulk")
        assert await asyncio.get_running_loop().sock_recv(other.sock, 10) == b"bulk"
        stripe.sock.close()
        other.sock.close()
    with capture_logs() as logs, pytest.raises(JoinRefused, match="lane-taken"):
        await tcp.open_stripe(ours, 0, endpoint())
    assert [entry["kind"] for entry in logs] == ["JoinRefused"]
    await server.stop(ours, theirs)


async def test_stripes_that_cannot_be() -> None:
    server = await Server.start()
    ours, theirs = await server.pair()
    for link, stripe in ((theirs, 0), (ours, STRIPES_MAX), (ours, -1)):
        with pytest.raises(LocalProtocolError, match="dialer of an open link"):
            await tcp.open_stripe(link, stripe, endpoint())
    ear, our_ear = Ear(theirs), Ear(ours)
    unheard = await tcp.open_stripe(ours, 3, endpoint())
    theirs.close()
    await ear.end()
    assert await asyncio.get_running_loop().sock_recv(unheard.sock, 10) == b"", "nobody took it"
    unheard.sock.close()
    await our_ear.end()
    with pytest.raises(LocalProtocolError):
        await tcp.open_stripe(ours, 4, endpoint())
    await server.stop()
