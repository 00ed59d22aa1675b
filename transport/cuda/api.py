"""What zbmd asks of CUDA: calls by the runtime's own names, of one process and one device.

`zbmd.transport.cuda.runtime.CudaRuntime` makes them with cupy; `zbmd.transport.sim.parts.cuda_model` is a
model of devices with streams, events and memory that holds their order against what the code above relies on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from zbmd.transport.cuda.facts import DeviceFacts
from zbmd.transport.errors import ZbmdError

HANDLE_BYTES: Final = 64
"""Of a cudaIpcMemHandle_t and of a cudaIpcEventHandle_t."""


class CudaFault(ZbmdError):
    """A call of CUDA failed. After most of these the process's context is of no more use: end the process."""


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
        """Of this device."""
        ...

    def device_of(self, uuid: bytes) -> int | None:
        """The index here of the device with that UUID (16 bytes); None if it is not visible."""
        ...

    def can_access_peer(self, peer: int) -> bool:
        """Whether this device reads and writes the memory of device `peer` by itself."""
        ...

    def malloc(self, nbytes: int) -> int:
        """cudaMalloc: memory that other processes can open."""
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

    def event_create(self, *, interprocess: bool = False) -> int:
        """An event without timing; `interprocess`: one that other processes can open."""
        ...

    def event_record(self, event: int, stream: int) -> None:
        """It stands for all that was asked of `stream` until now."""
        ...

    def event_query(self, event: int) -> bool:
        """Whether what it stands for is done."""
        ...

    def event_synchronize(self, event: int) -> None:
        """Wait until what it stands for is done."""
        ...

    def event_destroy(self, event: int) -> None:
        """Of our own or opened."""
        ...

    def stream_create(self) -> int:
        """One that does not wait for the default stream."""
        ...

    def stream_wait_event(self, stream: int, event: int) -> None:
        """What is asked of `stream` from now on begins behind what `event` stands for now."""
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
        """A new array of this device, as users have it: cupy's. Its contents are undefined."""
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

    def dmabuf(self, address: int, nbytes: int) -> int:
        """cuMemGetHandleForAddressRange: a dma-buf of whole pages; the caller closes its descriptor."""
        ...
