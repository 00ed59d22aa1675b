"""The calls of `torch.cuda` that the backend needs, and what this process has of each device.

All else goes through `zbmd.transport.cuda`, by addresses and streams as numbers. A model of devices takes the
place of `TorchCuda` where tests run without one. Needs PyTorch.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import numpy as np

from zbmd.collectives.device.staged_calls import CallStream, Gates, PinnedSlots
from zbmd.collectives.torch.memory import arena
from zbmd.collectives.torch.tensors import TensorBuffer, number_type
from zbmd.transport.cuda.api import CudaApi
from zbmd.transport.cuda.runtime import runtime_of_device
from zbmd.transport.errors import UserError
from zbmd.transport.memory.arena import Arena

torch: Any = importlib.import_module("torch")

LOCAL_RANK: Final = "LOCAL_RANK"


class Devices(Protocol):
    """The devices of one kind, as PyTorch sees them. An index is PyTorch's, and CUDA's in this process."""

    kind: str
    """Of `torch.device.type`."""

    def why_none(self) -> str:
        """Why this process can use no device; empty if it can."""
        ...

    def count(self) -> int:
        """Return the number of devices that are visible."""
        ...

    def current(self) -> int:
        """Return the index of the current device of this thread."""
        ...

    def stream(self, index: int) -> int:
        """Return the current stream of this thread on a device."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is captured into a graph."""
        ...

    def on_stream(self, index: int, stream: int) -> AbstractContextManager[object]:
        """Meanwhile it is the current stream of this thread, on its device."""
        ...

    def address(self, tensor: Any) -> int:
        """Return where the first element of a tensor lies."""
        ...

    def of_futures(self, index: int) -> list[Any] | None:
        """Return the devices that a future of tensors there names, so that its callbacks have streams."""
        ...

    def api(self, index: int) -> CudaApi:
        """Return the CUDA of a device. Raises `UserError`, `CudaFault`."""
        ...


class TorchCuda:
    """See `Devices`: `torch.cuda`, and our driver by cupy."""

    kind = "cuda"

    def why_none(self) -> str:
        """See `Devices`."""
        if torch.version.cuda is None:
            return f"this PyTorch, {torch.__version__}, was built without CUDA: install a build with it"
        if not torch.cuda.is_available():
            return "PyTorch finds no GPU: check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
        return ""

    def count(self) -> int:
        """See `Devices`."""
        return int(torch.cuda.device_count())

    def current(self) -> int:
        """See `Devices`."""
        return int(torch.cuda.current_device())

    def stream(self, index: int) -> int:
        """See `Devices`."""
        return int(torch.cuda.current_stream(index).cuda_stream)

    def is_capturing(self) -> bool:
        """See `Devices`."""
        return bool(torch.cuda.is_current_stream_capturing())

    def on_stream(self, index: int, stream: int) -> AbstractContextManager[object]:
        """See `Devices`."""
        external: AbstractContextManager[object] = torch.cuda.stream(
            torch.cuda.ExternalStream(stream, device=index)
        )
        return external

    def address(self, tensor: Any) -> int:
        """See `Devices`."""
        return int(tensor.data_ptr())

    def of_futures(self, index: int) -> list[Any] | None:
        """See `Devices`."""
        return [torch.device(self.kind, index)]

    def api(self, index: int) -> CudaApi:
        """See `Devices`."""
        return runtime_of_device(index)


class DeviceState:
    """The page-locked memory, gates and streams of one device in this process, shared by all groups."""

    def __init__(self, index: int, api: CudaApi, memory: Arena | None) -> None:
        self.index, self.api, self.memory = index, api, memory
        self.slots, self.gates = PinnedSlots(api, memory), Gates(api)

    def new_stream(self) -> CallStream:
        """Return a stream for the copies of one group."""
        return CallStream(self.api, self.slots)


class DeviceSeam:
    """The devices that the backend uses, and the state of each in this process."""

    def __init__(self) -> None:
        self.devices: Devices = TorchCuda()
        self._usable: Devices | None = None
        """Those that were found to be usable."""
        self._states: dict[tuple[int, int], DeviceState] = {}
        self._lock = threading.Lock()

    def state(self, index: int) -> DeviceState:
        """Return the state of a device, made at the first call. Raises `UserError`, `CudaFault`."""
        memory, key = arena(), (os.getpid(), index)
        with self._lock:
            found = self._states.get(key)
            if found is None or (found.memory is not memory and memory is not None):
                found = self._states[key] = DeviceState(index, self.devices.api(index), memory)
            return found

    def require(self, tensor: Any) -> int:
        """Return the index of the device that a tensor is on. Raises `UserError` if it may not be there."""
        devices, where = self.devices, tensor.device
        if where.type != devices.kind:
            raise UserError(
                f"a tensor is on {where}: the backend zbmd takes those in host memory (.cpu()) and on "
                f"{devices.kind} devices"
            )
        why = "" if self._usable is devices else devices.why_none()
        if why:
            raise UserError(f"a tensor is on {where}, and {why}")
        self._usable = devices
        if devices.is_capturing():
            raise UserError(
                "an operation of the backend zbmd is called while a CUDA graph is captured, and needs the "
                "host: call it outside of the graph, or capture with cuda:nccl"
            )
        own, index = self.own_device(), int(where.index or 0)
        if index != own:
            raise UserError(
                f"a tensor is on {where}, and the device of this rank is {devices.kind}:{own} "
                f"({LOCAL_RANK}={os.environ.get(LOCAL_RANK, 'not set')}, {devices.count()} visible): call "
                f"torch.{devices.kind}.set_device() with the device that you mean before the first operation"
            )
        return index

    def own_device(self) -> int:
        """Return the index of this rank's device."""
        given, devices = os.environ.get(LOCAL_RANK, ""), self.devices
        return rank_device(int(given) if given.isdigit() else None, devices.count(), devices.current())


SEAM: Final = DeviceSeam()


def rank_device(local_rank: int | None, count: int, current: int) -> int:
    """Return the device of a rank: the one that its script has made current, else by its rank on the host.

    `torch.cuda.current_device()` is 0 until a script calls `set_device`; so a script that leaves it means the
    device of LOCAL_RANK, and one whose tensors are all on device 0 by oversight gets an error.
    """
    if current or local_rank is None or count < 1:
        return current
    return local_rank % count


class DeviceBuffer(TensorBuffer):
    """One tensor on a device: `array` stands for its size and dtype, until a call brings it to the host.

    See `TensorBuffer` for the arguments; `zbmd.collectives.device.staged_calls.Operand` for what a call does.
    """

    __slots__ = ("address", "dtype", "index", "loads", "size", "stores")

    def __init__(self, tensor: Any, *, numbers: bool = False, load: bool = True, factor: Any = None) -> None:
        self.index = SEAM.require(tensor)
        self.require_dense(tensor)
        flat = self.take(tensor, numbers, load, factor)
        self._flat = flat  # also where the tensor itself is written: it must not go before the call
        self.size, self.dtype = number_type(flat, numbers)
        self.address = SEAM.devices.address(flat) if self.size else 0
        self.loads, self.stores = load, False
        self.leave()
        self.note_plain(factor)

    def leave(self) -> None:
        """See `Operand`."""
        self.array = np.broadcast_to(np.zeros(1, self.dtype), (self.size,))

    def bring_home(self) -> None:
        """Do nothing: `ask_home` does, on the stream of the call."""

    def ask_home(self) -> None:
        """Ask the current stream to copy the elements to the tensor, unless they share memory."""
        super().bring_home()


def buffer_of(
    tensor: Any, *, numbers: bool = False, load: bool = True, factor: Any = None
) -> TensorBuffer | DeviceBuffer:
    """Return the buffer of a tensor, on the host or on a device. Raises `UserError`."""
    kind = TensorBuffer if tensor.is_cpu else DeviceBuffer
    return kind(tensor, numbers=numbers, load=load, factor=factor)


def devices_of(buffers: Sequence[TensorBuffer]) -> tuple[DeviceBuffer, ...]:
    """Return the buffers of a call if they are on a device, none if all are on the host.

    Raises `UserError` if some are on a device and others are not.
    """
    there = tuple(buffer for buffer in buffers if isinstance(buffer, DeviceBuffer))
    if there and len(there) != len(buffers):
        raise UserError(
            f"one call has tensors in host memory and on {SEAM.devices.kind}:{there[0].index}: give all of "
            "its tensors on one device"
        )
    return there
