"""Patterns timed between two zbmd ranks through the public API: puts and waits, and frames over the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from zbmd.tools.bench.peers.control import timed, timed_on_loop, warmups, window_of, windows
from zbmd.tools.bench.workers import ContenderFailed
from zbmd.transport.frames import FrameHeader
from zbmd.transport.link.interface import Link
from zbmd.transport.memory.region import RemoteRegion
from zbmd.transport.memory.segment import Segment
from zbmd.transport.memory.staging import StagedPipe
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native._native import WAIT_OK, now_ns

CHANNEL: Final = 0
PIPE_CHANNEL: Final = 1
"""And the one after it."""
MEASURE_S_MAX: Final = 240
FRAME_STOP: Final = 1
"""The flag of the frame that ends a measurement."""

Bytes = NDArray[np.uint8]


@runtime_checkable
class Pings(Protocol):
    """A region whose transport can time itself: `RdmaRegion.ping`."""

    def ping(
        self, src: Bytes, *, channel: int, value: int, first: bool, rounds: int, deadline_ns: int
    ) -> NDArray[np.uint64]:
        """Return the time of each round, ns."""
        ...


class Pair:
    """One rank's segment, its own arrays in it, the other rank's inbox, and a pipe for other arrays."""

    def __init__(
        self,
        segment: Segment,
        theirs: RemoteRegion,
        *,
        inbox: Bytes,
        arena: Bytes,
        pipe: StagedPipe | None = None,
        wait: Callable[..., int] | None = None,
    ) -> None:
        """wait: instead of `Segment.wait`, of a plane whose waiters poll it."""
        self.rank = segment.slot
        self._wait = wait or segment.wait
        self._theirs = theirs
        self._pipe = pipe
        self._inbox = inbox
        self._arena = arena
        self._sent = count(1)
        self._awaited = count(1)
        self._measured = 0

    def p2p_arena(self, nbytes: int, iterations: int) -> list[float]:
        """A ping and its answer, each one put from the own arena into the other's inbox."""
        src, expected = self._fill(self._arena[:nbytes])
        send, receive = self._sender(src), self._receiver()
        samples = self._ping(send, receive, iterations)
        self._check(self._inbox[:nbytes], expected)
        return samples

    def p2p_native(self, nbytes: int, iterations: int) -> list[float]:
        """As `p2p_arena`, over RDMA: both sides put and wait without a line of Python."""
        src, expected = self._fill(self._arena[:nbytes])
        assert isinstance(self._theirs, Pings)
        rounds = warmups(iterations) + iterations
        took_ns = self._theirs.ping(
            src,
            channel=CHANNEL,
            value=next(self._sent),
            first=self.rank == 0,
            rounds=rounds,
            deadline_ns=now_ns() + MEASURE_S_MAX * 1_000_000_000,
        )
        for _ in range(rounds - 1):
            next(self._sent)
        self._skip(rounds)
        self._check(self._inbox[:nbytes], expected)
        return [float(each) / 2 for each in took_ns[-iterations:]]

    def echo(self, nbytes: int, iterations: int) -> list[float]:
        """As `p2p_arena`, but each rank sends back the bytes that it was sent, from where they arrived."""
        _, expected = self._fill(self._arena[:nbytes])
        if self.rank == 0:
            self._inbox[:nbytes] = self._arena[:nbytes]
        samples = self._ping(self._sender(self._inbox[:nbytes]), self._receiver(), iterations)
        self._check(self._inbox[:nbytes], expected)
        return samples

    def p2p_foreign(self, nbytes: int, iterations: int) -> list[float]:
        """A ping and its answer, from an ordinary array of the one to an ordinary array of the other."""
        src, expected = self._fill(np.empty(nbytes, np.uint8))
        into, pipe = np.zeros(nbytes, np.uint8), self._pipe
        assert pipe is not None
        deadline_ns = now_ns() + MEASURE_S_MAX * 1_000_000_000
        samples = self._ping(
            lambda: pipe.send(src, deadline_ns=deadline_ns),
            lambda: pipe.receive(into, deadline_ns=deadline_ns),
            iterations,
        )
        self._check(into, expected)
        return samples

    def put_arena(self, nbytes: int, iterations: int) -> list[float]:
        """Windows of puts from rank 0's arena."""
        return self._put(self._arena[:nbytes], iterations)

    def put_foreign(self, nbytes: int, iterations: int) -> list[float]:
        """Windows of puts from an ordinary array of rank 0."""
        return self._put(np.empty(nbytes, np.uint8), iterations)

    def _put(self, array: Bytes, iterations: int) -> list[float]:
        src, expected = self._fill(array)
        window, nbytes = window_of(src.nbytes), src.nbytes
        receive = self._receiver()

        def send_window() -> None:
            for transfer in self._put_window(src, window):
                transfer.wait()
            receive()

        def take_window() -> None:
            self._skip(window - 1)
            receive()
            self._theirs.notify(CHANNEL, next(self._sent))

        operation = take_window if self.rank else send_window
        samples = timed(windows(iterations, nbytes), operation, window)
        if self.rank:
            self._check(self._inbox[:nbytes], expected)
        return samples

    async def put_asyncio(self, nbytes: int, iterations: int) -> list[float]:
        """As `put_arena`, but transfers are awaited on the loop, and notifications in a thread."""
        src, expected = self._fill(self._arena[:nbytes])
        window, receive = window_of(nbytes), self._receiver()

        async def operation() -> None:
            transfers = [] if self.rank else self._put_window(src, window)
            for transfer in transfers:
                await transfer
            if self.rank:
                self._skip(window - 1)
            await asyncio.to_thread(receive)
            if self.rank:
                self._theirs.notify(CHANNEL, next(self._sent))

        samples = await timed_on_loop(windows(iterations, nbytes), operation, window)
        if self.rank:
            self._check(self._inbox[:nbytes], expected)
        return samples

    def _put_window(self, src: Bytes, window: int) -> list[Transfer]:
        return [self._theirs.put(src, 0, channel=CHANNEL, value=next(self._sent)) for _ in range(window)]

    def _skip(self, notifications: int) -> None:
        for _ in range(notifications):
            next(self._awaited)

    def _ping(self, send: Callable[[], object], receive: Callable[[], None], iterations: int) -> list[float]:
        def first() -> None:
            send()
            receive()

        def second() -> None:
            receive()
            send()

        return timed(iterations, second if self.rank else first, 2)

    def _sender(self, src: Bytes) -> Callable[[], object]:
        put, sent = self._theirs.put, self._sent
        return lambda: put(src, 0, channel=CHANNEL, value=next(sent)).wait()

    def _receiver(self) -> Callable[[], None]:
        """Waits for the other rank's next notification. Raises `ContenderFailed` if it does not come."""
        wait, awaited, other = self._wait, self._awaited, 1 - self.rank
        deadline_ns = now_ns() + MEASURE_S_MAX * 1_000_000_000

        def receive() -> None:
            ended = wait(other, CHANNEL, next(awaited), group_mask=1 << other, deadline_ns=deadline_ns)
            if ended != WAIT_OK:
                raise ContenderFailed(f"rank {self.rank} waited for rank {other} in vain ({ended})")

        return receive

    def _fill(self, array: Bytes) -> tuple[Bytes, int]:
        """Fill with this measurement's byte, which is the same on both ranks."""
        self._measured += 1
        value = 1 + self._measured % 255
        array.fill(value)
        return array, value

    def _check(self, arrived: Bytes, expected: int) -> None:
        wrong = int(np.count_nonzero(arrived != expected))
        if wrong:
            raise ContenderFailed(f"{wrong} of {arrived.nbytes} bytes arrived wrong at rank {self.rank}")


async def frame_round_trips(link: Link, nbytes: int, iterations: int) -> list[float]:
    """Nanoseconds from `send` until the echo is awaited, then tell the other side that it is over."""
    loop = asyncio.get_running_loop()
    payload, clock = bytes(nbytes), time.perf_counter_ns
    echo: asyncio.Future[None] = loop.create_future()

    def on_frame(header: FrameHeader, payload: memoryview) -> None:
        echo.set_result(None)

    link.on_frame = on_frame
    samples: list[float] = []
    for number in range(warmups(iterations) + iterations):
        began = clock()
        link.send(payload)
        await echo
        took = clock() - began
        echo = loop.create_future()
        if number >= warmups(iterations):
            samples.append(took)
    link.on_frame = None
    link.send(b"", flags=FRAME_STOP)
    return samples


async def echo_frames(link: Link) -> None:
    """Send every frame back until one says that it is over."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_frame(header: FrameHeader, payload: memoryview) -> None:
        if header.flags & FRAME_STOP:
            over.set_result(None)
        else:
            link.send(bytes(payload))

    link.on_frame = on_frame
    await over
    link.on_frame = None
