"""`SimSegment`: what a `zbmd.transport.memory.segment.Segment` is to a real process, for a simulated one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final

import numpy as np

from zbmd.transport.errors import LocalProtocolError, OutOfMemory
from zbmd.transport.memory.arena import ALIGNMENT, Arena
from zbmd.transport.memory.region import Regions, require_cell
from zbmd.transport.native import _native

# ---- the memory of a simulated process: an account with a limit, no bytes

MEMORY_BYTES_DEFAULT = 16 << 30


class Allocation:
    """So many bytes of a `SimMemory`, until `free`; a context manager."""

    def __init__(self, memory: SimMemory, nbytes: int) -> None:
        self._memory = memory
        self.nbytes = nbytes

    def free(self) -> None:
        """Give the bytes back. Idempotent."""
        self._memory.used_bytes -= self.nbytes
        self.nbytes = 0

    def __enter__(self) -> Allocation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()


class SimMemory:
    """The memory of one incarnation. A limit that shrinks below its use frees none of it."""

    def __init__(self, limit_bytes: int = MEMORY_BYTES_DEFAULT) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    def allocate(self, nbytes: int) -> Allocation:
        """Take `nbytes`. Raises `OutOfMemory` beyond the limit."""
        if nbytes < 0:
            raise LocalProtocolError(f"cannot allocate {nbytes} bytes")
        available_bytes = max(0, self.limit_bytes - self.used_bytes)
        if nbytes > available_bytes:
            raise OutOfMemory(
                f"{nbytes} bytes asked for, {available_bytes} of the simulated {self.limit_bytes} are left: "
                "ask for less, or free some",
                asked_bytes=nbytes,
                available_bytes=available_bytes,
            )
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return Allocation(self, nbytes)


_EPOCH_BITS: Final = 32


class HeapMemory:
    """Zeroed memory of the simulation's own process, in place of a mapping."""

    def __init__(self, nbytes: int) -> None:
        whole = np.zeros(nbytes + ALIGNMENT, np.uint8)
        skip = -whole.ctypes.data % ALIGNMENT
        self._bytes = whole[skip : skip + nbytes]

    @property
    def address(self) -> int:
        """Of its first byte, 64-byte aligned."""
        return self._bytes.ctypes.data

    def view(self, offset: int, nbytes: int, *, writable: bool = False) -> memoryview:
        """A view of a range of it."""
        view = self._bytes[offset : offset + nbytes].data
        return view if writable else view.toreadonly()


class SimSegment:
    """Inbox, arena and notify cells of one incarnation. Made by `SimProcess.open_segment`.

    memory: the account that the segment is allocated from. local_ns: reads the process's monotonic clock.
    As a thread of a simulated process cannot block, `wait` is awaited.
    """

    def __init__(
        self,
        slot: int,
        incarnation: int,
        *,
        memory: SimMemory,
        local_ns: Callable[[], int],
        arena_bytes: int,
        inbox_bytes: int,
    ) -> None:
        if not 0 <= slot < _native.MAX_SLOTS or arena_bytes < 0 or inbox_bytes < 0:
            raise LocalProtocolError(f"segment of slot {slot} with {arena_bytes} and {inbox_bytes} bytes")
        self.slot = slot
        self.incarnation = incarnation
        self._local_ns = local_ns
        inbox_bytes, arena_bytes = (-(-n // ALIGNMENT) * ALIGNMENT for n in (inbox_bytes, arena_bytes))
        self._allocation = memory.allocate(inbox_bytes + arena_bytes)
        heap = HeapMemory(inbox_bytes + arena_bytes)
        self.inbox = Arena(heap, 0, inbox_bytes, unsettled=self._any_unsettled)
        self.arena = Arena(heap, inbox_bytes, arena_bytes)
        self.regions = Regions(slot=slot, incarnation=self.incarnation, inbox=self.inbox, arena=self.arena)
        self._cells: dict[tuple[int, int], int] = {}
        self._aborted: dict[int, int] = {}
        self._lost = 0
        self._proven = 0
        self._admitted: dict[int, int] = {}
        """By slot, the latest incarnation that has linked up: nothing of an earlier one lands any more."""
        self._waiters: dict[asyncio.Future[None], None] = {}

    async def wait(
        self, slot: int, channel: int, value: int, *, group_mask: int = 0, deadline_ns: int = 0
    ) -> int:
        """As `Segment.wait`; `deadline_ns` is of this process's monotonic clock."""
        require_cell(channel, value)
        loop = asyncio.get_running_loop()
        while True:
            ended = self._outcome(slot, channel, value, group_mask)
            if ended is not None:
                return ended
            now_ns = self._local_ns()
            if deadline_ns and now_ns >= deadline_ns:
                return _native.WAIT_DEADLINE
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters[waiter] = None
            timer = loop.call_later((deadline_ns - now_ns) / 1e9, _settle, waiter) if deadline_ns else None
            try:
                await waiter
            finally:
                del self._waiters[waiter]
                if timer is not None:
                    timer.cancel()

    def _outcome(self, slot: int, channel: int, value: int, group_mask: int) -> int | None:
        """What `zbmd_wait` of native/segment.h would return now."""
        cell = self.cell_value(slot, channel)
        if cell >= value:
            same_epoch = cell >> _EPOCH_BITS == value >> _EPOCH_BITS
            return _native.WAIT_OK if same_epoch else _native.WAIT_ABORTED
        last = value | ((1 << _EPOCH_BITS) - 1)
        lost = self._lost & group_mask
        while lost:
            other = lost.bit_length() - 1
            if self.cell_value(other, channel) != last:
                return _native.WAIT_LOST
            lost ^= 1 << other
        if self._aborted.get(channel, 0) >= value:
            return _native.WAIT_ABORTED
        return None

    def cell_value(self, slot: int, channel: int) -> int:
        """The last value of a cell, as `_native.load_cell`."""
        return self._cells.get((slot, channel), 0)

    def lost_mask(self) -> int:
        """Bit s is set once the process in slot s is known to have ended."""
        return self._lost

    def clear_lost(self, slot: int) -> None:
        """As `Segment.clear_lost`."""
        self.end_proven(slot)
        self._lost &= ~(1 << slot)
        self._proven &= ~(1 << slot)

    def end_proven(self, slot: int) -> None:
        """As `Segment.end_proven`."""
        self.regions.writer_gone(slot)
        self._proven |= 1 << slot

    def abort_channel(self, channel: int, epoch: int) -> None:
        """End our waits on `channel` for any value of `epoch` or before it."""
        upto = epoch << _EPOCH_BITS | ((1 << _EPOCH_BITS) - 1)
        self._aborted[channel] = max(upto, self._aborted.get(channel, 0))
        self._wake()

    def close(self) -> None:
        """Give the memory back to the process's account. Idempotent."""
        self._allocation.free()

    # Called by links.

    def admit(self, slot: int, incarnation: int) -> None:
        """A process in `slot` has linked up."""
        self._admitted[slot] = max(incarnation, self._admitted.get(slot, 0))

    def admits(self, slot: int, incarnation: int) -> bool:
        """Whether what this incarnation sent may still land."""
        return incarnation >= self._admitted.get(slot, 0)

    def notified(self, slot: int, channel: int, value: int) -> None:
        """A notification has arrived. A cell only grows."""
        if value > self.cell_value(slot, channel):
            self._cells[slot, channel] = value
            self._wake()

    def set_lost(self, slot: int) -> None:
        """The process in `slot` has ended."""
        self._lost |= 1 << slot
        self._wake()

    def _any_unsettled(self) -> bool:
        return self._lost & ~self._proven != 0

    def _wake(self) -> None:
        for waiter in self._waiters:
            _settle(waiter)


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
