"""Arrays of devices in operations of the host: copied through page-locked memory of the arena, in pieces.

So every operation takes them, over any link, whatever the other members pass: to these it is an operation on
the host's memory. What the device copies is ordered behind the stream that the array names; a copy that was
asked for has drained before anybody else touches the memory.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.device.arrays import DeviceArray
from zbmd.transport.cuda.api import CudaApi, CudaFault
from zbmd.transport.errors import ArenaFull
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native._native import address_of

Array: TypeAlias = NDArray[Any]
PAGE_BYTES: Final = 4096
BLOCKS_MAX: Final = 8
"""Pieces of page-locked memory that are kept; most operations use three at most."""


class DeviceStaging:
    """One communicator's. For one thread at a time; `begin` to `end` is an operation.

    kept: pieces of memory that are kept for the next operation. spills: whether memory may lie elsewhere if
    the arena is full.
    """

    def __init__(self, segment: Segment, *, kept: int = BLOCKS_MAX, spills: bool = False) -> None:
        self._segment = segment
        self._kept = kept
        self._spills = spills
        self._moves: dict[int, _Moves] = {}

    def begin(self, *arrays: object) -> None:
        """Wait on the devices for what the arrays' own streams have been asked. Raises `CudaFault`."""
        for array in arrays:
            if isinstance(array, DeviceArray):
                self._of(array).join(array.stream)

    def empty(self, like: DeviceArray, size: int) -> Array:
        """Memory of the arena for `size` elements of an array, until `end`. Raises `ArenaFull`."""
        return self.memory(like, size * like.itemsize).view(like.dtype)

    def memory(self, like: DeviceArray, nbytes: int) -> NDArray[np.uint8]:
        """As `empty`, so many bytes."""
        return self._of(like).take(self._segment, nbytes)

    def copy(self, into: Array | DeviceArray, src: Array | DeviceArray) -> None:
        """Ask for a copy of flat arrays of one size: done at once between arrays of the host.

        Raises `CudaFault`.
        """
        if not isinstance(into, DeviceArray) and not isinstance(src, DeviceArray):
            into[...] = src
            return
        moves = self._of(into if isinstance(into, DeviceArray) else src)
        if into.nbytes:
            moves.copy(_address(into), _address(src), into.nbytes)

    def settle(self) -> None:
        """Wait until all copies that were asked for have drained. Raises `CudaFault`."""
        for moves in self._moves.values():
            moves.settle()

    def end(self) -> None:
        """The end of an operation, however it went: nothing touches its memory any more."""
        try:
            self.settle()
        finally:
            for moves in self._moves.values():
                moves.give_back()

    def close(self) -> None:
        """Unlock and give back all memory. Idempotent. Raises `CudaFault`."""
        while self._moves:
            self._moves.popitem()[1].close()

    def _of(self, array: Any) -> _Moves:
        api: CudaApi = array.api
        found = self._moves.get(api.device)
        if found is None:
            found = self._moves[api.device] = _Moves(api, self._kept, self._spills)
        return found


class _Moves:
    """One device's: a stream for its copies, and the memory that it copies from and to."""

    def __init__(self, api: CudaApi, kept: int, spills: bool) -> None:
        self._api = api
        self._kept = kept
        self._spills = spills
        self._stream = api.stream_create()
        self._event = api.event_create()
        self._under_way = False
        self._idle: list[_Block] = []
        self._used: list[_Block] = []

    def join(self, stream: int) -> None:
        self._api.event_record(self._event, stream)
        self._api.stream_wait_event(self._stream, self._event)

    def copy(self, into: int, src: int, nbytes: int) -> None:
        self._under_way = True
        self._api.memcpy_async(into, src, nbytes, self._stream)

    def settle(self) -> None:
        if self._under_way:
            self._api.stream_synchronize(self._stream)
            self._under_way = False

    def take(self, segment: Segment, nbytes: int) -> NDArray[np.uint8]:
        fits = [block for block in self._idle if block.memory.nbytes >= nbytes]
        if fits:
            block = min(fits, key=lambda each: each.memory.nbytes)
            self._idle.remove(block)
        else:
            block = self._new(segment, nbytes)
        self._used.append(block)
        return block.memory[:nbytes]

    def _new(self, segment: Segment, nbytes: int) -> _Block:
        self._keep(self._kept - 1)
        pages = max(1, -(-nbytes // PAGE_BYTES)) + 1  # one more than are used: they begin on a page
        try:
            whole = segment.arena.empty(pages * PAGE_BYTES, np.uint8)
        except ArenaFull:
            self._keep(0)
            try:
                whole = segment.arena.empty(pages * PAGE_BYTES, np.uint8)
            except ArenaFull:
                if not self._spills:
                    raise
                whole = np.empty(pages * PAGE_BYTES, np.uint8)
        return _Block(self._api, whole)

    def _keep(self, blocks: int) -> None:
        """No more than so many, the latest."""
        while len(self._idle) > blocks:
            self._idle.pop(0).unlock(self._api)

    def give_back(self) -> None:
        self._idle += self._used
        self._used.clear()
        self._keep(self._kept)

    def close(self) -> None:
        self.give_back()
        self._keep(0)
        self._api.event_destroy(self._event)
        self._api.stream_destroy(self._stream)


class _Block:
    """The whole pages in some memory, which the device reads and writes by itself where CUDA locks them."""

    def __init__(self, api: CudaApi, whole: NDArray[np.uint8]) -> None:
        begin = -address_of(whole) % PAGE_BYTES
        self.memory: NDArray[np.uint8] = whole[begin : begin + whole.nbytes - PAGE_BYTES]
        self._locked = True
        try:
            api.host_register(address_of(self.memory), self.memory.nbytes)
        except CudaFault:
            self._locked = False  # over the limit of locked memory: CUDA copies through memory of its own

    def unlock(self, api: CudaApi) -> None:
        if self._locked:
            self._locked = False
            api.host_unregister(address_of(self.memory))


def _address(x: Array | DeviceArray) -> int:
    return x.address if isinstance(x, DeviceArray) else address_of(x)
