"""Runs one scenario over any transport: what `test_link_conformance` needs to know of each.

A scenario is a coroutine. With `LinkHarness.run` both ends of its links are on its own loop. With
`run_with_peer` the other end is in another process, which may be killed: a forked one, or a simulated one.
A transport of real processes adds a subclass of `RealHarness`, and an instance of it to `link_harnesses`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol
from unittest.mock import patch

import uvloop

from zbmd.transport.errors import LinkFull, ZbmdError
from zbmd.transport.frames import FrameHeader
from zbmd.transport.identity import Identity
from zbmd.transport.link.base import LinkSide
from zbmd.transport.link.interface import Link, LinkLimits
from zbmd.transport.link.spin import SpinChoice, SpinPolicy
from zbmd.transport.memory import frame_loans
from zbmd.transport.memory.segment import Segment
from zbmd.transport.shm import connect as shm
from zbmd.transport.shm import link as shm_link
from zbmd.transport.sim import SimProcess, World

SMALL = LinkLimits(ring_bytes=1 << 12, queue_bytes_max=1 << 14, queue_frames_max=64, frames_per_wake=4)
COOKIE = b"a cookie of the tests, 32 bytes "
JOB = 7
INCARNATION = 3
GUARD_S = 120.0  # a scenario that has not ended by then hangs

Fork = Callable[[Callable[[], None]], int]
Run = Callable[[Coroutine[None, None, None]], None]
OnLink = Callable[[LinkSide], None]


class Ear:
    """Keeps what a link tells."""

    def __init__(self, link: Link) -> None:
        self.headers: list[FrameHeader] = []
        self.payloads: list[bytes] = []
        self.ends: list[ZbmdError | None] = []
        self._news = asyncio.Event()
        link.on_frame = self._on_frame
        link.on_closed = self._on_closed

    def _on_frame(self, header: FrameHeader, payload: memoryview) -> None:
        self.headers.append(header)
        self.payloads.append(bytes(payload))
        self._news.set()

    def _on_closed(self, error: ZbmdError | None) -> None:
        self.ends.append(error)
        self._news.set()

    async def frames(self, count: int) -> list[bytes]:
        """Wait for `count` frames; return all that have come."""
        while len(self.payloads) < count:
            assert not self.ends, f"ended with {self.ends} after {len(self.payloads)} of {count} frames"
            await self._wait()
        return self.payloads

    async def end(self) -> ZbmdError | None:
        """Wait for the link's end; return what `on_closed` was given."""
        while not self.ends:
            await self._wait()
        return self.ends[0]

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


class Net(ABC):
    """Links whose ends are all on the running loop."""

    def __init__(self) -> None:
        self.links: list[LinkSide] = []
        """All ends so far, closed when the scenario is over."""
        self._accepted: asyncio.Queue[LinkSide] = asyncio.Queue()

    @abstractmethod
    async def dial(self) -> LinkSide:
        """A link to our own listener."""

    @abstractmethod
    async def stop_listening(self) -> int:
        """Returns how many connections are still in the middle of their hello, once that is over."""

    async def connect(self) -> tuple[LinkSide, LinkSide]:
        """Both ends of a new link: the dialer's, the listener's."""
        link = await self.dial()
        self.links.append(link)
        return link, await self._accepted.get()

    def welcome(self, link: LinkSide) -> None:
        """The listener's `on_link`."""
        self.links.append(link)
        self._accepted.put_nowait(link)


class Life(ABC):
    """The peer's process, as it sees itself."""

    incarnation: int

    @abstractmethod
    async def die(self) -> None:
        """SIGKILL here and now; nothing of this process runs after it."""


class Peer(ABC):
    """The peer's process as the scenario sees it. One life of it at a time."""

    @abstractmethod
    async def link(self) -> LinkSide:
        """The next link to the peer: dialed if it listens, else accepted. Raises as `dial`."""

    @abstractmethod
    async def kill(self) -> None:
        """SIGKILL it, and wait until it has ended."""

    @abstractmethod
    async def ended(self) -> None:
        """Wait until its program has ended, by itself or by SIGKILL."""

    @abstractmethod
    def revive(self) -> None:
        """The next incarnation begins."""


NetScenario = Callable[[Net], Awaitable[None]]
PeerScenario = Callable[[Peer], Awaitable[None]]
Serve = Callable[[LinkSide, Life], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Other:
    """The peer's program: `serve` runs on the one link of each of its lives."""

    serve: Serve
    limits: LinkLimits = SMALL
    lives: int = 1
    listens: bool = False
    dies_at_message: int | None = None
    """Its first life ends in place of this message of its hello, counted from 0."""


class LinkHarness(ABC):
    """One transport, on one kind of loop."""

    name: str

    @abstractmethod
    def run(self, scenario: NetScenario, *, ours: LinkLimits = SMALL, theirs: LinkLimits = SMALL) -> None:
        """Run a scenario with both ends in this process. ours: the dialer's limits."""

    @abstractmethod
    def run_with_peer(
        self, fork: Fork, scenario: PeerScenario, other: Other, *, ours: LinkLimits = SMALL
    ) -> None:
        """Run a scenario with a peer that begins its first life at once."""


# --- transports between real processes ------------------------------------------------------------------


class Listening(Protocol):
    """A listener of any real transport."""

    @property
    def half_open(self) -> int: ...
    def close(self) -> None: ...
    async def wait_closed(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Who:
    """One side as it shows itself at hello."""

    name: str
    limits: LinkLimits
    incarnation: int = INCARNATION

    @property
    def identity(self) -> Identity:
        return Identity(
            name=self.name, pid=os.getpid(), uid=os.getuid(), incarnation=self.incarnation, job=JOB
        )


class RealHarness(LinkHarness):
    """The common part of all transports between processes of a real kernel."""

    def __init__(self, loop: str) -> None:
        self.name = f"{self.transport}-{loop}"
        self._run_loop: Run = asyncio.run if loop == "asyncio" else uvloop.run

    transport: str
    guard_s = GUARD_S

    def run_loop(self, main: Coroutine[None, None, None]) -> None:
        """Run `main` in this process, on a loop of its own."""
        self._run_loop(self._main(main))

    async def _main(self, main: Coroutine[None, None, None]) -> None:
        await main

    @abstractmethod
    async def listen(self, on_link: OnLink, who: Who) -> tuple[Listening, str]:
        """Listen at a free address; the address is given too, in at most 200 bytes."""

    @abstractmethod
    async def dial(self, address: str, who: Who) -> LinkSide:
        """Dial it."""

    @abstractmethod
    def die_at_message(self, number: int) -> None:
        """Have this process die in place of its message `number` of a hello."""

    def run(self, scenario: NetScenario, *, ours: LinkLimits = SMALL, theirs: LinkLimits = SMALL) -> None:
        async def main() -> None:
            net = _RealNet(self, Who(name="a", limits=ours))
            await net.listen(Who(name="b", limits=theirs))
            try:
                async with asyncio.timeout(self.guard_s):
                    await scenario(net)
            finally:
                for link in net.links:
                    link.close()
                await net.stop_listening()

        self.run_loop(main())

    def run_with_peer(
        self, fork: Fork, scenario: PeerScenario, other: Other, *, ours: LinkLimits = SMALL
    ) -> None:
        # Forked before there is a loop and a listener, so that they inherit no descriptor of ours.
        lives = [_Forked(self, fork, other, incarnation) for incarnation in range(1, other.lives + 1)]

        async def main() -> None:
            accepted: asyncio.Queue[LinkSide] = asyncio.Queue()
            who = Who(name="us", limits=ours)
            listener, address = await self.listen(accepted.put_nowait, who)
            peer = _RealPeer(self, lives, accepted, address, who)
            try:
                peer.revive()
                async with asyncio.timeout(self.guard_s):
                    await scenario(peer)
            finally:
                for link in peer.links:
                    link.close()
                listener.close()
                await listener.wait_closed()

        try:
            self.run_loop(main())
        finally:
            # The last one first: each was forked with the words of those before it still open.
            codes = [life.close() for life in reversed(lives)]
        assert set(codes) <= {0, -signal.SIGKILL}, "the peer's program failed; its traceback is above"


class _RealNet(Net):
    def __init__(self, harness: RealHarness, who: Who) -> None:
        super().__init__()
        self._harness = harness
        self._who = who
        self._listener: Listening | None = None
        self._address = ""

    async def listen(self, who: Who) -> None:
        self._listener, self._address = await self._harness.listen(self.welcome, who)

    async def dial(self) -> LinkSide:
        return await self._harness.dial(self._address, self._who)

    async def stop_listening(self) -> int:
        assert self._listener is not None
        self._listener.close()
        await self._listener.wait_closed()
        return self._listener.half_open


class _Forked(Life):
    """One incarnation: a child that waits for a word, its listener's address or ours, before it begins."""

    def __init__(self, harness: RealHarness, fork: Fork, other: Other, incarnation: int) -> None:
        self.incarnation = incarnation
        self._harness = harness
        self._other = other
        self._wait, self._go = os.pipe()
        self._heard, self._tell = os.pipe()
        self.pid = fork(self._live)
        self.pidfd = os.pidfd_open(self.pid)
        os.close(self._wait)
        os.close(self._tell)

    def begin(self, address: str) -> str:
        """Let it live; returns its address once it listens, if it does."""
        os.write(self._go, address.encode())
        return os.read(self._heard, 200).decode() if self._other.listens else ""

    def close(self) -> int:
        """Reap it; its exit code."""
        if not select.select([self.pidfd], [], [], self._harness.guard_s)[0]:
            print(f"incarnation {self.incarnation} does not end", file=sys.stderr)
            os.kill(self.pid, signal.SIGABRT)
        os.close(self.pidfd)
        os.close(self._go)
        os.close(self._heard)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _live(self) -> None:
        os.close(self._go)
        os.close(self._heard)
        address = os.read(self._wait, 200).decode()
        if not address:  # the scenario was over before this life
            return
        if self._other.dies_at_message is not None and self.incarnation == 1:
            self._harness.die_at_message(self._other.dies_at_message)
        self._harness.run_loop(self._main(address))

    async def _main(self, address: str) -> None:
        who = Who(name="them", limits=self._other.limits, incarnation=self.incarnation)
        if not self._other.listens:
            await self._other.serve(await self._harness.dial(address, who), self)
            return
        first: asyncio.Future[LinkSide] = asyncio.get_running_loop().create_future()
        listener, address = await self._harness.listen(first.set_result, who)
        os.write(self._tell, address.encode())
        await self._other.serve(await first, self)
        listener.close()
        await listener.wait_closed()

    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class _RealPeer(Peer):
    def __init__(
        self,
        harness: RealHarness,
        lives: list[_Forked],
        accepted: asyncio.Queue[LinkSide],
        address: str,
        who: Who,
    ) -> None:
        self.links: list[LinkSide] = []
        self._harness = harness
        self._lives = iter(lives)
        self._life = lives[0]
        self._accepted = accepted
        self._address = address
        self._theirs = ""
        self._who = who

    async def link(self) -> LinkSide:
        if self._theirs:
            link = await self._harness.dial(self._theirs, self._who)
        else:
            link = await self._accepted.get()
        self.links.append(link)
        return link

    async def kill(self) -> None:
        os.kill(self._life.pid, signal.SIGKILL)
        await self.ended()

    async def ended(self) -> None:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._life.pidfd, lambda: over.done() or over.set_result(None))
        try:
            await over
        finally:
            loop.remove_reader(self._life.pidfd)

    def revive(self) -> None:
        self._life = next(self._lives)
        self._theirs = self._life.begin(self._address)


class _AlwaysSpins(SpinPolicy):
    def _choose(self, now_ns: int) -> SpinChoice:
        return SpinChoice.SPIN


LENDS_FROM_BYTES = 280
ARENA_BYTES = 8 << 20


class ShmHarness(RealHarness):
    """Shared memory between processes of this host.

    spins: whatever the machine is like; lends: payloads of `LENDS_FROM_BYTES` and more lie in arenas.
    """

    transport = "shm"

    def __init__(self, loop: str, *, spins: bool = False, lends: bool = False) -> None:
        super().__init__(loop)
        self._spins = spins
        self._lends = lends
        self._scenario = contextlib.ExitStack()
        self.name += ("-spinning" if spins else "") + ("-lending" if lends else "")

    async def _main(self, main: Coroutine[None, None, None]) -> None:
        policy = _AlwaysSpins if self._spins else SpinPolicy
        with self._scenario as stack:
            stack.enter_context(patch.object(shm_link, "SpinPolicy", policy))
            if self._lends:
                stack.enter_context(patch.object(shm_link, "BLOCK_BYTES_MIN", LENDS_FROM_BYTES))
                stack.enter_context(patch.object(frame_loans, "LENT_PARTS", 1))
            await main

    async def listen(self, on_link: OnLink, who: Who) -> tuple[Listening, str]:
        address = f"zbmd-test-{os.getpid()}-{os.urandom(4).hex()}"
        return shm.listen(address, on_link, self._endpoint(who)), address

    async def dial(self, address: str, who: Who) -> LinkSide:
        return await shm.dial(address, self._endpoint(who))

    def die_at_message(self, number: int) -> None:
        send, sent = shm._send, 0

        def counted(*arguments: object) -> None:
            nonlocal sent
            if sent == number:
                os.kill(os.getpid(), signal.SIGKILL)
            sent += 1
            send(*arguments)  # type: ignore[arg-type]

        shm._send = counted  # type: ignore[assignment]

    def _endpoint(self, who: Who) -> shm.Endpoint:
        segment = None
        if self._lends:
            slot = 0 if who.name in ("a", "us") else 1
            nbytes, life = ARENA_BYTES, who.incarnation
            segment = Segment.create(slot=slot, incarnation=life, arena_bytes=nbytes, inbox_bytes=0)
            self._scenario.callback(segment.close)
        return shm.Endpoint(identity=who.identity, cookie=COOKIE, limits=who.limits, segment=segment)


# --- the simulator --------------------------------------------------------------------------------------

SIM_SEEDS = (1, 2, 3)
HELLO_STEP_NS = 12_000
"""The simulator's hello is one question and one answer: a death somewhere in it, by the time."""


class SimHarness(LinkHarness):
    """Simulated processes, under a few seeds."""

    name = "sim"

    def run(self, scenario: NetScenario, *, ours: LinkLimits = SMALL, theirs: LinkLimits = SMALL) -> None:
        for seed in SIM_SEEDS:
            self._run(seed, scenario, ours, theirs)

    def _run(self, seed: int, scenario: NetScenario, ours: LinkLimits, theirs: LinkLimits) -> None:
        done: list[bool] = []

        async def main(process: SimProcess) -> None:
            net = _SimNet(process, ours)
            process.listen(net.welcome, job=JOB, limits=theirs)
            await scenario(net)
            for link in net.links:
                link.close()
            done.append(True)

        with World(seed) as world:
            world.add("a", main)
            world.run(until=lambda: bool(done))

    def run_with_peer(
        self, fork: Fork, scenario: PeerScenario, other: Other, *, ours: LinkLimits = SMALL
    ) -> None:
        for seed in SIM_SEEDS:
            self._run_with_peer(seed, scenario, other, ours)

    def _run_with_peer(self, seed: int, scenario: PeerScenario, other: Other, ours: LinkLimits) -> None:
        done: list[bool] = []
        with World(seed) as world:
            them = _SimThem(world, other)

            async def us(process: SimProcess) -> None:
                await scenario(_SimPeer(process, them, ours))
                done.append(True)

            world.add("us", us)
            world.add("them", them.main)
            if other.dies_at_message is not None:
                them.crash(world.now_ns + HELLO_STEP_NS * (1 + other.dies_at_message))
            world.run(until=lambda: bool(done))


class _SimThem:
    """The peer's process, whichever incarnation of it."""

    def __init__(self, world: World, other: Other) -> None:
        self.world = world
        self.other = other
        self.ended = asyncio.Event()

    def crash(self, at_ns: int) -> None:
        """SIGKILL this incarnation then."""
        incarnation = self.world.incarnation("them")

        def strike() -> None:
            if self.world.incarnation("them") != incarnation:
                return
            self.world.crash("them")
            self.ended.set()

        self.world.call_at(at_ns, strike)

    def revive(self) -> None:
        self.ended.clear()
        self.world.start("them", delay_ns=0)

    async def main(self, process: SimProcess) -> None:
        if self.other.listens:
            first: asyncio.Future[LinkSide] = process.world.loop.create_future()
            process.listen(first.set_result, job=JOB, limits=self.other.limits)
            link = await first
        else:
            link = await process.dial("us", job=JOB, limits=self.other.limits)
        await self.other.serve(link, _SimLife(process, self))
        self.ended.set()


class _SimNet(Net):
    def __init__(self, process: SimProcess, limits: LinkLimits) -> None:
        super().__init__()
        self._process = process
        self._limits = limits

    async def dial(self) -> LinkSide:
        return await self._process.dial("a", job=JOB, limits=self._limits)

    async def stop_listening(self) -> int:
        return 0


class _SimLife(Life):
    def __init__(self, process: SimProcess, them: _SimThem) -> None:
        self.incarnation = process.incarnation
        self._them = them

    async def die(self) -> None:
        self._them.crash(self._them.world.now_ns)
        await asyncio.Event().wait()


class _SimPeer(Peer):
    def __init__(self, process: SimProcess, them: _SimThem, limits: LinkLimits) -> None:
        self._process = process
        self._them = them
        self._limits = limits
        self._accepted: asyncio.Queue[LinkSide] = asyncio.Queue()
        if not them.other.listens:
            process.listen(self._accepted.put_nowait, job=JOB, limits=limits)

    async def link(self) -> LinkSide:
        if self._them.other.listens:
            return await self._process.dial("them", job=JOB, limits=self._limits)
        return await self._accepted.get()

    async def kill(self) -> None:
        self._them.crash(self._them.world.now_ns)
        await self.ended()

    async def ended(self) -> None:
        await self._them.ended.wait()

    def revive(self) -> None:
        self._them.revive()


async def fill(link: Link, payload: bytes = bytes(500)) -> int:
    """Send until the queue is full, without giving the loop its turn; how many were taken."""
    sent = 0
    with contextlib.suppress(LinkFull):
        while True:
            link.send(payload)
            sent += 1
    return sent
