"""Devices on which an operator computes: host memory, or another array module such as cupy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Protocol, TypeVar

import numpy as np

from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array, to_host, xp_for
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.model.gpt import Operator
from zbmd.transport.errors import UserError, ZbmdError

CHECK_ELEMENTS = 1 << 20


class CudaDevice:
    """A GPU, by its index among the visible ones: see `zbmd.actors.process_pool.devices.Device`. Untested on
    hardware.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._xp: ModuleType | None = None

    def bind(self) -> None:
        """Make it the current device of this process. Raises `UserError` without cupy or such a GPU."""
        xp = xp_for("cuda")
        count = int(xp.cuda.runtime.getDeviceCount())
        if self._index >= count:
            raise UserError(f"GPU {self._index} does not exist: {count} GPUs are visible.")
        xp.cuda.Device(self._index).use()
        self._xp = xp

    def check(self) -> str:
        """Compute a sum on it; return what is wrong, or ""."""
        assert self._xp is not None, "bind comes first"
        xp = self._xp
        try:  # cupy's CUDA errors share no importable base class
            with xp.cuda.Device(self._index):
                found = int(xp.arange(CHECK_ELEMENTS, dtype=xp.int64).sum())
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        wanted = CHECK_ELEMENTS * (CHECK_ELEMENTS - 1) // 2
        return "" if found == wanted else f"GPU {self._index} computed {found} instead of {wanted}"


R = TypeVar("R")

CHECK_EXTENT = 64
"""Rows and columns of the matrices of a check."""


class DeviceFault(ZbmdError):
    """A device computes wrongly: its operators are moved, and it is not used again."""


class OperatorDevice(Protocol):
    """A device on which operators compute."""

    name: str
    """The name in logs and in `DescribeSlot`."""

    def check(self) -> str:
        """Compute something on it; return what is wrong, or "". May take a while; called on a thread."""
        ...

    def kernel(self, op: Operator) -> Operator:
        """Return `op`, computed on this device, for arrays in the model's memory. It raises `DeviceFault`."""
        ...


class HostDevice:
    """The device in whose memory the model's arrays lie: ops take them without a copy."""

    def __init__(self, name: str = "cpu") -> None:
        self.name = name

    def check(self) -> str:
        """See `OperatorDevice`."""
        return check_product(np)

    def kernel(self, op: Operator) -> Operator:
        """See `OperatorDevice`."""
        return op


class ModuleDevice:
    """Another array module, such as cupy: inputs are copied to it, results and gradients back.

    numpy gives the bits of `HostDevice`; another module may sum in another order. `bound`: entered around
    everything that is computed on it. `faults`: what the module raises if the device fails; raised as
    `DeviceFault`.
    """

    def __init__(
        self,
        name: str,
        xp: ModuleType,
        *,
        bound: Callable[[], AbstractContextManager[object]] = nullcontext,
        faults: tuple[type[Exception], ...] = (),
    ) -> None:
        self.name = name
        self._xp = xp
        self._bound = bound
        self._faults = faults

    def check(self) -> str:
        """See `OperatorDevice`."""
        try:  # cupy's CUDA errors share no importable base class
            with self._bound():
                return check_product(self._xp)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"

    def kernel(self, op: Operator) -> Operator:
        """See `OperatorDevice`."""

        def there(tape: Tape, *arguments: object, **options: object) -> Tensor:
            return self._run(lambda: self._carried(op, tape, arguments, options))

        return there

    def _run(self, work: Callable[[], R]) -> R:
        try:
            with self._bound():
                return work()
        except self._faults as error:
            raise DeviceFault(f"{self.name}: {type(error).__name__}: {error}") from error

    def _carried(
        self, op: Operator, tape: Tape, arguments: tuple[object, ...], options: dict[str, object]
    ) -> Tensor:
        freight = _Freight(self._xp, recording=tape.recording)
        inner = Tape(self._xp, recording=tape.recording)
        with spans.TRANSFER:
            carried = [freight.there(value) for value in arguments]
            named = {name: freight.there(value) for name, value in options.items()}
        y = op(inner, *carried, **named)

        def backward(dy: Array) -> None:
            with spans.TRANSFER:
                slope = self._run(lambda: self._xp.asarray(dy))
            self._run(lambda: inner.play(y, slope))
            with spans.TRANSFER:
                freight.back()

        with spans.TRANSFER:
            there = to_host(y.data)
        return tape.record(there, backward, *(outer for outer, _ in freight.parameters))


class _Freight:
    """The arrays that one call has copied to another module, and whose gradients are to be copied back."""

    def __init__(self, xp: ModuleType, *, recording: bool) -> None:
        self._xp = xp
        self._recording = recording
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self.parameters: list[tuple[Parameter, Parameter]] = []

    def there(self, value: object) -> object:
        """Return `value` in the form that an op of that module takes."""
        if isinstance(value, Tensor):
            tensor = Tensor(self._xp.asarray(value.data))
            self.tensors.append((value, tensor))
            return tensor
        if isinstance(value, Parameter):
            data = self._xp.asarray(value.data)
            grad = self._xp.empty_like(data) if self._recording else None
            parameter = Parameter(data, grad, value.index, None)
            self.parameters.append((value, parameter))
            return parameter
        return self._xp.asarray(value) if isinstance(value, np.ndarray) else value

    def back(self) -> None:
        """Pass the gradients on."""
        for outer, inner in self.tensors:
            if inner.grad is not None:
                outer.accumulate(to_host(inner.grad))
        for parameter, carried in self.parameters:
            assert carried.grad is not None, "gradients are copied back only if the tape records"
            parameter.receive(partial(np.copyto, src=to_host(carried.grad)))


def cuda_device(index: int) -> ModuleDevice:
    """Return the GPU with that index. Raises `UserError` without cupy or such a GPU. Untested on hardware."""
    xp = xp_for("cuda")
    CudaDevice(index).bind()
    faults = (
        xp.cuda.runtime.CUDARuntimeError,
        xp.cuda.driver.CUDADriverError,
        xp.cuda.memory.OutOfMemoryError,
    )
    return ModuleDevice(f"cuda:{index}", xp, bound=lambda: xp.cuda.Device(index), faults=faults)


def check_product(xp: ModuleType) -> str:
    """Multiply two matrices of small integers; return what is wrong with the result, or ""."""
    rows = np.arange(CHECK_EXTENT * CHECK_EXTENT, dtype=np.float32).reshape(CHECK_EXTENT, CHECK_EXTENT) % 7
    found = to_host(xp.matmul(xp.asarray(rows), xp.asarray(rows)))
    wrong = int((found != np.einsum("ik,kj->ij", rows, rows)).sum())
    return f"{wrong} of {found.size} elements of a product are wrong" if wrong else ""
