"""A model of a host's CUDA devices: memory, streams and events, run late and out of order, held for races.

What a process asks of a stream is only queued. It runs when somebody waits, and of all streams' heads that
may run one is drawn by a seed: so what nothing orders runs in any order. Each operation has a vector clock
(Lamport 1978; Mattern 1989): of its stream, of the thread that asked, and of the events that it waited for.
An access of bytes whose last writer is not behind it raises `DeviceRace`, whatever the order was this time,
as does a write over bytes that somebody not behind it has read (the happens-before races of FastTrack,
Flanagan and Freund, PLDI 2009).

Of what CUDA leaves undefined the model makes errors: use of memory that is freed or closed, closing or
freeing it under a copy, freeing what another process has open.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from support.devices.cuda_model_array import ModelArray
from support.devices.cuda_model_launches import Launches, RunKernel, refuse_kernels
from support.devices.cuda_model_memory import FIRST_ADDRESS, is_device, of_host, shared_copy, shared_memory
from support.devices.cuda_model_timing import Events, KernelTime, kernel_ns, takes_copy
from support.devices.cuda_model_values import DeviceRace, Undefined, ValueWaits
from zbmd.transport.cuda.api import (
    HANDLE_BYTES,
    UUID_BYTES,
    CudaFault,
    DeviceFacts,
    DeviceKernels,
    OutOfDeviceMemory,
)

__all__ = ["Clock", "DeviceRace", "LoadKernel", "ModelArray", "ModelHost", "ModelProcess", "Undefined"]

Clock: TypeAlias = dict[int, int]
_PAGE_BYTES: Final = 4096
_GAP: Final = 1 << 32
"""Between allocations: a model's address never is one of the host, or of two of them."""


def _join(into: Clock, other: Clock) -> None:
    into.update({key: max(into.get(key, 0), count) for key, count in other.items()})


@dataclass(slots=True, kw_only=True)
class _Access:
    """Of bytes begin..end by what had counted to `count` on its line of order."""

    begin: int
    end: int
    line: int
    count: int
    write: bool


@dataclass(slots=True, kw_only=True)
class _Allocation:
    device: int
    owner: ModelProcess
    data: NDArray[np.uint8]
    address: int
    serial: int
    freed: bool = False
    opened: dict[ModelProcess, int] = field(default_factory=dict["ModelProcess", int])
    accesses: list[_Access] = field(default_factory=list[_Access])
    shared: bytes = b""
    """The handle by which models in other processes map it."""


@dataclass(slots=True, kw_only=True)
class _Event:
    """`recorded`: how often a record was asked for; `ran`: the clock of each that has run, by its number."""

    recorded: int = 0
    ran: dict[int, Clock] = field(default_factory=lambda: {0: {}})
    interprocess: bool = False
    timed: bool = False
    captured: bool = False
    serial: int = 0


@dataclass(slots=True, kw_only=True)
class _Operation:
    run: Callable[[Clock], None]
    asked: Clock
    may: Callable[[], bool] = lambda: True


@dataclass(slots=True, kw_only=True)
class _Stream:
    line: int
    process: ModelProcess
    clock: Clock = field(default_factory=dict[int, int])
    queue: deque[_Operation] = field(default_factory=deque[_Operation])


LoadKernel: TypeAlias = Callable[[DeviceKernels, str], Callable[..., None]]
"""Compiles for this processor; what it gives takes addresses and numbers, all of 64 bits."""


class ModelHost:
    """A host with `devices` GPUs. peer_access: whether they reach each other by themselves.

    shares: models in other processes open its memory; what races for it from there is not seen.
    """

    def __init__(
        self,
        *,
        devices: int = 2,
        seed: int = 0,
        peer_access: bool = True,
        shares: bool = False,
        load_kernel: LoadKernel | None = None,
        run_kernel: RunKernel = refuse_kernels,
        memory_bytes: int = 1 << 34,
    ) -> None:
        self.devices = devices
        self.load_kernel, self.run_kernel = load_kernel, run_kernel
        self.memory_bytes, self.driver, self.capability = memory_bytes, 13000, (9, 0)
        self.peer_access, self.shares = peer_access, shares
        self.kernel_ns: KernelTime = kernel_ns
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._running = 0
        """The line of order of the stream whose operation runs."""
        self._serial = 0
        self.allocated = 0
        """Allocations there have been."""
        self.streams: list[_Stream] = []
        self.allocations: dict[int, _Allocation] = {}
        self.events: dict[int, _Event] = {}
        self.by_handle: dict[bytes, _Allocation | _Event] = {}
        self.failed: CudaFault | None = None
        """The first thing that went wrong: every call from then on raises it, as CUDA's sticky errors."""

    def owner_of(self, address: int) -> ModelProcess:
        """The owner of the memory."""
        with self.lock:
            return self.find(address).owner

    def process(self, device: int = 0) -> ModelProcess:
        """A new process that computes on `device`."""
        return ModelProcess(self, device)

    def serial(self) -> int:
        """A number that has not been used."""
        self._serial += 1
        return self._serial

    def new_event(self, *, interprocess: bool = False, timed: bool = False) -> int:
        """Make an event; return its number."""
        serial = self.serial()
        self.events[serial] = _Event(serial=serial, interprocess=interprocess, timed=timed)
        return serial

    def run_until(self, done: Callable[[], bool]) -> bool:
        """Run operations in an order that is drawn; False if none can run before it is done."""
        while not done():
            heads = [each for each in self.streams if each.queue and each.queue[0].may()]
            if not heads:
                return False
            self._step(self._random.choice(heads))
        return True

    def run_one(self) -> None:
        """Run an operation that is drawn, if one can run."""
        heads = [each for each in self.streams if each.queue and each.queue[0].may()]
        if heads:
            self._step(self._random.choice(heads))

    def drain(self) -> None:
        """Run all that can run."""
        with self.lock:
            self.run_until(lambda: False)

    def _step(self, stream: _Stream) -> None:
        operation = stream.queue.popleft()
        _join(stream.clock, operation.asked)
        stream.clock[stream.line] = stream.clock.get(stream.line, 0) + 1
        self._running = stream.line
        try:
            operation.run(stream.clock)
        except CudaFault as error:
            self.failed = self.failed or error
            raise

    def access(
        self, address: int, nbytes: int, *, by: ModelProcess, clock: Clock, write: bool
    ) -> NDArray[np.uint8]:
        """The bytes, once it is certain that nothing races for them; for the operation that runs."""
        line = self._running
        allocation = self.find(address)
        if allocation.freed or (allocation.owner is not by and by not in allocation.opened):
            raise Undefined(f"memory at {address:#x} is used that is freed or closed")
        begin = address - allocation.address
        end = begin + nbytes
        if end > allocation.data.nbytes:
            raise Undefined(f"bytes {begin}+{nbytes} of an allocation of {allocation.data.nbytes}")
        kept: list[_Access] = []
        for each in allocation.accesses:
            apart = each.end <= begin or end <= each.begin
            ordered = clock.get(each.line, 0) >= each.count
            if not apart and not ordered and (write or each.write):
                words = "written" if write else "read", "written" if each.write else "read"
                raise DeviceRace(
                    f"bytes {begin}..{end} are {words[0]} that were {words[1]} on another stream, and "
                    "nothing orders the two: wait for its event first"
                )
            if apart or not (ordered and begin <= each.begin and each.end <= end and write):
                kept.append(each)
        kept.append(_Access(begin=begin, end=end, line=line, count=clock.get(line, 0), write=write))
        allocation.accesses = kept
        return allocation.data[begin:end]

    def find(self, address: int) -> _Allocation:
        """Raises `Undefined` if there is none."""
        base = FIRST_ADDRESS + (address - FIRST_ADDRESS) // _GAP * _GAP
        allocation = self.allocations.get(base)
        if allocation is None:
            raise Undefined(f"there is no device memory at {address:#x}")
        return allocation


class ModelProcess(ValueWaits, Launches, Events):
    """See `zbmd.transport.cuda.api.CudaApi`: one process of a `ModelHost`. Its threads share one clock."""

    def __init__(self, host: ModelHost, device: int) -> None:
        self.host = host
        self.device = device
        self.line = host.serial()
        self.clock: Clock = {self.line: 1}
        self.dead = False
        self.default_stream = 1
        """The stream of programs that name no other."""
        self._streams: dict[int, _Stream] = {}
        self.registered: dict[int, int] = {}
        """Bytes of the host's memory that is page-locked, by its address."""
        self._default = self._new_stream(1)

    # -- messages between processes outside of CUDA -------------------------------------------------------

    def tells(self) -> Clock:
        """The clock of a process that learns what this process's host has done until now."""
        with self.host.lock:
            self.clock[self.line] += 1
            return dict(self.clock)

    def learns(self, told: Clock) -> None:
        """Another process's word has come, or a cell that it has set."""
        with self.host.lock:
            _join(self.clock, told)

    def die(self) -> None:
        """As by SIGKILL: nothing that was asked goes on; what others have open stays theirs."""
        with self.host.lock:
            self.dead = True
            for stream in self._streams.values():
                stream.queue.clear()
            for allocation in self.host.allocations.values():
                allocation.opened.pop(self, None)

    # -- devices -----------------------------------------------------------------------------------------

    def facts(self) -> DeviceFacts:
        """See `CudaApi`."""
        return DeviceFacts(
            index=self.device,
            uuid=self._uuid(self.device),
            name="Modelled GPU",
            memory_bytes=self.host.memory_bytes,
            compute_capability=self.host.capability,
            pci=f"0000:{self.device + 1:02x}:00.0",
            unified_addressing=True,
            ipc_events=True,
            dma_buf=False,
        )

    def _uuid(self, device: int) -> bytes:
        return bytes([device]) * UUID_BYTES

    def device_of(self, uuid: bytes) -> int | None:
        """See `CudaApi`."""
        return next((each for each in range(self.host.devices) if self._uuid(each) == uuid), None)

    def can_access_peer(self, peer: int) -> bool:
        """See `CudaApi`."""
        return self.host.peer_access

    # -- memory ------------------------------------------------------------------------------------------

    def malloc(self, nbytes: int) -> int:
        """See `CudaApi`."""
        with self.host.lock:
            self._check()
            self.require_no_capture()
            if nbytes > self.memory_info()[0]:
                raise OutOfDeviceMemory(f"out of memory: {nbytes} bytes on device {self.device}")
            serial = self.host.serial()
            self.host.allocated += 1
            address = FIRST_ADDRESS + self.host.allocated * _GAP
            data = np.zeros(max(nbytes, 1), np.uint8)
            self.host.allocations[address] = _Allocation(
                device=self.device, owner=self, data=data, address=address, serial=serial
            )
            return address

    def free(self, address: int) -> None:
        """See `CudaApi`."""
        with self.host.lock:
            self.require_no_capture()
            allocation = self.host.find(address)
            if allocation.freed or allocation.owner is not self or allocation.address != address:
                raise Undefined(f"{address:#x} is freed that is no allocation of this process")
            if allocation.opened:
                raise Undefined("memory is freed that another process has open")
            self._settle()
            allocation.freed = True
            allocation.data = allocation.data[:0]

    def address_range(self, address: int) -> tuple[int, int]:
        """See `CudaApi`."""
        with self.host.lock:
            allocation = self.host.find(address)
            return allocation.address, allocation.data.nbytes

    def ipc_get_mem_handle(self, base: int) -> bytes:
        """See `CudaApi`."""
        with self.host.lock:
            allocation = self.host.find(base)
            if allocation.owner is not self or allocation.freed:
                raise CudaFault("invalid resource handle: not this process's")
            if self.host.shares and not allocation.shared:
                allocation.data, allocation.shared = shared_copy(allocation.data)
            handle = allocation.shared or b"M" + allocation.serial.to_bytes(HANDLE_BYTES - 1, "big")
            self.host.by_handle[handle] = allocation
            return handle

    def ipc_open_mem_handle(self, handle: bytes, device: int) -> int:
        """See `CudaApi`."""
        with self.host.lock:
            self._check()
            allocation = self.host.by_handle.get(handle) or self._of_another_model(handle, device)
            if not isinstance(allocation, _Allocation) or allocation.freed or allocation.owner is self:
                raise CudaFault("invalid resource handle")
            if allocation.device != device:
                raise CudaFault("invalid device context")
            allocation.opened[self] = allocation.opened.get(self, 0) + 1
            return allocation.address

    def _of_another_model(self, handle: bytes, device: int) -> _Allocation | None:
        data = shared_memory(handle) if self.host.shares else None
        if data is None:
            return None
        found = self.host.find(ModelProcess(self.host, device).malloc(0))
        found.data, self.host.by_handle[handle] = data, found
        return found

    def ipc_close_mem_handle(self, address: int) -> None:
        """See `CudaApi`."""
        with self.host.lock:
            allocation = self.host.find(address)
            if allocation.address != address or self not in allocation.opened:
                raise CudaFault("invalid argument: it is not open")
            if any(stream.queue for stream in self._streams.values() if stream is not self._default):
                raise Undefined("memory is closed while something is under way")
            allocation.opened[self] -= 1
            if not allocation.opened[self]:
                del allocation.opened[self]

    def host_alloc(self, nbytes: int) -> memoryview:
        """See `CudaApi`."""
        self.require_no_capture()
        self.require_free()
        return memoryview(bytearray(nbytes))

    def host_free(self, memory: memoryview) -> None:
        """See `CudaApi`."""
        memory.release()

    def host_register(self, address: int, nbytes: int) -> None:
        """See `CudaApi`."""
        with self.host.lock:
            self._check()
            self.require_free()
            if address % _PAGE_BYTES or nbytes % _PAGE_BYTES or address in self.registered:
                raise CudaFault("invalid value: whole pages are registered, and once")
            self.registered[address] = nbytes

    def host_unregister(self, address: int) -> None:
        """See `CudaApi`."""
        with self.host.lock:
            self.require_free()
            if self.registered.pop(address, None) is None:
                raise CudaFault("host memory is not registered")

    def new_array(self, shape: tuple[int, ...], typestr: str) -> ModelArray:
        """See `CudaApi`."""
        return ModelArray(self, shape, typestr)

    def free_array(self, address: int) -> None:
        """Free the memory of an array, unless this process or its host has ended."""
        if not self.dead and self.host.failed is None:
            self.free(address)

    def dmabuf(self, address: int, nbytes: int) -> int:
        """See `CudaApi`."""
        raise CudaFault("the model has no dma-bufs")

    # -- streams and events ------------------------------------------------------------------------------

    def stream_create(self) -> int:
        """See `CudaApi`."""
        with self.host.lock:
            self._check()
            number = self.host.serial() + 1000
            self._new_stream(number)
            return number

    def _new_stream(self, number: int) -> _Stream:
        stream = _Stream(line=self.host.serial(), process=self)
        self._streams[number] = stream
        self.host.streams.append(stream)
        return stream

    def stream_destroy(self, stream: int) -> None:
        """See `CudaApi`."""
        with self.host.lock:
            self.require_no_capture(stream)
            gone = self._streams.pop(stream)
            if gone.queue:
                raise Undefined("a stream is destroyed that is not idle")
            self.host.streams.remove(gone)

    def stream_synchronize(self, stream: int) -> None:
        """See `CudaApi`."""
        with self.host.lock:
            self._check()
            mine = self._streams[stream]
            self.require_no_capture(stream)
        if not self.until(lambda: not mine.queue):
            raise CudaFault("a stream waits for an event that nobody records")
        with self.host.lock:
            _join(self.clock, mine.clock)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """See `CudaApi`."""
        with self.host.lock:
            its = self._event(event)
            wanted = its.recorded
            if self.waits_in_capture(stream, captured=its.captured):
                return
            self._ask(stream, lambda clock: _join(clock, its.ran[wanted]), lambda: wanted in its.ran)

    def event_record(self, event: int, stream: int) -> None:
        """See `CudaApi`."""
        with self.host.lock:
            its = self._event(event)
            its.captured = self.is_captured(stream)
            if its.captured:
                return
            its.recorded += 1
            number = its.recorded

            def record(clock: Clock) -> None:
                its.ran[number] = dict(clock)

            self._ask(stream, record)

    def event_query(self, event: int) -> bool:
        """See `CudaApi`."""
        with self.host.lock:
            its = self._event(event)
            self.require_no_capture(of_event=its.captured)
            self.host.run_one()
            if its.recorded in its.ran:
                _join(self.clock, its.ran[its.recorded])
                return True
            return False

    def event_synchronize(self, event: int) -> None:
        """See `CudaApi`."""
        with self.host.lock:
            self._check()
            its = self._event(event)
            self.require_no_capture(of_event=its.captured)
            wanted = its.recorded
        if not self.until(lambda: wanted in its.ran or self.dead):
            raise CudaFault("an event is waited for that nobody records")
        with self.host.lock:
            self._check()
            _join(self.clock, its.ran[wanted])

    def ipc_get_event_handle(self, event: int) -> bytes:
        """See `CudaApi`."""
        with self.host.lock:
            its = self._event(event)
            if not its.interprocess:
                raise CudaFault("invalid resource handle: the event is not for other processes")
            handle = b"E" + its.serial.to_bytes(HANDLE_BYTES - 1, "big")
            self.host.by_handle[handle] = its
            return handle

    def ipc_open_event_handle(self, handle: bytes) -> int:
        """See `CudaApi`."""
        with self.host.lock:
            self._check()
            its = self.host.by_handle.get(handle)
            if not isinstance(its, _Event):
                raise CudaFault("invalid resource handle")
            return its.serial

    # -- copies ------------------------------------------------------------------------------------------

    def memcpy_async(self, into: int, src: int, nbytes: int, stream: int) -> None:
        """See `CudaApi`."""
        self._copy(into, src, nbytes, stream)

    def memcpy_peer_async(
        self, into: int, into_device: int, src: int, src_device: int, nbytes: int, stream: int
    ) -> None:
        """See `CudaApi`."""
        for address, device in ((into, into_device), (src, src_device)):
            if self.host.find(address).device != device:
                raise CudaFault(f"invalid value: {address:#x} is not on device {device}")
        self._copy(into, src, nbytes, stream)

    def _copy(self, into: int, src: int, nbytes: int, stream: int) -> None:
        with self.host.lock:

            def run(clock: Clock) -> None:
                self._target(into, nbytes, clock)[:] = self._source(src, nbytes, clock)
                takes_copy(clock, nbytes)

            self._ask(stream, run)

    def compute(
        self, into: int, nbytes: int, made: Callable[[NDArray[np.uint8]], None], stream: int = 1
    ) -> None:
        """A kernel that reads and writes these bytes in place."""
        with self.host.lock:

            def run(clock: Clock) -> None:
                made(self._target(into, nbytes, clock))

            self._ask(stream, run)

    def _source(self, address: int, nbytes: int, clock: Clock) -> NDArray[np.uint8]:
        if is_device(address):
            return self.host.access(address, nbytes, by=self, clock=clock, write=False)
        return of_host(address, nbytes)

    def _target(self, address: int, nbytes: int, clock: Clock) -> NDArray[np.uint8]:
        if is_device(address):
            return self.host.access(address, nbytes, by=self, clock=clock, write=True)
        return of_host(address, nbytes)

    def _ask(self, stream: int, run: Callable[[Clock], None], may: Callable[[], bool] = lambda: True) -> None:
        self._check()
        if self.captured(stream, run):
            return
        self.clock[self.line] += 1
        self._stream(stream).queue.append(_Operation(run=run, asked=dict(self.clock), may=may))

    def _settle(self) -> None:
        """cudaFree waits for the device."""
        self.require_free()
        for stream in self._streams.values():
            self._idle(stream)

    def _idle(self, stream: _Stream) -> None:
        self.host.run_until(lambda: not stream.queue)

    def _stream(self, stream: int) -> _Stream:
        found = self._streams.get(stream)
        if found is None:
            raise CudaFault(f"invalid resource handle: there is no stream {stream}")
        return found

    def _event(self, event: int) -> _Event:
        found = self.host.events.get(event)
        if found is None:
            raise CudaFault(f"invalid resource handle: there is no event {event}")
        return found

    def _check(self) -> None:
        if self.dead:
            raise CudaFault("the process is dead")
        if self.host.failed is not None:
            raise self.host.failed
