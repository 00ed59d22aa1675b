"""The symmetric arena: arrays allocated in a process's segment, so that its peers can read them in place.

Best fit over address-ordered holes with immediate coalescing (Knuth, TAOCP vol. 1, 2.5). An array's memory
returns to the arena when the array and every view of it are gone.
"""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zbmd.transport.errors import ArenaFull, LocalProtocolError, UserError
from zbmd.transport.memory._region import stream
from zbmd.transport.memory.memfd import Filler, in_words
from zbmd.transport.native._native import address_of

ALIGNMENT = 64
BLOCKS_MAX = 1 << 16
"""Arrays alive at once in one arena."""


class Memory(Protocol):
    """A range of memory that arrays can lie in: a `Mapping`, or what stands for one in the simulator."""

    @property
    def address(self) -> int:
        """Of its first byte."""
        ...

    def view(self, offset: int, nbytes: int, *, writable: bool = False) -> memoryview:
        """A view that keeps it alive."""
        ...


class Allocator:
    """The use of the bytes [begin, begin + capacity). Pure: it knows offsets, no memory."""

    def __init__(self, begin: int, capacity_bytes: int) -> None:
        if begin % ALIGNMENT or capacity_bytes < 0:
            raise LocalProtocolError(f"allocator at {begin} of {capacity_bytes} bytes: bad range")
        self.begin = begin
        self.capacity_bytes = capacity_bytes - capacity_bytes % ALIGNMENT
        self.used_bytes = 0
        self._hole_starts: list[int] = [begin] if self.capacity_bytes else []
        self._hole_sizes: list[int] = [self.capacity_bytes] if self.capacity_bytes else []
        self._blocks: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int:
        """Reserve `nbytes`, rounded up to the alignment; return their offset. Raises `ArenaFull`."""
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        best = -1
        for i, hole in enumerate(self._hole_sizes):
            if hole >= size and (best < 0 or hole < self._hole_sizes[best]):
                best = i
                if hole == size:
                    break
        if best < 0 or len(self._blocks) >= BLOCKS_MAX:
            raise self._full(size)
        offset = self._hole_starts[best]
        if self._hole_sizes[best] == size:
            del self._hole_starts[best], self._hole_sizes[best]
        else:
            self._hole_starts[best] += size
            self._hole_sizes[best] -= size
        self._blocks[offset] = size
        self.used_bytes += size
        return offset

    def claim(self, offset: int, nbytes: int) -> None:
        """Reserve `nbytes` at `offset`, as `allocate` once did. Raises `ArenaFull` if they are not free."""
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        i = bisect_left(self._hole_starts, offset + 1) - 1
        start, hole = (self._hole_starts[i], self._hole_sizes[i]) if i >= 0 else (0, 0)
        if offset % ALIGNMENT or i < 0 or offset + size > start + hole:
            raise self._full(size)
        pieces = [(start, offset - start), (offset + size, start + hole - offset - size)]
        left = [piece for piece in pieces if piece[1]]
        self._hole_starts[i : i + 1] = [piece[0] for piece in left]
        self._hole_sizes[i : i + 1] = [piece[1] for piece in left]
        self._blocks[offset] = size
        self.used_bytes += size

    def free(self, offset: int) -> None:
        """Give back the block at `offset`. Raises `LocalProtocolError` if there is none."""
        size = self._blocks.pop(offset, None)
        if size is None:
            raise LocalProtocolError(f"no block of the arena begins at {offset}")
        self.used_bytes -= size
        i = bisect_left(self._hole_starts, offset)
        joins_next = i < len(self._hole_starts) and self._hole_starts[i] == offset + size
        joins_previous = i > 0 and self._hole_starts[i - 1] + self._hole_sizes[i - 1] == offset
        if joins_next:
            size += self._hole_sizes[i]
            del self._hole_starts[i], self._hole_sizes[i]
        if joins_previous:
            self._hole_sizes[i - 1] += size
        else:
            self._hole_starts.insert(i, offset)
            self._hole_sizes.insert(i, size)

    def check_invariants(self) -> None:
        """Blocks and holes tile the range, and no two holes touch."""
        ranges = sorted(
            [(start, size, False) for start, size in self._blocks.items()]
            + [(s, n, True) for s, n in zip(self._hole_starts, self._hole_sizes, strict=True)]
        )
        at, after_hole = self.begin, False
        for start, size, hole in ranges:
            assert start == at, f"a gap or an overlap at {at}"
            assert start % ALIGNMENT == 0 and size > 0, f"block {start}+{size} is misaligned or empty"
            assert not (hole and after_hole), f"two holes touch at {start}"
            at, after_hole = start + size, hole
        assert at == self.begin + self.capacity_bytes, f"the tiling ends at {at}"
        assert self.used_bytes == sum(self._blocks.values()), "used_bytes is wrong"
        assert self._hole_starts == sorted(self._hole_starts), "holes out of order"

    def _full(self, size: int) -> ArenaFull:
        largest = max(self._hole_sizes, default=0)
        return ArenaFull(
            f"no room for {in_words(size)} in the arena: {in_words(self.used_bytes)} of "
            f"{in_words(self.capacity_bytes)} in {len(self._blocks):,} arrays (at most {BLOCKS_MAX:,}) are "
            f"in use and the largest hole is {in_words(largest)}. Raise --arena (or ZBMD_ARENA), or drop "
            "arrays.",
            asked_bytes=size,
            available_bytes=largest,
        )


class Arena:
    """Arrays in one range of a process's own segment. Safe to use from any thread.

    `unsettled` reports peers that may still store here though they are known to have ended: while there are
    any, memory that is returned waits. `filler`: what is still allocating pages of it. `was_used`: its memory
    is not new.
    """

    def __init__(
        self,
        mapping: Memory,
        offset: int,
        nbytes: int,
        *,
        unsettled: Callable[[], bool] | None = None,
        filler: Filler | None = None,
        was_used: bool = False,
    ) -> None:
        self._mapping = mapping
        self._unsettled = unsettled
        self._filler = filler
        self._allocator = Allocator(offset, nbytes)
        self._begin = mapping.address + offset
        self._end = self._begin + nbytes
        self._lock = threading.Lock()
        self._handed_out = offset + nbytes if was_used else offset
        """The memory from here on was never handed out: its pages are zero, and may not even exist yet."""
        # Filled by finalizers, which may run in the middle of anything, this class included; so they only
        # append here, and the next allocation frees.
        self._returned: deque[int] = deque()

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return an uninitialised C-contiguous array in the arena, 64-byte aligned.

        Raises `ArenaFull`, and `OutOfMemory` if its pages cannot be had any more.
        """
        return self._array(shape, dtype, zeroed=False)

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return an array of zeros, otherwise as of `empty`. Memory that is new is not touched."""
        return self._array(shape, dtype, zeroed=True)

    def lazy_zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """As `zeros`, but its pages may not exist yet: call `ready` with what is used, before it is used."""
        return self._array(shape, dtype, zeroed=True, lazy=True)

    def lazy_empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """As `empty`, but lazy as of `lazy_zeros`."""
        return self._array(shape, dtype, zeroed=False, lazy=True)

    def ready(self, array: NDArray[Any]) -> None:
        """Return when all pages of an array exist: a lazy one, a part of it, or any other.

        Raises `OutOfMemory`.
        """
        if self._filler is not None and (offset := self.offset_of(array)) is not None:
            self._filler.wait_for(offset, offset + array.nbytes)

    def want(self, array: NDArray[Any] | None = None) -> None:
        """Have the pages of a lazy array made before others, or, without one, all pages mapped."""
        if self._filler is None:
            return
        if array is None:
            self._filler.want(0, self._end)
        elif (offset := self.offset_of(array)) is not None:
            self._filler.want(offset, offset + array.nbytes)

    def _array(
        self, shape: int | tuple[int, ...], dtype: DTypeLike, *, zeroed: bool, lazy: bool = False
    ) -> NDArray[Any]:
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise LocalProtocolError(f"an array of {kind} holds Python objects and cannot be shared")
        dimensions = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(extent < 0 for extent in dimensions):
            raise LocalProtocolError(f"an array of shape {dimensions} has a negative extent")
        nbytes = math.prod(dimensions) * kind.itemsize
        with self._lock:
            self._collect()
            used_before = self._handed_out
            offset = self._allocate(nbytes, zeroed=zeroed, lazy=lazy)
        view = self._mapping.view(offset, nbytes, writable=True)
        if zeroed and offset < used_before:
            used = view[: used_before - offset]
            np.ndarray(len(used), np.uint8, buffer=used)[:] = 0
        array = np.ndarray(dimensions, kind, buffer=view)
        # numpy keeps every view's base at this array, so it lives as long as any of them.
        weakref.finalize(array, self._returned.append, offset).atexit = False
        return array

    def from_array(self, array: NDArray[Any]) -> NDArray[Any]:
        """A C-contiguous copy of `array` in the arena. Raises `ArenaFull`."""
        copy = self.empty(array.shape, array.dtype)
        np.copyto(copy, array)
        return copy

    def reserve(self, nbytes: int) -> int:
        """Bytes of the arena without an array over them, until `unreserve`; their offset from the segment's
        base. Raises `ArenaFull`."""
        with self._lock:
            self._collect()
            return self._allocate(nbytes)

    def claim(self, offset: int, nbytes: int) -> None:
        """`reserve` these bytes, whose pages may not exist yet. Raises `ArenaFull` if they are in use."""
        with self._lock:
            self._allocator.claim(offset, nbytes)

    def taken(self, offset: int, nbytes: int) -> NDArray[Any]:
        """Return an array over what `claim` gave, (nbytes,) uint8; they are given back with it."""
        array = np.ndarray(nbytes, np.uint8, buffer=self._mapping.view(offset, nbytes, writable=True))
        weakref.finalize(array, self._returned.append, offset).atexit = False
        return array

    def unreserve(self, offset: int) -> None:
        """Give back what `reserve` gave. Raises `LocalProtocolError` if nothing begins there."""
        with self._lock:
            self._allocator.free(offset)

    def fill(self, offset: int, *pieces: bytes) -> None:
        """Copy the pieces, one behind the other, to what `reserve` gave: for a peer, so past our caches."""
        for piece in pieces:
            stream(self._mapping.view(offset, len(piece), writable=True), piece)
            offset += len(piece)

    def offset_of(self, array: NDArray[Any]) -> int | None:
        """Where `array` begins, counted from the segment's base; None if it is not C-contiguous or does
        not lie wholly in this arena."""
        if not array.flags.c_contiguous:
            return None
        address = address_of(array)
        if address < self._begin or address + array.nbytes > self._end:
            return None
        return address - self._mapping.address

    @property
    def used_bytes(self) -> int:
        """Bytes in live arrays, each rounded up to 64."""
        with self._lock:
            self._collect()
            return self._allocator.used_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes in the arena."""
        return self._allocator.capacity_bytes

    def check_invariants(self) -> None:
        """See `Allocator.check_invariants`."""
        with self._lock:
            self._allocator.check_invariants()

    @property
    def waiting_blocks(self) -> int:
        """Arrays that are gone and whose memory waits until the end of a peer is certain."""
        with self._lock:
            self._collect()
            return len(self._returned)

    def _allocate(self, nbytes: int, *, zeroed: bool = False, lazy: bool = False) -> int:
        try:
            offset = self._allocator.allocate(nbytes)
        except ArenaFull as full:
            if not self._returned:
                raise
            raise ArenaFull(
                f"{full} The memory of {len(self._returned):,} arrays more is kept until a peer that died "
                "is proven gone: try again then.",
                asked_bytes=full.asked_bytes,
                available_bytes=full.available_bytes,
            ) from None
        if self._filler is not None:
            end = offset + nbytes
            try:
                if lazy:  # what was used before is cleared now
                    end = min(end, self._handed_out) if zeroed else offset
                self._filler.wait_for(offset, end)
            except BaseException:
                self._allocator.free(offset)
                raise
        self._handed_out = max(self._handed_out, offset + nbytes)
        return offset

    def _collect(self) -> None:
        if self._returned and self._unsettled is not None and self._unsettled():
            return
        for _ in range(len(self._returned)):
            self._allocator.free(self._returned.popleft())


# `zbmd.empty` and `zbmd.from_array`: arrays in the arena of the worker that this process has joined as.

_joined: list[Arena] = []


def arena_joined(arena: Arena) -> None:
    """Allocate from this arena, too: a worker of this process has joined."""
    _joined.append(arena)


def arena_left(arena: Arena) -> None:
    """It has left; its arrays live on, but nobody else sees them. Idempotent."""
    if arena in _joined:
        _joined.remove(arena)


def empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Return an uninitialised C-contiguous array, 64-byte aligned, that all ranks of this host can read.

    Collectives read it in place. Its memory returns to the arena when the array and all its views are gone.
    Raises `ArenaFull` if there is no room for it, and `UserError` if this process has not joined a job.
    """
    return _arena("empty").empty(shape, dtype)


def from_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of `array` in memory as of `empty`; raises as `empty` does."""
    return _arena("from_array").from_array(array)


def _arena(function: str) -> Arena:
    if not _joined:
        raise UserError(
            f"zbmd.{function} makes arrays that the other ranks can read, and this process has not joined a "
            "job. Call it inside `async with zbmd.join():`; outside of one, numpy's own arrays will do."
        )
    if len(_joined) > 1:
        raise UserError(
            f"zbmd.{function} cannot choose among the {len(_joined)} workers of this process. "
            f"Call worker.segment.arena.{function}(...)."
        )
    return _joined[0]
