"""Simulated links: the promises of `zbmd.transport.link.interface.Link` under everything that may happen to
them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.errors import (
    DeadlineExceeded,
    LinkClosed,
    LinkFull,
    LocalProtocolError,
    PeerLost,
    ZbmdError,
)
from zbmd.transport.frames import FrameHeader
from zbmd.transport.link.interface import Link, LinkLimits
from zbmd.transport.sim import (
    NETWORK_FAULTS,
    SIM_START_NS,
    Clog,
    Crash,
    Cut,
    Partition,
    Pause,
    RunEnd,
    SimLink,
    SimProcess,
    World,
    draw_plan,
)

MS = 1_000_000
SMALL = LinkLimits(ring_bytes=1 << 12, queue_bytes_max=1 << 14)


class Ear:
    """Keeps what a link tells."""

    def __init__(self, link: Link) -> None:
        self.frames: list[tuple[FrameHeader, bytes]] = []
        self.ended: list[ZbmdError | None] = []
        self.over = asyncio.Event()
        link.on_frame = lambda header, payload: self.frames.append((header, bytes(payload)))
        link.on_closed = self._closed

    def _closed(self, error: ZbmdError | None) -> None:
        self.ended.append(error)
        self.over.set()

    @property
    def numbers(self) -> list[int]:
        return [int.from_bytes(payload[:4]) for _, payload in self.frames]


Side = Callable[[SimProcess, SimLink], Awaitable[None]]


class Pair:
    """A world in which b dials a; each side runs its own coroutine with its end of the link."""

    def __init__(self, a: Side, b: Side, *, seed: int = 1, limits: LinkLimits | None = None) -> None:
        self.world = World(seed)
        self.links: list[SimLink] = []
        limits = limits or LinkLimits()

        async def listening(process: SimProcess) -> None:
            accepted: asyncio.Future[SimLink] = process.world.loop.create_future()
            process.listen(accepted.set_result, contracts={"c/1": "x"}, job=7, limits=limits)
            await a(process, await accepted)

        async def dialing(process: SimProcess) -> None:
            link = await process.dial("a", contracts={"c/1": "x"}, job=7, limits=limits)
            self.links.append(link)
            await b(process, link)

        self.world.add("a", listening)
        self.world.add("b", dialing)

    def run(self, for_ns: int = 60_000 * MS) -> RunEnd:
        with self.world:
            return self.world.run(for_ns=for_ns)


def sender(count: int, *, close: bool = True, size: int = 100) -> Side:
    async def send(process: SimProcess, link: SimLink) -> None:
        Ear(link)
        for number in range(count):
            payload = number.to_bytes(4) + bytes(size - 4)
            while True:
                try:
                    link.send(payload, epoch=3, trace_id=number, flags=1)
                    break
                except LinkFull:
                    await link.writable()
        await link.flush()
        if close:
            link.close()
            return
        await asyncio.Event().wait()

    return send


def test_frames_arrive_whole_in_order_and_say_who_sent_them() -> None:
    ears: list[Ear] = []

    async def hear(process: SimProcess, link: SimLink) -> None:
        ears.append(Ear(link))
        await ears[0].over.wait()
        assert (link.peer.name, link.peer.incarnation, link.peer.job) == ("b", 1, 7)
        assert link.peer.contracts == {"c/1": "x"}
        assert link.peer_segment is None
        assert link.closed

    Pair(hear, sender(300)).run()
    (ear,) = ears
    assert ear.numbers == list(range(300))
    assert ear.ended == [None]
    header = ear.frames[5][0]
    assert (header.epoch, header.trace_id, header.flags, header.job) == (3, 5, 1, 7)
    stamps = [frame.hlc for frame, _ in ear.frames]
    assert stamps == sorted(set(stamps))
    assert stamps[0] > 1_600_000_000 * 10**9


@given(seed=st.integers(0, 2**32), size=st.integers(4, 10_000))
def test_no_weather_loses_or_reorders_frames(seed: int, size: int) -> None:
    ears: list[Ear] = []

    async def hear(process: SimProcess, link: SimLink) -> None:
        ears.append(Ear(link))
        await ears[0].over.wait()

    pair = Pair(hear, sender(40, size=size), seed=seed, limits=SMALL)
    for fault in draw_plan(pair.world.rng("plan"), "ab", 20 * MS, NETWORK_FAULTS, 6):
        pair.world.apply(fault)
    pair.run()
    assert ears[0].numbers == list(range(40))
    assert ears[0].ended == [None]


@pytest.mark.parametrize(
    "fault",
    [
        Cut(source="b", target="a", at_ns=5 * MS, for_ns=100 * MS),
        Clog(source="b", target="a", at_ns=5 * MS, for_ns=100 * MS),
        Partition(groups=(("a",), ("b",)), at_ns=5 * MS, for_ns=100 * MS),
    ],
)
def test_a_cut_stalls_the_link_and_nothing_is_lost(fault: Cut | Clog | Partition) -> None:
    arrivals: list[int] = []

    async def hear(process: SimProcess, link: SimLink) -> None:
        ear = Ear(link)
        while not ear.over.is_set():
            await asyncio.sleep(0.001)
            arrivals.append(len(ear.numbers))
        assert ear.numbers == list(range(60))

    async def send(process: SimProcess, link: SimLink) -> None:
        for number in range(60):
            link.send(number.to_bytes(4))
            await asyncio.sleep(0.001)
        await link.flush()
        link.close()

    pair = Pair(hear, send)
    pair.world.apply(fault)
    pair.run()
    assert arrivals[50] == arrivals[90] < 10
    assert arrivals[-1] == 60


def test_a_killed_peer_is_lost_after_the_last_of_its_frames_that_arrives() -> None:
    counts: set[int] = set()

    async def spray(process: SimProcess, link: SimLink) -> None:
        number = 0
        while True:
            link.send(number.to_bytes(4))
            number += 1
            await asyncio.sleep(0.00001)

    for seed in range(12):
        ears: list[Ear] = []

        async def hear(process: SimProcess, link: SimLink, ears: list[Ear] = ears) -> None:
            ear = Ear(link)
            ears.append(ear)
            await ear.over.wait()
            process.note(process.world.now_ns - SIM_START_NS)
            with pytest.raises(LinkClosed, match="without a goodbye"):
                link.send(b"x")

        pair = Pair(hear, spray, seed=seed)
        pair.world.apply(Crash(process="b", at_ns=10 * MS, for_ns=0))
        pair.run(for_ns=100 * MS)
        (ear,) = ears
        assert isinstance(ear.ended[0], PeerLost)
        assert len(ear.ended) == 1
        assert ear.numbers == list(range(len(ear.numbers)))
        ((_, noticed_ns),) = pair.world.notes()
        assert isinstance(noticed_ns, int)
        assert 10 * MS < noticed_ns < 13 * MS
        counts.add(len(ear.numbers))
    assert len(counts) > 3


def test_a_cut_keeps_the_news_of_a_death() -> None:
    async def hear(process: SimProcess, link: SimLink) -> None:
        await Ear(link).over.wait()
        process.note(process.world.now_ns - SIM_START_NS)

    pair = Pair(hear, sender(3, close=False))
    pair.world.apply(Cut(source="b", target="a", at_ns=5 * MS, for_ns=45 * MS))
    pair.world.apply(Crash(process="b", at_ns=10 * MS, for_ns=0))
    pair.run()
    ((_, noticed_ns),) = pair.world.notes()
    assert isinstance(noticed_ns, int)
    assert noticed_ns > 50 * MS


def test_a_paused_peer_reads_later() -> None:
    ears: list[Ear] = []

    async def hear(process: SimProcess, link: SimLink) -> None:
        ears.append(Ear(link))
        await ears[0].over.wait()

    pair = Pair(hear, sender(200, size=1000), limits=SMALL)
    pair.world.apply(Pause(process="a", at_ns=MS // 10, for_ns=500 * MS))
    pair.run()
    assert ears[0].numbers == list(range(200))


def test_an_end_without_close_is_a_loss() -> None:
    ears: list[Ear] = []

    async def hear(process: SimProcess, link: SimLink) -> None:
        ears.append(Ear(link))
        await ears[0].over.wait()

    async def vanish(process: SimProcess, link: SimLink) -> None:
        return

    Pair(hear, vanish).run()
    assert isinstance(ears[0].ended[0], PeerLost)


def test_dialing_says_why_it_fails() -> None:
    async def mute(process: SimProcess) -> None:
        await asyncio.sleep(100)

    async def listening(process: SimProcess) -> None:
        process.listen(lambda link: None)
        with pytest.raises(LocalProtocolError, match="listens already"):
            process.listen(lambda link: None)
        await asyncio.sleep(100)

    async def dialing(process: SimProcess) -> None:
        for name in ("mute", "dead"):
            with pytest.raises(PeerLost, match="nobody listens"):
                await process.dial(name)
        with pytest.raises(DeadlineExceeded, match=r"cut did not answer .* in 0.5 s"):
            await process.dial("cut", timeout_s=0.5)
        process.note("done")

    with World(1) as world:
        world.add("mute", mute)
        world.add("dead", mute, start=False)
        world.add("cut", listening)
        world.add("dialer", dialing)
        world.apply(Cut(source="dialer", target="cut", at_ns=0, for_ns=2000 * MS))
        world.run(for_ns=5000 * MS)
        assert list(world.notes()) == [("dialer", "done")]
