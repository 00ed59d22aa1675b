"""The interface to CUDA: calls by the runtime's own names, of one process and one device.

`zbmd.transport.cuda.runtime.CudaRuntime` makes them with cupy; `tests/support/devices/cuda_model.py` is a
model of devices with streams, events and memory that holds their order against what the code above relies on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from zbmd.transport.cuda.tiles import DeviceTiles
from zbmd.transport.errors import ZbmdError

# What a device and its driver can do, and which way bytes go between two of them (pure).
#
# CUDA's IPC works between processes of one host under Linux proper: not under WSL, and not between instances
# of a divided GPU (MIG). See NVIDIA's CUDA C++ Programming Guide, "Interprocess Communication", and its MIG
# User Guide, "CUDA IPC".

UUID_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Of one GPU, as the process sees it that computes on it."""

    index: int
    uuid: bytes
    name: str
    memory_bytes: int
    pci: str
    """Its PCI address, such as 0000:3b:00.0."""
    unified_addressing: bool
    ipc_events: bool
    """Whether events of it can be opened by other processes."""
    dma_buf: bool
    """Whether its memory can be handed to a network card as a dma-buf."""
    wsl: bool = False
    compute_capability: tuple[int, int] = (0, 0)
    """Of the device, such as (9, 0); (0, 0) if it is not known."""

    @property
    def divided(self) -> bool:
        """Whether it is an instance of a divided GPU."""
        return " MIG " in f"{self.name} "


class CopyRoute(Enum):
    """Name the route of a copy from one device to another."""

    SAME_DEVICE = "same device"
    PEER = "peer access"
    """Over NVLink or PCIe, from device to device."""
    THROUGH_HOST = "opened, copied through the host"
    """By CUDA itself, of memory that is opened: the devices do not reach each other."""
    STAGED = "staged"
    """Through page-locked memory and the host's own regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRouteChoice:
    """The decision and its reason."""

    route: CopyRoute
    reason: str


def why_no_ipc(device: DeviceFacts) -> str:
    """Why no other process can open the device's memory; empty if it can."""
    if device.wsl:
        return "under WSL memory of a GPU cannot be opened by another process"
    if device.divided:
        return f"{device.name} is an instance of a divided GPU (MIG)"
    if not device.unified_addressing:
        return f"{device.name} has no unified addressing"
    if not device.ipc_events:
        return f"{device.name} has no events between processes"
    return ""


def choose_copy_route(
    ours: DeviceFacts, theirs: DeviceFacts, *, same_host: bool, visible: bool, can_access_peer: bool
) -> CopyRouteChoice:
    """Choose the route of copies from our device to a peer's, with the reason.

    visible: the peer's device is visible to this process. can_access_peer: as CUDA reports for the two.
    """
    if not same_host:
        return CopyRouteChoice(route=CopyRoute.STAGED, reason="the peer is on another host")
    why = why_no_ipc(ours) or why_no_ipc(theirs)
    if why:
        return CopyRouteChoice(route=CopyRoute.STAGED, reason=why)
    if ours.uuid == theirs.uuid:
        return CopyRouteChoice(
            route=CopyRoute.SAME_DEVICE, reason=f"both compute on {ours.name} at {ours.pci}"
        )
    if not visible:
        return CopyRouteChoice(
            route=CopyRoute.STAGED,
            reason=f"the peer's {theirs.name} at {theirs.pci} is hidden by CUDA_VISIBLE_DEVICES",
        )
    if can_access_peer:
        return CopyRouteChoice(route=CopyRoute.PEER, reason=f"{ours.pci} reaches {theirs.pci} by itself")
    return CopyRouteChoice(
        route=CopyRoute.THROUGH_HOST, reason=f"{ours.pci} does not reach {theirs.pci} by itself"
    )


HANDLE_BYTES: Final = 64
"""Of a cudaIpcMemHandle_t and of a cudaIpcEventHandle_t."""


class CudaFault(ZbmdError):
    """A call of CUDA failed. Unless it is a `DeviceLost`, the context can still be used."""


class DeviceLost(CudaFault):
    """The device or this process's context failed, as by an ECC error: every later call fails alike.

    CUDA has no way back within the process: end it, and go on in a new one.
    """


class OutOfDeviceMemory(CudaFault):
    """The device has no memory left for an allocation; the context can still be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleImage:
    """A compiled source: machine code, which the driver loads, and the PTX that the code was made from."""

    name: str
    ptx: str
    cubin: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKernels:
    """C source of kernels whose arguments are all 64 bits wide, and what NVRTC is to compile it with."""

    source: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """An argument of a kernel: device memory that it reads, or writes (and may read)."""

    address: int
    nbytes: int
    written: bool = False


KernelArgument: TypeAlias = "DeviceBytes | DeviceTiles | np.number[Any] | None"
"""Memory, a matrix by its tensor map, a number of the parameter's type, or None for a null pointer."""

Dim3: TypeAlias = tuple[int, int, int]


class CudaApi(Protocol):
    """CUDA as one process sees it, bound to one device. Addresses, streams and events are its integers.

    Safe for any thread; each call makes the device current for the thread that calls. What blocks does so
    without the GIL. Each raises `CudaFault`.
    """

    @property
    def device(self) -> int:
        """Its index among those that are visible to this process."""
        ...

    def facts(self) -> DeviceFacts:
        """Return the properties of this device that decide how its memory is reached."""
        ...

    def driver_version(self) -> int:
        """cudaDriverGetVersion: the newest CUDA that the driver supports, such as 13000."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """cudaMemGetInfo: bytes that are free on the device, and all of them."""
        ...

    def device_of(self, uuid: bytes) -> int | None:
        """Return the index of the device with that UUID (16 bytes), or None if it is not visible here."""
        ...

    def can_access_peer(self, peer: int) -> bool:
        """Whether this device reads and writes the memory of device `peer` by itself."""
        ...

    def malloc(self, nbytes: int) -> int:
        """cudaMalloc: memory that other processes can open. Raises `OutOfDeviceMemory`."""
        ...

    def free(self, address: int) -> None:
        """cudaFree."""
        ...

    def address_range(self, address: int) -> tuple[int, int]:
        """cuMemGetAddressRange: where the allocation begins that `address` is in, and its bytes."""
        ...

    def ipc_get_mem_handle(self, base: int) -> bytes:
        """cudaIpcGetMemHandle of an allocation, by its first byte."""
        ...

    def ipc_open_mem_handle(self, handle: bytes, device: int) -> int:
        """cudaIpcOpenMemHandle, on device `device`: the address here of another process's allocation."""
        ...

    def ipc_close_mem_handle(self, address: int) -> None:
        """cudaIpcCloseMemHandle. Nothing may be under way on that memory."""
        ...

    def ipc_get_event_handle(self, event: int) -> bytes:
        """cudaIpcGetEventHandle of an event that was created for other processes."""
        ...

    def ipc_open_event_handle(self, handle: bytes) -> int:
        """cudaIpcOpenEventHandle."""
        ...

    def event_create(self, *, interprocess: bool = False, timed: bool = False) -> int:
        """Create an event. interprocess: other processes can open it. timed: `event_elapsed_ns` takes it; not
        both.
        """
        ...

    def event_elapsed_ns(self, begin: int, end: int) -> int:
        """cudaEventElapsedTime: from one timed event to a later one, once both are done."""
        ...

    def event_record(self, event: int, stream: int) -> None:
        """Record the event behind everything queued on `stream` so far."""
        ...

    def event_query(self, event: int) -> bool:
        """Whether what it stands for is done."""
        ...

    def event_synchronize(self, event: int) -> None:
        """Wait until what it stands for is done."""
        ...

    def event_destroy(self, event: int) -> None:
        """Destroy an event, our own or an opened one."""
        ...

    def stream_create(self) -> int:
        """Create a stream that does not synchronize with the default stream."""
        ...

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Make `stream` wait for `event` before it runs what is queued from now on."""
        ...

    def waits_for_values(self) -> bool:
        """Whether streams of the device can wait for numbers in memory (`stream_wait_value`)."""
        ...

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        """cuStreamWaitValue32: make `stream` wait until the 32-bit number at `address` is `value` or greater.

        The number lies in page-locked memory of the host; it is compared modulo 2**32. CUDA knows nothing of
        this order: until the number is there, no call that waits for the whole device comes back.
        """
        ...

    def stream_synchronize(self, stream: int) -> None:
        """Wait until all that was asked of it is done."""
        ...

    def stream_destroy(self, stream: int) -> None:
        """Once it is idle."""
        ...

    def memcpy_async(self, into: int, src: int, nbytes: int, stream: int) -> None:
        """Between any two addresses, of the host or of a device, which CUDA tells apart."""
        ...

    def memset_async(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """cudaMemsetAsync: set bytes of device memory."""
        ...

    def memcpy_peer_async(
        self, into: int, into_device: int, src: int, src_device: int, nbytes: int, stream: int
    ) -> None:
        """Between two devices."""
        ...

    def host_alloc(self, nbytes: int) -> memoryview:
        """cudaHostAlloc: page-locked memory of the host, writable, until `host_free`."""
        ...

    def host_free(self, memory: memoryview) -> None:
        """cudaFreeHost; the view is of no more use."""
        ...

    def host_register(self, address: int, nbytes: int) -> None:
        """cudaHostRegister: lock whole pages of the host's memory, so that the device copies by itself."""
        ...

    def host_unregister(self, address: int) -> None:
        """cudaHostUnregister, of what was registered at that address."""
        ...

    def new_array(self, shape: tuple[int, ...], typestr: str) -> Any:
        """Return a new cupy array on this device, with undefined contents."""
        ...

    def launch(
        self,
        kernels: DeviceKernels,
        name: str,
        threads: int,
        arguments: Sequence[DeviceBytes | int],
        stream: int,
    ) -> None:
        """Ask `stream` for a kernel over so many elements; it goes over them in strides of its grid."""
        ...

    def load_module(self, image: ModuleImage) -> int:
        """cuModuleLoadData: load machine code; it stays until the process ends."""
        ...

    def get_function(self, module: int, name: str, shared_bytes: int) -> int:
        """cuModuleGetFunction: a kernel, which is to be launched with so much dynamic shared memory at
        most."""
        ...

    def launch_function(
        self,
        function: int,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        arguments: Sequence[KernelArgument],
        stream: int,
    ) -> None:
        """cuLaunchKernel. shared_bytes: of dynamic shared memory."""
        ...

    def stream_begin_capture(self, stream: int) -> None:
        """cudaStreamBeginCapture: what is asked of the stream from now on is recorded, and does not run."""
        ...

    def stream_end_capture(self, stream: int) -> int:
        """cudaStreamEndCapture and cudaGraphInstantiate: return what was recorded as a graph to launch."""
        ...

    def graph_launch(self, graph: int, stream: int) -> None:
        """cudaGraphLaunch: ask the stream for everything in the graph, with the addresses recorded."""
        ...

    def graph_destroy(self, graph: int) -> None:
        """cudaGraphExecDestroy, of a graph that does not run."""
        ...

    def dmabuf(self, address: int, nbytes: int) -> int:
        """cuMemGetHandleForAddressRange: a dma-buf of whole pages; the caller closes its descriptor."""
        ...
