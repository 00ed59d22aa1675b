"""Heartbeats by the native thread: beats on a stripe, what wakes Python, and what no beat may do."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import PROGRAMS

from zbmd.actors.cluster.heartbeats._heartbeat import (
    BEAT_BYTES,
    BEAT_KEY_BYTES,
    PEERS_MAX,
    BeatReader,
    BeatWriter,
    NativeHeartbeats,
    siphash,
)
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.native._native import now_ns

MS = 1_000_000
HOUR_NS = 3_600_000 * MS
PERIOD_NS = 2 * MS
KEYS = b"a" * BEAT_KEY_BYTES, b"b" * BEAT_KEY_BYTES
U64 = st.integers(0, 2**64 - 1)

# SipHash-2-4 of 00 01 02 … under the key 00 01 … 0f: the authors' vectors, for 0 to 15 bytes.
VECTORS = (
    *("310e0edd47db6f72", "fd67dc93c539f874", "5a4fa9d909806c0d", "2d7efbd796666785", "b7877127e09427cf"),
    *("8da699cd64557618", "cee3fe586e46c9cb", "37d1018bf50002ab", "6224939a79f5f593", "b0e4a90bdf82009e"),
    *("f3b9dd94c5bb5d7a", "a7ad6b22462fb3f4", "fbe50e86bc8f1e75", "903d84c02756ea14", "eef27a8e90ca23f7"),
    "e545be4961ca29a1",
)


def test_the_tag_is_siphash() -> None:
    for nbytes, vector in enumerate(VECTORS):
        tag = siphash(bytes(range(16)), bytes(range(nbytes)))
        assert tag.to_bytes(8, "little").hex() == vector, nbytes
    with pytest.raises(LocalProtocolError, match="a key of heartbeats has 16 bytes, not 3"):
        siphash(b"abc", b"")


@given(st.lists(st.tuples(U64, U64), min_size=1, max_size=5), st.lists(st.integers(1, 40)))
def test_beats_are_read_however_they_are_cut(said: list[tuple[int, int]], cuts: list[int]) -> None:
    writer, reader = BeatWriter(KEYS[0]), BeatReader(KEYS[0])
    stream = b"".join(writer.write(*each) for each in said)
    for cut in cuts:
        reader.feed(stream[:cut])
        stream = stream[cut:]
    reader.feed(stream)
    assert (reader.beats, reader.last) == (len(said), said[-1])


@given(st.integers(0, BEAT_BYTES * 8 - 1))
def test_no_bit_of_a_beat_can_be_changed(bit: int) -> None:
    beat = bytearray(BeatWriter(KEYS[0]).write(3, 2))
    beat[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError, match="the tag of a beat is wrong"):
        BeatReader(KEYS[0]).feed(beat)


def test_beats_cannot_be_repeated_left_out_or_sent_back() -> None:
    writer = BeatWriter(KEYS[0])
    beats = [writer.write(1, 1) for _ in range(3)]
    for order in ((0, 0), (1,), (0, 2), (0, 1, 0)):
        with pytest.raises(RemoteProtocolError, match="out of its turn"):
            BeatReader(KEYS[0]).feed(b"".join(beats[at] for at in order))
    with pytest.raises(RemoteProtocolError, match="the tag of a beat is wrong"):
        BeatReader(KEYS[1]).feed(beats[0])


# --- the thread -----------------------------------------------------------------------------------------


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialed = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    return dialed, accepted


class Node:
    """One thread that beats, with one peer."""

    def __init__(self, *, lease_ns: int = HOUR_NS) -> None:
        self.native = NativeHeartbeats(period_ns=PERIOD_NS, lease_ns=lease_ns)
        self.place = self.native.place()
        self.native.beat_to(self.place, True)
        self.native.say(True, 1, 1)
        self.arrivals: list[int] = []
        self.said: tuple[int, int] | None = None
        self.ended = ""

    def observes(self, limit_ns: int) -> int:
        """Observe the peer from now on, which counts as its first arrival.

        The time is read before the one that the thread counts from: it tells a silence once, and that must be
        one here, too.
        """
        begun_ns = now_ns()
        self.native.observe(self.place, limit_ns)
        self.arrivals.append(begun_ns)
        return begun_ns

    def take(self) -> None:
        news = self.native.take(self.place)
        if news is not None:
            arrivals, said, ended, _ = news
            self.arrivals += arrivals
            self.said = said or self.said
            self.ended = ended or self.ended

    async def woken(self, until: Callable[[], bool]) -> None:
        """Take what there is whenever the thread says so, until that holds."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.native.fd, lambda: (os.eventfd_read(self.native.fd), news.set()))
        try:
            async with asyncio.timeout(120):
                while not until():
                    await news.wait()
                    news.clear()
                    self.take()
        finally:
            loop.remove_reader(self.native.fd)


@pytest.fixture
def pair() -> Generator[tuple[Node, Node]]:
    """Two that beat to each other."""
    before = set(os.listdir("/proc/self/fd"))
    nodes = Node(), Node()
    for node, sock, (send, receive) in zip(nodes, connected(), (KEYS, KEYS[::-1]), strict=True):
        node.native.adopt(node.place, sock.detach(), send, receive, b"")
    yield nodes
    for node in nodes:
        node.native.close()
        node.native.close()
        with pytest.raises(LocalProtocolError, match="these heartbeats have ended"):
            node.native.place()
    assert set(os.listdir("/proc/self/fd")) == before


async def test_only_what_matters_wakes_python(pair: tuple[Node, Node]) -> None:
    one, two = pair
    one.native.observe(one.place, HOUR_NS)
    one.native.attend(True)
    await one.woken(lambda: len(one.arrivals) >= 5)
    assert one.arrivals == sorted(set(one.arrivals)) and one.arrivals[-1] <= now_ns()
    one.native.attend(False)
    two.native.say(True, 7, 6)
    await one.woken(lambda: one.said == (7, 6))  # it says what we do not
    one.native.say(True, 7, 6)
    two.native.attend(True)  # it hears every beat, so it tells how far both are

    async def beats_go_on() -> None:
        until = two.native.beats_sent + 5
        judged_ns = one.native.judged_ns
        await two.woken(lambda: two.native.beats_sent >= until and one.native.judged_ns > judged_ns)

    await beats_go_on()
    one.take()
    heard = len(one.arrivals)
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(one.native.fd)
    await beats_go_on()
    assert select.select([one.native.fd], [], [], 0)[0] == [], "what is known already wakes nobody"
    one.take()
    assert len(one.arrivals) > heard


async def test_silence_is_told_at_its_limit_and_its_end_at_once(pair: tuple[Node, Node]) -> None:
    one, two = pair
    limit_ns = 20 * PERIOD_NS
    one.observes(limit_ns)
    two.native.say(False, 1, 1)
    await one.woken(lambda: one.native.judged_ns - one.arrivals[-1] >= limit_ns)
    two.native.say(True, 1, 1)
    heard = len(one.arrivals)
    await one.woken(lambda: len(one.arrivals) > heard)  # though it says nothing new
    one.native.observe(one.place, HOUR_NS)
    assert not one.native.heard(one.place)


async def test_any_traffic_is_a_sign_of_life(pair: tuple[Node, Node]) -> None:
    one, two = pair
    two.native.say(False, 1, 1)
    begun_ns = one.observes(20 * PERIOD_NS)
    await one.woken(lambda: one.native.judged_ns >= begun_ns + 20 * PERIOD_NS)
    assert one.native.heard(one.place), "it was silent too long"
    one.take()
    assert one.arrivals[-1] > begun_ns


STOPPED_NS = 200 * MS


def test_who_was_stopped_for_long_judges_once_it_has_read() -> None:
    """And does not look for ever at what was due while it did not run."""
    program = str(PROGRAMS / "actors/watches_silence.py")
    command = [sys.executable, program, *map(str, (PERIOD_NS, HOUR_NS, STOPPED_NS))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "watches\n"
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        select.select([], [], [], 2 * STOPPED_NS / 1e9)  # for longer than the limit
        child.send_signal(signal.SIGCONT)
        assert child.stdout.readline() == "True\n"


def test_the_gil_delays_no_beat(pair: tuple[Node, Node]) -> None:
    keeps_the_gil = ctypes.PyDLL(None).usleep
    sent = pair[0].native.beats_sent
    keeps_the_gil(500_000)
    assert pair[0].native.beats_sent >= sent + 2


async def test_who_stands_still_for_longer_than_its_lease_beats_no_more() -> None:
    one, stuck = Node(), Node(lease_ns=20 * PERIOD_NS)
    for node, sock, (send, receive) in zip((one, stuck), connected(), (KEYS, KEYS[::-1]), strict=True):
        node.native.adopt(node.place, sock.detach(), send, receive, b"")
    one.observes(100 * PERIOD_NS)
    await one.woken(lambda: one.native.judged_ns - one.arrivals[-1] >= 100 * PERIOD_NS)
    assert stuck.native.renew(HOUR_NS), "beats were withheld"
    heard = len(one.arrivals)
    await one.woken(lambda: len(one.arrivals) > heard)
    for node in (one, stuck):
        node.native.close()


async def test_other_traffic_spares_beats(pair: tuple[Node, Node]) -> None:
    one, two = pair
    two.native.attend(True)
    spared = one.native.beats_spared

    def send() -> bool:
        one.native.sent(one.place)
        return one.native.beats_spared >= spared + 4

    one.native.set_period(50 * PERIOD_NS)
    await two.woken(send)
    assert one.native.beats_sent > 0, "one in so many is sent nevertheless"


async def test_a_forged_beat_ends_the_stripe() -> None:
    node = Node()
    ours, attacker = connected()
    surplus = BeatWriter(KEYS[1]).write(4, 4)[:5]
    node.native.adopt(node.place, ours.detach(), *KEYS, surplus)
    good = BeatWriter(KEYS[1]).write(4, 4)
    attacker.sendall(good[5:])  # what had come before the stripe was taken over counts
    await node.woken(lambda: node.said == (4, 4))
    assert not node.ended
    attacker.sendall(good)
    await node.woken(lambda: bool(node.ended))
    assert node.ended == "a beat came out of its turn: it was repeated, or others were left out"
    node.ended = ""
    for what, reason in ((b"x" * BEAT_BYTES, "the tag of a beat is wrong"), (b"", "it closed the stripe")):
        attacker.close()
        ours, attacker = connected()
        node.native.adopt(node.place, ours.detach(), *KEYS, b"")
        attacker.sendall(what)
        if not what:
            attacker.shutdown(socket.SHUT_WR)
        await node.woken(lambda: bool(node.ended))
        assert reason in node.ended
        node.ended = ""
    attacker.close()
    node.native.close()


def test_places_are_bounded() -> None:
    native = NativeHeartbeats(period_ns=PERIOD_NS, lease_ns=HOUR_NS)
    places = [native.place() for _ in range(PEERS_MAX)]
    assert len(set(places)) == PEERS_MAX
    with pytest.raises(LocalProtocolError, match="all 64 places for peers are taken"):
        native.place()
    native.vacate(places[7])
    assert native.place() == places[7]
    with pytest.raises(LocalProtocolError, match="there is no place 64"):
        native.take(64)
    native.close()
