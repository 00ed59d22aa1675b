"""The memories of a launch: buffers on the device, the shared memory of each block, and the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zbmd.tools.lab.ptx.clocks import Clocks, Ints
from zbmd.tools.lab.ptx.counters import Counters
from zbmd.tools.lab.ptx.errors import MemoryFault
from zbmd.tools.lab.ptx.shadow import GlobalShadow, SharedShadow, name_thread
from zbmd.transport.cuda.tiles import TileLayout

Values = npt.NDArray[Any]
FIRST_ADDRESS: Final = 0x7F00_0000_0000
ALIGNMENT: Final = 256
"""Of what cudaMalloc returns."""
GUARD_BYTES: Final = 4096
POISON: Final = 0xFF
"""Bytes of shared memory before the first write: NaN in every float format."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A contiguous array that a kernel reads and writes in place.

    initialised: whether it may be read before the kernel has written it. writable: whether it may be written.
    """

    array: Values
    initialised: bool = True
    writable: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """A tensor map as an argument: a buffer that the kernel reads in boxes."""

    buffer: Buffer
    layout: TileLayout


class DeviceBuffer:
    """A buffer at its address."""

    def __init__(self, buffer: Buffer, address: int, name: str, grain: int, clocks: Clocks) -> None:
        self.buffer: Final = buffer
        self.address: Final = address
        self.name: Final = name
        self.nbytes: Final = buffer.array.nbytes
        self.data: Final = np.zeros(-(-max(self.nbytes, 1) // ALIGNMENT) * ALIGNMENT, np.uint8)
        self.data[: self.nbytes] = np.ascontiguousarray(buffer.array).reshape(-1).view(np.uint8)
        cells = len(self.data) // grain
        self.shadow: Final = GlobalShadow(cells, clocks, name, initialised=buffer.initialised)

    def copy_back(self) -> None:
        """Copy what the kernel wrote into the array."""
        flat = self.data[: self.nbytes].view(self.buffer.array.dtype)
        self.buffer.array[...] = flat.reshape(self.buffer.array.shape)


class DeviceMemory:
    """All buffers of a launch, with unmapped space between them."""

    def __init__(
        self, named: list[tuple[str, Buffer]], grain: int, clocks: Clocks, counters: Counters
    ) -> None:
        self.grain: Final = grain
        self._block = clocks.block
        self._counters = counters
        self.buffers: Final = list[DeviceBuffer]()
        self.addresses: Final = dict[str, int]()
        """By the parameter's name. Parameters with the same array have the same address."""
        address = FIRST_ADDRESS
        for name, buffer in named:
            same = [one for one in self.buffers if one.buffer.array is buffer.array]
            if not same:
                self.buffers.append(DeviceBuffer(buffer, address, name, grain, clocks))
                address += len(self.buffers[-1].data) + GUARD_BYTES
            self.addresses[name] = (same or self.buffers[-1:])[0].address
        self._starts = np.array([one.address for one in self.buffers], np.int64)

    def access(
        self, addresses: Ints, size: int, threads: Ints, where: str, *, counted: bool = True
    ) -> list[tuple[DeviceBuffer, Ints, Ints]]:
        """Return for accesses of `size` bytes: buffers, the places in `threads`, and the bytes' places.

        Raises `MemoryFault` if an access is outside all buffers or misaligned.
        """
        if (addresses % size).any():
            self._fault(addresses, threads, addresses % size != 0, f"is not aligned to {size} bytes")
        if counted:
            self._counters.count_sectors(where, addresses, threads, size)
        which = np.searchsorted(self._starts, addresses, side="right") - 1
        found = list[tuple[DeviceBuffer, Ints, Ints]]()
        for number in np.unique(which).tolist():
            places = np.flatnonzero(which == number)
            if number < 0:
                self._fault(addresses, threads, which < 0, "is outside all buffers")
            one = self.buffers[number]
            offsets = addresses[places] - one.address
            outside = (which == number) & (addresses - one.address + size > one.nbytes)
            if outside.any():
                self._fault(addresses, threads, outside, f"is outside {one.name}, of {one.nbytes} bytes", one)
            found.append((one, places, offsets))
        return found

    def _fault(
        self, addresses: Ints, threads: Ints, bad: Values, why: str, buffer: DeviceBuffer | None = None
    ) -> None:
        at = np.flatnonzero(bad)[0]
        address = int(addresses[at])
        place = f"byte {address - buffer.address}" if buffer else f"address {address:#x}"
        raise MemoryFault(f"{name_thread(int(threads[at]), self._block)}: {place} {why}")

    def cells(self, offsets: Ints, size: int) -> Ints:
        """Return the cells of accesses at `offsets` in a buffer: (n, cells of an access)."""
        return offsets[:, None] // self.grain + np.arange(max(1, size // self.grain))

    def load(
        self, addresses: Ints, dtype: npt.DTypeLike, count: int, threads: Ints, now: int, where: str
    ) -> Values:
        """Return `count` consecutive values for each of `threads`, (n, count)."""
        each = np.dtype(dtype).itemsize
        values = np.empty((len(threads), count), dtype)
        for one, places, offsets in self.access(addresses, each * count, threads, where):
            one.shadow.read(self.cells(offsets, each * count), threads[places], now)
            values[places] = one.data.view(dtype)[offsets[:, None] // each + np.arange(count)]
        return values

    def store(self, addresses: Ints, values: Values, threads: Ints, now: int, where: str) -> None:
        """Store `values`, (n, count), one row for each of `threads`."""
        each, count = values.dtype.itemsize, values.shape[1]
        for one, places, offsets in self.access(addresses, each * count, threads, where):
            if not one.buffer.writable:
                thread = name_thread(int(threads[places[0]]), self._block)
                raise MemoryFault(f"{thread} writes to {one.name}, which is read-only")
            one.shadow.write(self.cells(offsets, each * count), threads[places], now)
            one.data.view(values.dtype)[offsets[:, None] // each + np.arange(count)] = values[places]


class SharedMemory:
    """The shared memory of every block, one behind the other in one array."""

    def __init__(self, blocks: int, nbytes: int, grain: int, clocks: Clocks, counters: Counters) -> None:
        self.grain: Final = grain
        self._block = clocks.block
        self._counters = counters
        self.nbytes: Final = nbytes
        self._stride = -(-max(nbytes, 1) // 1024) * 1024
        self.data: Final = np.full(blocks * self._stride, POISON, np.uint8)
        self.shadow: Final = SharedShadow(len(self.data) // grain, clocks, blocks * clocks.block)

    def places(self, addresses: Ints, size: int, threads: Ints, where: str, *, counted: bool = True) -> Ints:
        """Return the places in `data` of accesses of `size` bytes. Raises `MemoryFault`."""
        bad = (addresses < 0) | (addresses + size > self.nbytes) | (addresses % min(size, 16) != 0)
        if bad.any():
            at = np.flatnonzero(bad)[0]
            name = name_thread(int(threads[at]), self._block)
            raise MemoryFault(
                f"{name}: byte {int(addresses[at])} of shared memory is outside its {self.nbytes} bytes, or "
                f"not aligned to {size}"
            )
        if counted:
            self._counters.count_shared(where, addresses, threads, size)
        found: Ints = addresses + threads // self._block * self._stride
        return found

    def cells(self, places: Ints, size: int) -> Ints:
        """Return the cells of accesses at `places`: (n, cells of an access)."""
        return places[:, None] // self.grain + np.arange(max(1, size // self.grain))

    def load(
        self, addresses: Ints, dtype: npt.DTypeLike, count: int, threads: Ints, now: int, where: str
    ) -> Values:
        """Return `count` consecutive values for each of `threads`, (n, count)."""
        each = np.dtype(dtype).itemsize
        places = self.places(addresses, each * count, threads, where)
        self.shadow.read(self.cells(places, each * count), threads, now)
        values: Values = self.data.view(dtype)[places[:, None] // each + np.arange(count)]
        return values

    def store(self, addresses: Ints, values: Values, threads: Ints, now: int, where: str) -> None:
        """Store `values`, (n, count), one row for each of `threads`."""
        each, count = values.dtype.itemsize, values.shape[1]
        places = self.places(addresses, each * count, threads, where)
        self.shadow.write(self.cells(places, each * count), threads, now)
        self.data.view(values.dtype)[places[:, None] // each + np.arange(count)] = values
