"""CUDA by cupy: each method is a call of `cupy.cuda.runtime`, and of libcuda where cupy has none.

cupy is imported when the first is made. Written against cupy 13.3 to 14, and run on an H100 with
cupy-cuda13x 14.2. `tests/transport/cuda/cupy_calls.txt` records what is called, with its source.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.cuda.api import (
    CudaApi,
    CudaFault,
    DeviceBytes,
    DeviceFacts,
    DeviceKernels,
    DeviceLost,
    Dim3,
    KernelArgument,
    ModuleImage,
    OutOfDeviceMemory,
)
from zbmd.transport.cuda.tiles import MAP_BYTES, SWIZZLES, DeviceTiles
from zbmd.transport.errors import UserError

_SUCCESS: Final = 0
_NOT_READY: Final = 600
"""cudaErrorNotReady, which cupy's eventQuery returns."""
_BLOCKING_SYNC: Final = 1
"""cudaEventBlockingSync: who waits sleeps."""
_IPC_EVENT_SUPPORT: Final = 125
"""cudaDevAttrIpcEventSupport."""
_DMA_BUF_SUPPORTED: Final = 124
"""CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, which the runtime's attributes leave out."""
_CAN_USE_STREAM_MEM_OPS: Final = 122
"""CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: that of the second version, which needs no setting."""
_WAIT_VALUE_GEQ: Final = 0
"""CU_STREAM_WAIT_VALUE_GEQ."""
_VALUE: Final = (1 << 32) - 1
_WORD: Final = (1 << 64) - 1
_DMA_BUF_FD: Final = 1
"""CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD."""
_MAX_DYNAMIC_SHARED: Final = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
_SHARED_BYTES_DEFAULT: Final = 48 * 1024
"""Dynamic shared memory that a kernel may have without asking."""
_MEMORY_ALLOCATION: Final = 2
"""cudaErrorMemoryAllocation."""
_LOST: Final = frozenset({46, 214, 220, 226, 700, 702, *range(709, 713), *range(714, 722)})
"""Statuses after which nothing works in this process, of CUDA's runtime and driver alike: the device is not
available, uncorrectable ECC and NVLink errors, contained memory errors, illegal addresses and instructions,
a timeout or a failure of a launch, a context that is destroyed, an assertion."""
_BLOCK_THREADS: Final = 256
_BLOCKS_MAX: Final = 2048
"""Enough to fill any device; kernels go on in strides of the grid."""
ResultT = TypeVar("ResultT")


@cache
def _runtime() -> ModuleType:
    try:
        runtime: ModuleType = importlib.import_module("cupy").cuda.runtime
    except ImportError as error:
        raise UserError(
            'device memory needs cupy, which is not installed here: pip install "zbmd[gpu]".'
        ) from error
    return runtime


@cache
def _libcuda() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaFault(f"NVIDIA's driver is not installed: {error}") from error


@cache
def runtime_of_device(device: int) -> CudaRuntime:
    """The one of this process for that device. Raises as `CudaRuntime`."""
    return CudaRuntime(device)


def runtime_at(address: int) -> CudaApi:
    """The one of the device whose memory lies at that address. Raises `UserError`, `CudaFault`."""
    runtime = _runtime()
    try:
        device = int(runtime.pointerGetAttributes(address).device)
    except runtime.CUDARuntimeError as error:
        raise CudaFault(f"pointerGetAttributes of {address:#x}: {error}") from error
    return runtime_of_device(device)


@cache
def _module(source: str, options: tuple[str, ...]) -> Any:
    """Compiled by cupy, which keeps what it compiled on disk and loads it once a device."""
    return importlib.import_module("cupy").RawModule(code=source, options=options)


def visible_devices() -> int:
    """Return the number of devices. Raises `UserError` without cupy, or with a missing or too old driver."""
    runtime = _runtime()
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise UserError(f"no GPU can be used ({error}): check the driver with nvidia-smi") from error


def fault_of(status: int) -> type[CudaFault]:
    """Return the error of a status, cudaError_t or CUresult."""
    if status == _MEMORY_ALLOCATION:
        return OutOfDeviceMemory
    return DeviceLost if status in _LOST else CudaFault


class CudaRuntime:
    """See `zbmd.transport.cuda.api.CudaApi`: the GPU of index `device`."""

    def __init__(self, device: int) -> None:
        """Raises `UserError` without cupy or such a device."""
        count = visible_devices()
        if not 0 <= device < count:
            raise UserError(f"there is no GPU {device}: {count} are visible.")
        self._runtime: Any = _runtime()
        self.device = device
        """See `CudaApi`."""
        self._devices = count
        self._facts: DeviceFacts | None = None
        self._threads = threading.local()

    def _call(self, name: str, *arguments: Any) -> Any:
        """A call of the runtime's, with our device made current for this thread."""
        runtime = self._runtime
        try:
            runtime.setDevice(self.device)
            return getattr(runtime, name)(*arguments)
        except runtime.CUDARuntimeError as error:
            raise fault_of(getattr(error, "status", 0))(f"{name} on GPU {self.device}: {error}") from error

    def _driver_call(self, name: str, *arguments: Any) -> None:
        """A call of the driver's, in our device's context."""
        if getattr(self._threads, "has_context", False):
            self._runtime.setDevice(self.device)
        else:
            self._call("free", 0)  # makes the context, as CUDA's own libraries do
            self._threads.has_context = True
        status = int(getattr(_libcuda(), name)(*arguments))
        if status != _SUCCESS:
            raise fault_of(status)(f"{name} on GPU {self.device}: CUresult {status}")

    # -- devices -----------------------------------------------------------------------------------------

    def facts(self) -> DeviceFacts:
        """See `CudaApi`."""
        if self._facts is None:
            properties = self._call("getDeviceProperties", self.device)
            self._facts = DeviceFacts(
                index=self.device,
                uuid=bytes(properties["uuid"]),
                name=properties["name"].decode(errors="replace"),
                memory_bytes=int(properties["totalGlobalMem"]),
                pci=self._call("deviceGetPCIBusId", self.device).lower(),
                unified_addressing=bool(properties["unifiedAddressing"]),
                ipc_events=bool(self._call("deviceGetAttribute", _IPC_EVENT_SUPPORT, self.device)),
                dma_buf=self._has(_DMA_BUF_SUPPORTED),
                wsl=_under_wsl(),
                compute_capability=(int(properties["major"]), int(properties["minor"])),
            )
        return self._facts

    def driver_version(self) -> int:
        """See `CudaApi`."""
        return int(self._call("driverGetVersion"))

    def memory_info(self) -> tuple[int, int]:
        """See `CudaApi`."""
        free, total = self._call("memGetInfo")
        return int(free), int(total)

    def _has(self, attribute: int) -> bool:
        """Whether the device has what an attribute of the driver's says."""
        value = ctypes.c_int(0)
        try:
            self._driver_call(
                "cuDeviceGetAttribute", ctypes.byref(value), attribute, ctypes.c_int(self.device)
            )
        except CudaFault:  # an older driver knows no such attribute
            return False
        return bool(value.value)

    def device_of(self, uuid: bytes) -> int | None:
        """See `CudaApi`."""
        if self.facts().uuid == uuid:
            return self.device
        for index in range(self._devices):
            if bytes(self._call("getDeviceProperties", index)["uuid"]) == uuid:
                return index
        return None

    def can_access_peer(self, peer: int) -> bool:
        """See `CudaApi`."""
        return bool(self._call("deviceCanAccessPeer", self.device, peer))

    # -- memory ------------------------------------------------------------------------------------------

    def malloc(self, nbytes: int) -> int:
        """See `CudaApi`."""
        return int(self._call("malloc", nbytes))

    def free(self, address: int) -> None:
        """See `CudaApi`."""
        self._call("free", address)

    def address_range(self, address: int) -> tuple[int, int]:
        """See `CudaApi`."""
        base, nbytes = ctypes.c_uint64(0), ctypes.c_size_t(0)
        self._driver_call(
            "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address)
        )
        return base.value, nbytes.value

    def ipc_get_mem_handle(self, base: int) -> bytes:
        """See `CudaApi`."""
        return bytes(self._call("ipcGetMemHandle", base))

    def ipc_open_mem_handle(self, handle: bytes, device: int) -> int:
        """See `CudaApi`."""
        return int(
            self._on(
                device,
                lambda: self._runtime.ipcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess),
            )
        )

    def ipc_close_mem_handle(self, address: int) -> None:
        """See `CudaApi`."""
        self._call("ipcCloseMemHandle", address)

    def _on(self, device: int, call: Callable[[], ResultT]) -> ResultT:
        """Make `device` current for one call."""
        runtime = self._runtime
        try:
            runtime.setDevice(device)
            try:
                return call()
            finally:
                runtime.setDevice(self.device)
        except runtime.CUDARuntimeError as error:
            raise CudaFault(f"on GPU {device}: {error}") from error

    def host_alloc(self, nbytes: int) -> memoryview:
        """See `CudaApi`."""
        address = int(self._call("hostAlloc", nbytes, self._runtime.hostAllocPortable))
        return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")

    def host_free(self, memory: memoryview) -> None:
        """See `CudaApi`."""
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(memory))
        self._call("freeHost", address)

    def host_register(self, address: int, nbytes: int) -> None:
        """See `CudaApi`."""
        self._call("hostRegister", address, nbytes, self._runtime.hostAllocPortable)

    def host_unregister(self, address: int) -> None:
        """See `CudaApi`."""
        self._call("hostUnregister", address)

    def new_array(self, shape: tuple[int, ...], typestr: str) -> Any:
        """See `CudaApi`. Raises `UserError` if this cupy has no such dtype."""
        cupy = importlib.import_module("cupy")
        dtype = importlib.import_module("ml_dtypes").bfloat16 if typestr == "<V2" else typestr
        try:
            with cupy.cuda.Device(self.device):
                return cupy.empty(shape, dtype)
        except (TypeError, ValueError) as error:
            raise UserError(f"this cupy makes no array of type {typestr}: pass `out` ({error}).") from error
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise CudaFault(f"GPU {self.device}: {error}") from error

    # -- kernels -----------------------------------------------------------------------------------------

    def launch(
        self,
        kernels: DeviceKernels,
        name: str,
        threads: int,
        arguments: Sequence[DeviceBytes | int],
        stream: int,
    ) -> None:
        """See `CudaApi`."""
        cupy, runtime = importlib.import_module("cupy"), self._runtime
        given = tuple(
            np.uint64(each.address if isinstance(each, DeviceBytes) else each & _WORD) for each in arguments
        )
        blocks = min(_BLOCKS_MAX, max(1, -(-threads // _BLOCK_THREADS)))
        try:
            with cupy.cuda.Device(self.device), cupy.cuda.ExternalStream(stream, self.device):
                kernel = _module(kernels.source, kernels.options).get_function(name)
                kernel((blocks,), (_BLOCK_THREADS,), given)
        except (runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            raise CudaFault(f"kernel {name} on GPU {self.device}: {error}") from error
        except cupy.cuda.compiler.CompileException as error:
            raise CudaFault(f"kernel {name} was not compiled: {error}") from error

    def load_module(self, image: ModuleImage) -> int:
        """See `CudaApi`."""
        module = ctypes.c_void_p()
        self._driver_call("cuModuleLoadData", ctypes.byref(module), image.cubin)
        return module.value or 0

    def get_function(self, module: int, name: str, shared_bytes: int) -> int:
        """See `CudaApi`."""
        function = ctypes.c_void_p()
        self._driver_call(
            "cuModuleGetFunction", ctypes.byref(function), ctypes.c_void_p(module), name.encode()
        )
        if shared_bytes > _SHARED_BYTES_DEFAULT:
            self._driver_call(
                "cuFuncSetAttribute",
                function,
                ctypes.c_int(_MAX_DYNAMIC_SHARED),
                ctypes.c_int(shared_bytes),
            )
        return function.value or 0

    def launch_function(
        self,
        function: int,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        arguments: Sequence[KernelArgument],
        stream: int,
    ) -> None:
        """See `CudaApi`. The driver copies the arguments before it returns."""
        values = [_value_of(each) for each in arguments]
        places = (ctypes.c_void_p * len(values))(*(each.ctypes.data for each in values))
        sizes = [ctypes.c_uint(each) for each in (*grid, *block, shared_bytes)]
        self._driver_call(
            "cuLaunchKernel", ctypes.c_void_p(function), *sizes, ctypes.c_void_p(stream), places, None
        )

    def stream_begin_capture(self, stream: int) -> None:
        """See `CudaApi`."""
        self._call("streamBeginCapture", stream, self._runtime.streamCaptureModeThreadLocal)

    def stream_end_capture(self, stream: int) -> int:
        """See `CudaApi`."""
        graph = int(self._call("streamEndCapture", stream))
        try:
            return int(self._call("graphInstantiate", graph))
        finally:
            self._call("graphDestroy", graph)

    def graph_launch(self, graph: int, stream: int) -> None:
        """See `CudaApi`."""
        self._call("graphLaunch", graph, stream)

    def graph_destroy(self, graph: int) -> None:
        """See `CudaApi`."""
        self._call("graphExecDestroy", graph)

    def dmabuf(self, address: int, nbytes: int) -> int:
        """See `CudaApi`."""
        descriptor = ctypes.c_int(-1)
        self._driver_call(
            "cuMemGetHandleForAddressRange",
            ctypes.byref(descriptor),
            ctypes.c_uint64(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_int(_DMA_BUF_FD),
            ctypes.c_ulonglong(0),
        )
        return descriptor.value

    # -- streams and events ------------------------------------------------------------------------------

    def ipc_get_event_handle(self, event: int) -> bytes:
        """See `CudaApi`."""
        return bytes(self._call("ipcGetEventHandle", event))

    def ipc_open_event_handle(self, handle: bytes) -> int:
        """See `CudaApi`."""
        return int(self._call("ipcOpenEventHandle", handle))

    def event_create(self, *, interprocess: bool = False, timed: bool = False) -> int:
        """See `CudaApi`."""
        untimed = 0 if timed else self._runtime.eventDisableTiming
        flags = untimed | (self._runtime.eventInterprocess if interprocess else _BLOCKING_SYNC)
        return int(self._call("eventCreateWithFlags", flags))

    def event_elapsed_ns(self, begin: int, end: int) -> int:
        """See `CudaApi`. CUDA has the time in ms, as a float32, with a resolution near 500 ns."""
        elapsed_ms = float(self._call("eventElapsedTime", begin, end))
        return max(0, round(elapsed_ms * 1e6))

    def event_record(self, event: int, stream: int) -> None:
        """See `CudaApi`."""
        self._call("eventRecord", event, stream)

    def event_query(self, event: int) -> bool:
        """See `CudaApi`."""
        status = int(self._call("eventQuery", event))
        if status not in (_SUCCESS, _NOT_READY):
            raise CudaFault(f"eventQuery on GPU {self.device}: status {status}")
        return status == _SUCCESS

    def event_synchronize(self, event: int) -> None:
        """See `CudaApi`."""
        self._call("eventSynchronize", event)

    def event_destroy(self, event: int) -> None:
        """See `CudaApi`."""
        self._call("eventDestroy", event)

    def stream_create(self) -> int:
        """See `CudaApi`."""
        return int(self._call("streamCreateWithFlags", self._runtime.streamNonBlocking))

    def stream_wait_event(self, stream: int, event: int) -> None:
        """See `CudaApi`."""
        self._call("streamWaitEvent", stream, event)

    def waits_for_values(self) -> bool:
        """See `CudaApi`."""
        return self._has(_CAN_USE_STREAM_MEM_OPS)

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        """See `CudaApi`."""
        self._driver_call(
            "cuStreamWaitValue32_v2",
            ctypes.c_void_p(stream),
            ctypes.c_uint64(address),
            ctypes.c_uint32(value & _VALUE),
            ctypes.c_uint(_WAIT_VALUE_GEQ),
        )

    def stream_synchronize(self, stream: int) -> None:
        """See `CudaApi`."""
        self._call("streamSynchronize", stream)

    def stream_destroy(self, stream: int) -> None:
        """See `CudaApi`."""
        self._call("streamDestroy", stream)

    def memcpy_async(self, into: int, src: int, nbytes: int, stream: int) -> None:
        """See `CudaApi`."""
        self._call("memcpyAsync", into, src, nbytes, self._runtime.memcpyDefault, stream)

    def memset_async(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """See `CudaApi`."""
        self._call("memsetAsync", address, value, nbytes, stream)

    def memcpy_peer_async(
        self, into: int, into_device: int, src: int, src_device: int, nbytes: int, stream: int
    ) -> None:
        """See `CudaApi`."""
        self._call("memcpyPeerAsync", into, into_device, src, src_device, nbytes, stream)


def _value_of(argument: KernelArgument) -> NDArray[Any]:
    """Return an argument as memory of its parameter's size."""
    if argument is None:
        return np.zeros(1, np.uint64)
    if isinstance(argument, DeviceTiles):
        return encoded(argument)
    return np.array([argument.address if isinstance(argument, DeviceBytes) else argument])


_MAP_ALIGNMENT: Final = 64
_MAPS_MOST: Final = 4096
_ELEMENTS: Final = {"u8": 0, "bf16": 9, "f32": 7}
"""CUtensorMapDataType."""
_PROMOTE_TO_256_BYTES: Final = 3
"""CU_TENSOR_MAP_L2_PROMOTION_L2_256B."""


@lru_cache(_MAPS_MOST)
def encoded(tiles: DeviceTiles) -> NDArray[np.uint8]:
    """Return the tensor map by cuTensorMapEncodeTiled, which needs no context. Raises `CudaFault`."""
    layout, room = tiles.layout, np.zeros(MAP_BYTES + _MAP_ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _MAP_ALIGNMENT
    found = room[start : start + MAP_BYTES]
    extents, strides = (
        (ctypes.c_uint64 * 2)(layout.columns, layout.rows),
        (ctypes.c_uint64 * 1)(layout.row_bytes),
    )
    box, steps = (ctypes.c_uint32 * 2)(layout.box_columns, layout.box_rows), (ctypes.c_uint32 * 2)(1, 1)
    status = int(
        _libcuda().cuTensorMapEncodeTiled(
            ctypes.c_void_p(found.ctypes.data),
            _ELEMENTS[layout.element],
            ctypes.c_uint32(2),
            ctypes.c_void_p(tiles.address),
            *(extents, strides, box, steps),
            0,  # not interleaved
            SWIZZLES.index(layout.swizzle),
            _PROMOTE_TO_256_BYTES,
            0,  # zeros outside
        )
    )
    if status != _SUCCESS:
        raise CudaFault(f"cuTensorMapEncodeTiled of {layout}: CUresult {status}")
    return found


def _under_wsl(root: Path = Path("/")) -> bool:
    try:
        return "microsoft" in (root / "proc/version").read_text().lower()
    except OSError:
        return False
