"""State of each cell of memory: its last writer and readers, and asynchronous operations on it.

A cell is as many bytes as the kernel's narrowest access. Each access is checked against the last write and
the last reads of its cells (C. Flanagan, S. Freund, "FastTrack: efficient and precise dynamic race
detection", 2009) with the order of `clocks`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from zbmd.tools.lab.ptx.clocks import WARP, Clocks, Flags, Ints
from zbmd.tools.lab.ptx.errors import RaceFound, UninitialisedRead


def name_thread(thread: int, block: int) -> str:
    """Return a thread's name for messages, from its number in the grid."""
    return f"thread {thread % block} of block {thread // block}"


class SharedShadow:
    """State of the shared memory of all blocks: block b has the cells from b * cells_per_block on."""

    def __init__(self, cells: int, clocks: Clocks, threads: int) -> None:
        self._clocks = clocks
        self._writer = np.full(cells, -1, np.int32)
        self._written = np.zeros(cells, np.int32)
        self._arriving = np.zeros(cells, np.bool_)
        self._held = np.zeros(cells, np.uint8)
        self._generic = np.zeros(cells, np.bool_)
        self._read_step = np.zeros((cells, clocks.warps), np.int32)
        self._read_lanes = np.zeros((cells, clocks.warps), np.uint32)
        self._scratch = np.zeros(cells * clocks.warps, np.int32)
        self._fenced = np.zeros(threads, np.int32)
        """The step of each thread's last fence between the generic and the asynchronous proxy."""

    def read(self, cells: Ints, threads: Ints, now: int, *, asynchronous: bool = False) -> None:
        """Check and note that `threads`, (n,), read `cells`, (n, k). Raises `PtxError`.

        asynchronous: by the asynchronous proxy (`wgmma`), which sees ordinary stores only after their thread
        has executed `fence.proxy.async`.
        """
        written, writer = self._written[cells], self._writer[cells]
        if not written.all():
            thread = int(threads[np.flatnonzero((written == 0).any(axis=1))[0]])
            raise UninitialisedRead(
                f"{name_thread(thread, self._clocks.block)} reads shared memory that nothing has written"
            )
        self._check_arriving(cells, threads, "reads")
        each = np.broadcast_to(threads[:, None], cells.shape)
        self._require(self._clocks.ordered(each, writer, written), each, writer, "read", "write")
        if asynchronous:
            block = each // self._clocks.block * self._clocks.block
            by_threads = self._generic[cells]
            fenced = self._fenced[block + np.minimum(writer, self._clocks.block - 1)] > written
            if (by_threads & ~fenced).any():
                raise RaceFound(
                    "shared memory is read by the asynchronous proxy, and the thread that wrote it has not "
                    "executed fence.proxy.async since"
                )
            return
        self._note_readers(cells, threads, now)

    def write(self, cells: Ints, threads: Ints, now: int, *, asynchronous: bool = False) -> None:
        """Check and note that `threads`, (n,), write `cells`, (n, k). Raises `PtxError`.

        asynchronous: the write ends later, with `arrived`.
        """
        self._check_arriving(cells, threads, "writes")
        if self._held[cells].any():
            raise RaceFound("shared memory is written that wgmma or a bulk copy is still reading")
        each = np.broadcast_to(threads[:, None], cells.shape)
        written, writer = self._written[cells], self._writer[cells]
        ordered = self._clocks.ordered(each, writer, written) | (written == 0)
        self._require(ordered, each, writer, "write", "write")
        self._check_readers(cells, threads)
        own = each % self._clocks.block
        self._writer[cells] = own
        if (self._writer[cells] != own).any():
            raise RaceFound("two threads write one place of shared memory at once")
        self._written[cells] = now
        self._generic[cells] = not asynchronous
        self._arriving[cells] = asynchronous

    def arrived(self, cells: Ints, writer: Ints | int, now: int, *, generic: bool) -> None:
        """Note that the asynchronous write of `cells` is done; it counts as one by `writer`.

        writer: a number in the block, or an agent. generic: it was `cp.async`, a write of the generic proxy.
        """
        self._arriving[cells] = False
        self._writer[cells] = writer
        self._written[cells] = now
        self._generic[cells] = generic

    def hold(self, cells: Ints, change: int) -> None:
        """Count asynchronous reads that begin (1) and end (-1) on distinct `cells`."""
        self._held[cells] += np.uint8(change & 0xFF)

    def note_readers(self, cells: Ints, threads: Ints, now: int) -> None:
        """Note that an asynchronous read ended, for which each of `threads` may vouch: all of `cells`."""
        for start in range(0, len(threads), WARP):
            warp = threads[start : start + WARP]
            column = int(warp[0]) % self._clocks.block // WARP
            self._read_step[cells, column] = now
            self._read_lanes[cells, column] = 0xFFFFFFFF

    def fence(self, threads: Ints, now: int) -> None:
        """Note that `threads` execute `fence.proxy.async`."""
        self._fenced[threads] = now

    def _check_arriving(self, cells: Ints, threads: Ints, verb: str) -> None:
        if (arriving := self._arriving[cells]).any():
            thread = int(threads[np.flatnonzero(arriving.any(axis=1))[0]])
            name = name_thread(thread, self._clocks.block)
            raise RaceFound(f"{name} {verb} shared memory that an asynchronous copy is still writing")

    def _require(self, ordered: Flags, threads: Ints, others: Ints, now: str, before: str) -> None:
        if ordered.all():
            return
        at = np.flatnonzero(~ordered.reshape(-1))[0]
        thread, other = int(threads.reshape(-1)[at]), int(others.reshape(-1)[at])
        other_name = f"thread {other}" if other < self._clocks.block else "a bulk copy"
        raise RaceFound(
            f"shared memory: the {now} by {name_thread(thread, self._clocks.block)} and an earlier {before} "
            f"by {other_name} have no order"
        )

    def _note_readers(self, cells: Ints, threads: Ints, now: int) -> None:
        clocks = self._clocks
        column = threads % clocks.block // WARP
        keys = (cells * clocks.warps + column[:, None]).reshape(-1)
        bits = np.repeat(np.uint32(1) << (threads % WARP).astype(np.uint32), cells.shape[1])
        owners = np.repeat(threads, cells.shape[1])
        numbers = np.arange(len(keys), dtype=np.int32)
        self._scratch[keys] = numbers
        if (self._scratch[keys] != numbers).any():  # several lanes of a warp read one cell
            keys, first, places = np.unique(keys, return_index=True, return_inverse=True)
            # A lane reads a cell once an instruction, so that the sum of bits is their union.
            bits = np.bincount(places.reshape(-1), weights=bits).astype(np.uint32)
            owners = owners[first]
        steps, lanes = self._read_step.reshape(-1), self._read_lanes.reshape(-1)
        old, old_steps = lanes[keys], steps[keys]
        if (other := (old & ~bits != 0)).any():
            known = clocks.all_known(owners[other])
            warps = owners[other] % clocks.block // WARP
            past = known[np.arange(len(known)), warps] >= old_steps[other]
            # Earlier readers that this one does not know remain, as if they read now.
            bits[other] |= np.where(past, np.uint32(0), old[other])
        lanes[keys] = bits
        steps[keys] = now

    def _check_readers(self, cells: Ints, threads: Ints) -> None:
        steps = self._read_step[cells]
        late = steps > self._clocks.all_known(threads)[:, None, :]
        if not late.any():
            return
        row, column, warp = np.nonzero(late)
        lanes = np.arange(WARP)
        masks = self._read_lanes[cells[row, column], warp]
        reads = (masks[:, None] >> lanes.astype(np.uint32)) & np.uint32(1) == 1
        each = np.broadcast_to(threads[row][:, None], reads.shape)
        others = warp[:, None] * WARP + lanes
        since = np.broadcast_to(steps[row, column, warp][:, None], reads.shape)
        self._require(self._clocks.ordered(each, others, since) | ~reads, each, others, "write", "read")


NOBODY: Final = -1
MANY: Final = -2


class GlobalShadow:
    """State of one buffer in device memory. Nothing orders accesses of different blocks."""

    def __init__(self, cells: int, clocks: Clocks, name: str, *, initialised: bool) -> None:
        self._clocks = clocks
        self._name = name
        self.initialised: Final = np.full(cells, initialised)
        self._writer = np.full(cells, NOBODY, np.int32)
        self._written = np.zeros(cells, np.int32)
        self._reader = np.full(cells, NOBODY, np.int32)
        self._read_block = np.full(cells, NOBODY, np.int32)
        self._read_step = np.zeros(cells, np.int32)

    def read(self, cells: Ints, threads: Ints, now: int) -> None:
        """Check and note that `threads`, (n,), read `cells`, (n, k). Raises `PtxError`."""
        if not (initialised := self.initialised[cells]).all():
            thread = int(threads[np.flatnonzero(~initialised.all(axis=1))[0]])
            raise UninitialisedRead(
                f"{name_thread(thread, self._clocks.block)} reads memory of {self._name} that nothing has "
                "written"
            )
        each = np.broadcast_to(threads[:, None], cells.shape)
        self._check_writers(cells, each, "read")
        before, block = self._reader[cells], each // self._clocks.block
        known = self._clocks.all_known(threads).min(axis=1)[:, None]
        # Readers of this block that this thread knows need no memory: who follows it follows them.
        past = (self._read_step[cells] <= known) & (self._read_block[cells] == block)
        first = (before == NOBODY) | past
        blocks = np.where(first | (self._read_block[cells] == block), block, MANY)
        self._reader[cells] = each
        self._read_block[cells] = block
        several = (self._reader[cells] != each) | ~(first | (before == each))
        apart = (self._read_block[cells] != block) | (blocks == MANY)
        self._reader[cells[several]] = MANY
        self._read_block[cells[apart]] = MANY
        self._read_step[cells] = now

    def write(self, cells: Ints, threads: Ints, now: int) -> None:
        """Check and note that `threads`, (n,), write `cells`, (n, k). Raises `PtxError`."""
        each = np.broadcast_to(threads[:, None], cells.shape)
        self._check_writers(cells, each, "write")
        reader = self._reader[cells]
        other = (reader != NOBODY) & (reader != each)
        if other.any():
            apart = other & (self._read_block[cells] != each // self._clocks.block)
            known = self._clocks.all_known(threads).min(axis=1)[:, None]
            if (apart | (other & (self._read_step[cells] > known))).any():
                raise RaceFound(f"{self._name}: a write and another thread's earlier read have no order")
        self._writer[cells] = each
        if (self._writer[cells] != each).any():
            raise RaceFound(f"two threads write one place of {self._name} at once")
        self._written[cells] = now
        self.initialised[cells] = True

    def _check_writers(self, cells: Ints, each: Ints, verb: str) -> None:
        writer = self._writer[cells]
        other = (writer != NOBODY) & (writer != each)
        if not other.any():
            return
        block = self._clocks.block
        together = writer // block == each // block
        ordered = self._clocks.ordered(each, writer % block, self._written[cells])
        bad = other & ~(together & ordered)
        if bad.any():
            thread, before = int(each[bad][0]), int(writer[bad][0])
            raise RaceFound(
                f"{self._name}: the {verb} by {name_thread(thread, block)} and an earlier write by "
                f"{name_thread(before, block)} have no order"
            )
