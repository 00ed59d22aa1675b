"""The state of a loop whose models are on a GPU: which of it reaches the host, and when.

A rank votes once its device has done all that the step has asked for, and none of it has failed. Copies of a
committed state are made on a stream of their own, beside the next forward and backward pass. Imports nothing
of CUDA before a tensor is on a device. Needs PyTorch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from zbmd.collectives.torch.continuity import CONTINUITY
from zbmd.collectives.torch.cuda.devices import SEAM
from zbmd.training.autograd.array_module import Array
from zbmd.training.ops.cuda.executor import Downloads

torch: Any = importlib.import_module("torch")


def own_device() -> Any:
    """Return the device of this rank, as PyTorch names it."""
    return torch.device(SEAM.devices.kind, SEAM.own_device())


def address_of(tensor: Any) -> int:
    """Return where the first element of a dense tensor lies, on the host or on a device."""
    return int(tensor.data_ptr()) if tensor.is_cpu else SEAM.devices.address(tensor)


class LoopDevice:
    """The device of a loop: all that is not in host memory is there. Used by the thread that trains.

    `copy` is for one thread at a time, and that may be another one.
    """

    def __init__(self, index: int) -> None:
        self._index, self._api = index, SEAM.state(index).api
        self._downloads: Downloads | None = None

    @classmethod
    def of(cls, tensors: Iterable[Any]) -> LoopDevice | None:
        """Return that of these tensors; None if all are in host memory.

        Raises `UserError` for one on a device that is not this rank's.
        """
        found = {SEAM.require(tensor) for tensor in tensors if not tensor.is_cpu}
        return cls(found.pop()) if found else None

    def settle(self) -> None:
        """Return once the device has done what the current stream was asked for.

        Raises the error of an operation for which that stream, and so nobody, has waited, the loss for which
        communicators of another backend were aborted, and `CudaFault`.
        """
        self._api.stream_synchronize(SEAM.devices.stream(self._index))
        for group in CONTINUITY.groups:
            group.device_calls.raise_failure()
            if group.companions is not None:
                group.companions.require_whole()

    def follow(self) -> None:
        """Let copies from now on be of what tensors are once the current stream has got here."""
        if self._downloads is None:
            self._downloads = Downloads(self._api)
        self._downloads.follow(SEAM.devices.stream(self._index))

    def copy(self, tensor: Any, into: Array) -> None:
        """Copy a contiguous tensor to bytes of the host, after `follow`. Nothing may write it meanwhile."""
        assert self._downloads is not None, "copies follow the stream that computes"
        self._downloads.copy_from(address_of(tensor), into)
