"""`python -m zbmd.tools.bench_regions`: puts between two processes, beside the machine's own memcpy.

Native: `RemoteRegion.put` and `Segment.wait`, called from Python; no event loop takes part. Every size is
timed in turns with a memcpy of as many bytes in the same process, so that both meet the same noise.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbmd.transport import _native
from zbmd.transport.errors import PeerLost
from zbmd.transport.region import RemoteRegion
from zbmd.transport.segment import PeerSegment, Segment
from zbmd.transport.staging import RING_BYTES, StagedPipe

SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
MOVED_BYTES = 1 << 30
ITERATIONS_MAX = 5000
WARMUPS = 10
WAIT_NS_MAX = 60_000_000_000
PUTS, STAGED = 0, 1
"""Channels; the staged pipe takes two."""

Bytes = NDArray[np.uint8]
Exchange = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Samples in nanoseconds of one size. `put` and `staged` are one way: half of there and back."""

    nbytes: int
    put: list[float]
    """From the own arena into the peer's inbox, and waited for there."""
    staged: list[float]
    """From one ordinary array to another, through the inbox."""
    memcpy: list[float]
    """numpy, between two ordinary arrays of one process."""


class Rank:
    """One of the two processes."""

    def __init__(
        self, own: Segment, theirs: RemoteRegion, inbox: Bytes, arena: Bytes, pipe: StagedPipe
    ) -> None:
        self._own = own
        self._other = 1 - own.slot
        self._theirs = theirs
        self._inbox = inbox
        self._arena = arena
        self._pipe = pipe
        self._round = 0

    def row(self, nbytes: int) -> Row:
        """Measure one size; both ranks call it at once."""
        iterations = iterations_of(nbytes)
        foreign = [np.ones(nbytes, np.uint8) for _ in range(2)]
        put: list[float] = []
        staged: list[float] = []
        memcpy: list[float] = []
        for _ in range(WARMUPS + iterations):
            put.append(timed(lambda: self._swap(self._arena[:nbytes])) / 2)
            staged.append(timed(lambda: self._swap_staged(foreign[0], foreign[1])) / 2)
            memcpy.append(timed(lambda: np.copyto(foreign[1], foreign[0])))
        return Row(nbytes=nbytes, put=put[WARMUPS:], staged=staged[WARMUPS:], memcpy=memcpy[WARMUPS:])

    def _swap(self, src: Bytes) -> None:
        """There and back: rank 0 begins."""
        self._round += 1
        if self._own.slot == 1:
            self._await_put()
        self._theirs.put(src, channel=PUTS, value=self._round)
        if self._own.slot == 0:
            self._await_put()

    def _await_put(self) -> None:
        deadline_ns = _native.now_ns() + WAIT_NS_MAX
        other = self._other
        ended = self._own.wait(other, PUTS, self._round, group_mask=1 << other, deadline_ns=deadline_ns)
        if ended != _native.WAIT_OK:
            raise PeerLost(other, f"the other rank of the benchmark did not answer ({ended})")

    def _swap_staged(self, src: Bytes, into: Bytes) -> None:
        deadline_ns = _native.now_ns() + WAIT_NS_MAX
        if self._own.slot == 1:
            self._pipe.receive(into, deadline_ns=deadline_ns)
        self._pipe.send(src, deadline_ns=deadline_ns)
        if self._own.slot == 0:
            self._pipe.receive(into, deadline_ns=deadline_ns)


def iterations_of(nbytes: int) -> int:
    """How often a size is measured."""
    return max(20, min(ITERATIONS_MAX, MOVED_BYTES // 8 // max(nbytes, 1)))


def timed(operation: Exchange) -> float:
    """Nanoseconds that it takes."""
    began = time.perf_counter_ns()
    operation()
    return time.perf_counter_ns() - began


def measure(sizes: tuple[int, ...] = SIZES) -> list[Row]:
    """Fork a peer, measure all sizes, and return this rank's samples.

    Raises `OutOfMemory` if the largest size does not fit, and `PeerLost` if the peer dies.
    """
    with _segments(max(sizes)) as segments:
        ranks = _ranks(segments, max(sizes))
        allowed = sorted(os.sched_getaffinity(0))
        child = os.fork()
        # A core each, as `mpirun --bind-to core`: on a busy machine the scheduler else keeps both on one.
        os.sched_setaffinity(0, {allowed[0] if child else allowed[-1]})
        if child == 0:
            _serve(ranks[1], sizes)
        try:
            return [ranks[0].row(nbytes) for nbytes in sizes]
        finally:
            os.waitpid(child, 0)
            os.sched_setaffinity(0, allowed)


def _serve(rank: Rank, sizes: tuple[int, ...]) -> None:
    code = 1
    try:
        for nbytes in sizes:
            rank.row(nbytes)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def _segments(nbytes: int) -> Iterator[list[Segment]]:
    made: list[Segment] = []
    try:
        for slot in range(2):
            inbox_bytes = nbytes + RING_BYTES + (1 << 12)
            segment = Segment.create(slot=slot, incarnation=1, arena_bytes=nbytes, inbox_bytes=inbox_bytes)
            made.append(segment)
        yield made
    finally:
        for segment in made:
            segment.close()


def _ranks(segments: list[Segment], nbytes: int) -> list[Rank]:
    inboxes = [segment.inbox.empty(nbytes, np.uint8) for segment in segments]
    pipes = [StagedPipe(segment, channel=STAGED) for segment in segments]
    ranks: list[Rank] = []
    for own, other in ((0, 1), (1, 0)):
        segment, theirs = segments[own], segments[other]
        peer = PeerSegment.attach(theirs.fd, slot=other)
        pipes[own].connect(peer.open_region(pipes[other].handle, segment))
        region = peer.open_region(theirs.regions.register(inboxes[other]), segment)
        arena = segment.arena.empty(nbytes, np.uint8)
        arena[:] = 1
        ranks.append(Rank(segment, region, inboxes[own], arena, pipes[own]))
    return ranks


def main() -> int:
    """Print medians in microseconds, and how each compares with memcpy."""
    columns = ("size", "put us", "staged us", "memcpy us", "put/memcpy", "staged/memcpy")
    print(" ".join(f"{column:>13}" for column in columns))
    for row in measure():
        put, staged, memcpy = (
            float(np.median(samples)) / 1e3 for samples in (row.put, row.staged, row.memcpy)
        )
        numbers = (put, staged, memcpy, memcpy / put, memcpy / staged)
        print(f"{row.nbytes:>13} " + " ".join(f"{number:>13.2f}" for number in numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
