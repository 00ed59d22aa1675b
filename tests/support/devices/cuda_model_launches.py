"""Kernels and graphs of a modelled process: modules, launches in the order of streams, capture and replay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from support.devices.cuda_model_timing import takes, takes_copy
from zbmd.transport.cuda.api import (
    CudaFault,
    DeviceBytes,
    DeviceKernels,
    Dim3,
    KernelArgument,
    ModuleImage,
)
from zbmd.transport.cuda.tiles import DeviceTiles, TileLayout

Bytes = NDArray[np.uint8]
KernelValue: TypeAlias = "Bytes | TiledValue | np.number[Any] | None"
Operation: TypeAlias = Callable[[dict[int, int]], None]


@dataclass(frozen=True, slots=True)
class TiledValue:
    """A matrix that a kernel reads by a tensor map: its bytes, and the map."""

    data: Bytes
    layout: TileLayout


@dataclass(frozen=True, slots=True)
class ModelKernel:
    """A kernel of a module, by its name."""

    image: ModuleImage
    name: str
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class ModelLaunch:
    """A launch whose turn has come. written: which arguments the kernel may write."""

    kernel: ModelKernel
    grid: Dim3
    block: Dim3
    shared_bytes: int
    arguments: list[KernelValue]
    written: list[bool]


class RunKernel(Protocol):
    """Runs a launch on the bytes of its arguments, in place; equal memory is one array."""

    def __call__(self, launch: ModelLaunch, /) -> None:
        """Run it. Raises `CudaFault` as the device would."""


def refuse_kernels(launch: ModelLaunch, /) -> None:
    """Run nothing: the model was made without kernels."""
    raise CudaFault(f"this model was made without kernels, and is to run {launch.kernel.name}")


_INVALIDATED: Final = "operation failed due to a previous error during capture"


@dataclass(slots=True)
class _Capture:
    """A recording of one thread's requests to a stream."""

    thread: int
    operations: list[Operation] = field(default_factory=list[Operation])
    is_valid: bool = True


class Launches:
    """Methods of a `ModelProcess`."""

    host: Any
    device: int
    default_stream: int
    _ask: Any
    _check: Any
    _stream: Any
    _source: Any
    _target: Any

    def driver_version(self) -> int:
        """See `CudaApi`."""
        return int(self.host.driver)

    def memory_info(self) -> tuple[int, int]:
        """See `CudaApi`."""
        mine = [each for each in self.host.allocations.values() if each.device == self.device]
        used = sum(each.data.nbytes for each in mine if not each.freed)
        return max(0, self.host.memory_bytes - used), self.host.memory_bytes

    def load_module(self, image: ModuleImage) -> int:
        """See `CudaApi`."""
        with self.host.lock:
            self._check()
            self.require_no_capture()
            number: int = self.host.serial()
            self._modules[number] = image
            return number

    def get_function(self, module: int, name: str, shared_bytes: int) -> int:
        """See `CudaApi`."""
        with self.host.lock:
            number: int = self.host.serial()
            self._functions[number] = ModelKernel(self._modules[module], name, shared_bytes)
            return number

    def launch_function(
        self,
        function: int,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        arguments: Sequence[KernelArgument],
        stream: int,
    ) -> None:
        """See `CudaApi`."""
        with self.host.lock:
            kernel, given = self._functions[function], tuple(arguments)
            if shared_bytes > kernel.shared_bytes:
                raise CudaFault(f"invalid value: {kernel.name} with {shared_bytes} bytes of shared memory")
            if min(*grid, *block) < 1:
                raise CudaFault(f"invalid configuration: {kernel.name} on a grid {grid} of {block}")

            def run(clock: dict[int, int]) -> None:
                seen = dict[tuple[int, int], Bytes]()
                values: list[KernelValue] = []
                for each in given:
                    if isinstance(each, DeviceTiles):
                        data = self._source(each.address, each.layout.nbytes, clock)
                        values.append(TiledValue(data, each.layout))
                        continue
                    if not isinstance(each, DeviceBytes):
                        values.append(each)
                        continue
                    reach = self._target if each.written else self._source
                    found = reach(each.address, each.nbytes, clock)
                    values.append(seen.setdefault((each.address, each.nbytes), found))
                written = [isinstance(each, DeviceBytes) and each.written for each in given]
                self.host.run_kernel(ModelLaunch(kernel, grid, block, shared_bytes, values, written))
                takes(clock, self.host.kernel_ns(kernel.name))

            self._ask(stream, run)

    def memset_async(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """See `CudaApi`."""
        with self.host.lock:

            def run(clock: dict[int, int]) -> None:
                self._target(address, nbytes, clock)[:] = value
                takes_copy(clock, nbytes)

            self._ask(stream, run)

    # -- graphs ------------------------------------------------------------------------------------------

    def stream_begin_capture(self, stream: int) -> None:
        """See `CudaApi`. Mode: of the thread that begins."""
        with self.host.lock:
            self._check()
            self._stream(stream)
            if stream == self.default_stream:
                raise CudaFault("operation not permitted: the legacy stream cannot be captured")
            if stream in self._captures:
                raise CudaFault("operation not permitted: the stream is captured already")
            self._captures[stream] = _Capture(threading.get_ident())

    def stream_end_capture(self, stream: int) -> int:
        """See `CudaApi`."""
        with self.host.lock:
            found = self._captures.get(stream)
            if found is None:
                raise CudaFault("operation not permitted: the stream is not captured")
            if found.thread != threading.get_ident():
                raise CudaFault("a capture was not ended by the thread that began it")
            del self._captures[stream]
            if not found.is_valid:
                raise CudaFault(_INVALIDATED)
            number: int = self.host.serial()
            self._graphs[number] = found.operations
            return number

    def graph_launch(self, graph: int, stream: int) -> None:
        """See `CudaApi`: operations run with the line of the stream that they are launched on."""
        with self.host.lock:
            for each in self._graph(graph):
                self._ask(stream, each)

    def graph_destroy(self, graph: int) -> None:
        """See `CudaApi`."""
        with self.host.lock:
            self._graph(graph)
            del self._graphs[graph]

    def _graph(self, graph: int) -> list[Operation]:
        found = self._graphs.get(graph)
        if found is None:
            raise CudaFault(f"invalid resource handle: there is no graph {graph}")
        return found

    def is_captured(self, stream: int) -> bool:
        """Return whether what is asked of the stream is recorded."""
        return stream in self._captures

    def captured(self, stream: int, run: Operation) -> bool:
        """Return whether the stream is captured; `run` is then recorded."""
        found = self._captures.get(stream)
        if found is None:
            return False
        if not found.is_valid:
            raise CudaFault(_INVALIDATED)
        found.operations.append(run)
        return True

    def waits_in_capture(self, stream: int, *, captured: bool) -> bool:
        """Return whether a stream waits for an event of its own capture, which orders nothing more.

        Raises `CudaFault` for an event of another capture, or of none; streams cannot join a capture here.
        """
        found = self._captures.get(stream)
        if found is not None and not captured:
            found.is_valid = False
            raise CudaFault("dependency created on uncaptured work in another stream")
        if found is None and captured:
            raise CudaFault("a stream would join a capture, which the model does not cover")
        return found is not None

    def require_no_capture(self, stream: int | None = None, *, of_event: bool = False) -> None:
        """Raise `CudaFault` for a call that a capture of this thread, or of `stream`, does not permit.

        That invalidates the capture. of_event: the call is about an event that was recorded in a capture.
        """
        mine = threading.get_ident()
        broken = [one for at, one in self._captures.items() if one.thread == mine or at == stream]
        for one in broken:
            one.is_valid = False
        if broken:
            raise CudaFault("operation not permitted when a stream is capturing")
        if of_event:
            raise CudaFault("operation not permitted on an event last recorded in a capturing stream")

    @property
    def _modules(self) -> dict[int, ModuleImage]:
        return self.__dict__.setdefault("_all_modules", {})

    @property
    def _functions(self) -> dict[int, ModelKernel]:
        return self.__dict__.setdefault("_all_functions", {})

    @property
    def _captures(self) -> dict[int, _Capture]:
        return self.__dict__.setdefault("_all_captures", {})

    @property
    def _graphs(self) -> dict[int, list[Operation]]:
        return self.__dict__.setdefault("_all_graphs", {})

    # -- the kernels of device arrays --------------------------------------------------------------------

    def launch(
        self,
        kernels: DeviceKernels,
        name: str,
        threads: int,
        arguments: Sequence[DeviceBytes | int],
        stream: int,
    ) -> None:
        """See `CudaApi`."""
        with self.host.lock:
            if self.host.load_kernel is None:
                raise CudaFault("this model was made without kernels")
            kernel = self.host.load_kernel(kernels, name)
            given = tuple(arguments)

            def run(clock: dict[int, int]) -> None:
                kept: list[Bytes] = []
                numbers: list[int] = []
                for each in given:
                    if isinstance(each, DeviceBytes) and each.nbytes:
                        reach = self._target if each.written else self._source
                        kept.append(reach(each.address, each.nbytes, clock))
                        numbers.append(kept[-1].ctypes.data)
                    else:
                        numbers.append(0 if isinstance(each, DeviceBytes) else each)
                kernel(*numbers)
                takes(clock, self.host.kernel_ns(name))

            self._ask(stream, run)
