"""The disk and the memory of a simulated process.

Unsynced writes to the disk may be lost, or torn, when its process crashes. The model is that of a journalling
file system at a power cut. Calls see their own effects at once. What survives a crash: every file's bytes up
to its last `fsync`, and of the writes after it a prefix (with `TornWrites`: any subset, each possibly cut
short). Names are ordered among themselves: after the last `fsync` of anything, or `sync_directory`, a prefix
of what was created, renamed and removed. So a rename without an fsync of the file before it may leave an
empty file under the name, as it does on real disks.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
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


DISK_BYTES_DEFAULT = 1 << 30
OPERATION_NS = 50_000
"""Time of one operation, unless the disk is slow; the caller is blocked for so long."""
SYNC_NS = 2_000_000
UNSYNCED_MAX = 4096
"""Writes of a file, or changes of names, that may wait for a sync; then the oldest becomes durable."""
NS_PER_BYTE_LOG2 = 1
"""Twice as many bytes as nanoseconds: 2 GB/s."""


@dataclass(slots=True, eq=False)
class _File:
    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])

    @staticmethod
    def apply(target: bytearray, offset: int, data: bytes) -> None:
        """Write `data` at `offset`; a gap before it is zeros."""
        if len(target) < offset:
            target.extend(bytes(offset - len(target)))
        target[offset : offset + len(data)] = data


class SimDisk:
    """The disk of one process; it outlives the process's incarnations. Paths are plain names.

    Raises OSError as the kernel would: ENOENT, ENOSPC when it is full, EIO for a read that fails.
    """

    def __init__(
        self, rng: random.Random, charge: Callable[[int], None], *, limit_bytes: int = DISK_BYTES_DEFAULT
    ) -> None:
        self.limit_bytes = limit_bytes
        self.full = False
        self.delay_ns = 0
        self.torn = False
        self.read_errors = 0.0
        self._rng = rng
        self._charge = charge
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._changes: list[dict[str, _File]] = []
        """The names after each change since they were last durable."""

    @property
    def used_bytes(self) -> int:
        """Bytes in all files."""
        return sum(len(file.content) for file in self._names.values())

    def write(self, path: str, data: bytes, *, offset: int = 0) -> None:
        """Write at `offset`, making the file if there is none. Not durable before `fsync`."""
        self._work(OPERATION_NS + (len(data) >> NS_PER_BYTE_LOG2))
        file = self._names.get(path)
        grows = offset + len(data) - (0 if file is None else len(file.content))
        if self.full or self.used_bytes + max(0, grows) > self.limit_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if file is None:
            file = self._names[path] = _File()
            self._changed()
        file.apply(file.content, offset, data)
        file.pending.append((offset, bytes(data)))
        if len(file.pending) > UNSYNCED_MAX:
            file.apply(file.durable, *file.pending.pop(0))

    def append(self, path: str, data: bytes) -> None:
        """Write behind what is there."""
        file = self._names.get(path)
        self.write(path, data, offset=0 if file is None else len(file.content))

    def read(self, path: str) -> bytes:
        """The whole file."""
        file = self._file(path)
        self._work(OPERATION_NS + (len(file.content) >> NS_PER_BYTE_LOG2))
        if self.read_errors and self._rng.random() < self.read_errors:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return bytes(file.content)

    def fsync(self, path: str) -> None:
        """Make the file durable, and all names with it."""
        file = self._file(path)
        file.durable = bytearray(file.content)
        file.pending.clear()
        self.sync_directory()

    def sync_directory(self) -> None:
        """Make all names durable, not what is in the files."""
        self._work(SYNC_NS)
        self._durable_names = dict(self._names)
        self._changes.clear()

    def rename(self, path: str, to: str) -> None:
        """Give a file another name, in place of a file that has it: atomic, not durable."""
        self._work(OPERATION_NS)
        self._names[to] = self._file(path)
        if to != path:
            del self._names[path]
        self._changed()

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._work(OPERATION_NS)
        self._file(path)
        del self._names[path]
        self._changed()

    def names(self) -> tuple[str, ...]:
        """All files, sorted."""
        return tuple(sorted(self._names))

    def crash(self) -> None:
        """The process is gone with all that it had not synced, but for what the seed lets survive."""
        kept = self._rng.randint(0, len(self._changes))
        self._names = dict(self._changes[kept - 1] if kept else self._durable_names)
        # In the order of their names: the files of a dict of this process have one, ids have not.
        for name in sorted(self._names):
            self._lose(self._names[name])
        self._durable_names = dict(self._names)
        self._changes.clear()

    def _lose(self, file: _File) -> None:
        survived = file.durable
        count = self._rng.randint(0, len(file.pending))
        for index, (offset, data) in enumerate(file.pending):
            if self.torn and self._rng.random() < 0.5:
                file.apply(survived, offset, data[: self._rng.randint(0, len(data))])
            elif not self.torn and index < count:
                file.apply(survived, offset, data)
        file.durable = survived
        file.content = bytearray(survived)
        file.pending.clear()

    def _file(self, path: str) -> _File:
        try:
            return self._names[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None

    def _changed(self) -> None:
        self._changes.append(dict(self._names))
        if len(self._changes) > UNSYNCED_MAX:
            self._durable_names = self._changes.pop(0)

    def _work(self, busy_ns: int) -> None:
        self._charge(busy_ns + self.delay_ns)
