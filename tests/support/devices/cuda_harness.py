"""The harness of device memory: real segments, cells and deaths of a process, and a model of the devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from support.devices.cuda_model import Clock, ModelHost, ModelProcess
from support.links.region_harness import (
    GUARD_NS,
    End,
    RegionHarness,
    Scenario,
    ShmEnd,
    ShmEnds,
    Sizes,
    run_between,
)
from zbmd.transport.cuda.array import DeviceHandle
from zbmd.transport.cuda.peer import CudaPeer
from zbmd.transport.cuda.region import CudaRegion, DeviceExports
from zbmd.transport.memory.region import RegionHandle, RemoteRegion
from zbmd.transport.native import _native
from zbmd.transport.native._native import address_of

ANY_SIZE = Sizes()
_SEEDS = itertools.count(1)


class ModelArray:
    """Bytes in a modelled device's memory, read and written from the host by copies on the default stream.

    others: processes whose program is the same coroutine, which knows of these copies that they are over.
    """

    def __init__(
        self,
        process: ModelProcess,
        nbytes: int,
        *,
        writable: bool = True,
        others: Callable[[], Sequence[ModelProcess]] = lambda: (),
    ) -> None:
        self.process = process
        self._others = others
        self.nbytes = nbytes
        self.writable = writable
        self.address = process.malloc(nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "stream": self.process.default_stream,
        }

    def host(self, part: slice = slice(None)) -> NDArray[np.uint8]:
        """The bytes; of a dead process's memory, as a process that has it open still sees them."""
        process = self.process
        begin, end, step = part.indices(self.nbytes)
        assert step == 1
        if process.dead:
            return process.host.allocations[self.address].data[begin:end].copy()
        into = np.empty(max(0, end - begin), np.uint8)
        process.memcpy_async(address_of(into), self.address + begin, into.nbytes, process.default_stream)
        self._over()
        return into

    def write(self, data: NDArray[np.uint8]) -> None:
        """Replace all of it."""
        process = self.process
        process.memcpy_async(self.address, address_of(data), self.nbytes, process.default_stream)
        self._over()

    def _over(self) -> None:
        self.process.stream_synchronize(self.process.default_stream)
        told = self.process.tells()
        for other in self._others():
            other.learns(told)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[np.uint8]:
        return self.host()

    def __getitem__(self, key: Any) -> Any:
        return self.host(key) if isinstance(key, slice) else self.host()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        data = self.host()
        data[key] = value
        self.write(data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.host(), name)


class _Arrays:
    """Stands for an inbox or an arena."""

    def __init__(self, process: ModelProcess, other: ModelProcess, *, writable: bool) -> None:
        self._process = process
        self._other = other
        self._writable = writable

    def empty(self, nbytes: int, dtype: DTypeLike) -> Any:
        return ModelArray(self._process, nbytes, writable=self._writable, others=lambda: (self._other,))

    def from_array(self, data: NDArray[np.uint8]) -> Any:
        array = self.empty(data.nbytes, np.uint8)
        array.write(data)
        return array


class _Registered:
    """Stands for the regions of a segment."""

    def __init__(self, exports: DeviceExports) -> None:
        self.exports = exports

    def register(self, array: Any) -> DeviceHandle:
        return self.exports.register(array, writable=array.writable, writers=(1, 2))

    def release(self, handle: Any) -> None:
        self.exports.release(handle)


@dataclass
class Cells:
    """The clock that a waiter for a cell takes over, by who has set it, for whom, and the channel."""

    told: dict[tuple[int, int, int], list[tuple[int, Clock]]] = field(default_factory=dict[Any, Any])

    def learned(self, process: ModelProcess, setter: int, slot: int, channel: int, value: int) -> None:
        """The cell has been seen to hold `value`: all up to the first that set as much came before."""
        for told, clock in list(self.told.get((setter, slot, channel), ())):
            process.learns(clock)
            if told >= value:
                return


class TellingCell:
    """A region of the host's memory by which cells are set; it notes what the process knew by then."""

    def __init__(self, inner: RemoteRegion, cells: Cells, process: ModelProcess, own_slot: int) -> None:
        self._inner = inner
        self._cells = cells
        self._process = process
        self._own_slot = own_slot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def notify(self, channel: int, value: int) -> None:
        key = self._own_slot, self._inner.handle.slot, channel
        self._cells.told.setdefault(key, []).append((value, self._process.tells()))
        self._inner.notify(channel, value)


class _CudaEnd(End):
    """`ShmEnd`, with memory of a device."""

    def __init__(self, host: ShmEnd, process: ModelProcess, cells: Cells) -> None:
        self.host = host
        self.process = process
        self.cells = cells
        self.slot, self.incarnation = host.memory.slot, host.memory.incarnation
        self.exports = DeviceExports(process, slot=self.slot, incarnation=self.incarnation)
        self.peer: CudaPeer

    def join(self, other: _CudaEnd) -> None:
        """Reach the other's memory."""
        handle = other.host.memory.regions.register(other.host.memory.inbox.empty(64, np.uint8))
        cell: Any = TellingCell(self.host.link.open_region(handle), self.cells, self.process, self.slot)
        self.peer = CudaPeer(self.process, cell)
        segment = self.host.memory
        memory: Any = SimpleNamespace(
            slot=self.slot,
            incarnation=self.incarnation,
            inbox=_Arrays(self.process, other.process, writable=True),
            arena=_Arrays(self.process, other.process, writable=False),
            regions=_Registered(self.exports),
            lost_mask=segment.lost_mask,
            clear_lost=segment.clear_lost,
        )
        link: Any = SimpleNamespace(open_region=self.open_region)
        super().__init__(memory, link)

    def open_region(self, handle: RegionHandle) -> CudaRegion:
        assert isinstance(handle, DeviceHandle)
        return CudaRegion(self.peer, handle)

    async def wait(
        self, slot: int, channel: int, value: int, *, group_mask: int = 0, for_ns: int = GUARD_NS
    ) -> int:
        outcome = await self.host.wait(slot, channel, value, group_mask=group_mask, for_ns=for_ns)
        if outcome == _native.WAIT_OK:
            self.cells.learned(self.process, slot, self.slot, channel, value)
        return outcome

    def abort(self, channel: int, epoch: int) -> None:
        self.host.abort(channel, epoch)


class _CudaEnds(ShmEnds):
    def __init__(self, devices: int) -> None:
        super().__init__(Sizes())
        self._model = ModelHost(devices=devices, seed=next(_SEEDS))
        self._cells = Cells()
        self._near_process = self._model.process(0)
        self._far_device = devices - 1
        self._peers: list[CudaPeer] = []

    def _connect(self) -> None:
        super()._connect()
        self._cells.told.clear()  # of the former life's cells
        near, far = self.near, self.far
        assert isinstance(near, ShmEnd) and isinstance(far, ShmEnd)
        near_end = _CudaEnd(near, self._near_process, self._cells)
        far_end = _CudaEnd(far, self._model.process(self._far_device), self._cells)
        near_end.join(far_end)
        far_end.join(near_end)
        self._peers += [near_end.peer, far_end.peer]
        self.near, self.far = near_end, far_end

    async def kill_far(self) -> None:
        assert isinstance(self.far, _CudaEnd)
        self.far.process.die()
        await super().kill_far()

    def end(self) -> None:
        for peer in self._peers:
            peer.close()
        super().end()


class CudaModelHarness(RegionHarness):
    """Both ends on one device, or on two that reach each other."""

    owner_refuses = False
    large_bytes = 1 << 22

    def __init__(self, devices: int) -> None:
        self.name = f"cuda, modelled, {devices} devices"
        self._devices = devices

    def run(self, scenario: Scenario, sizes: Sizes = ANY_SIZE) -> None:
        run_between(_CudaEnds(self._devices), scenario)
