"""The array module of a device: what a model, its tape and its stages call on `xp`, and the device's ops."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from zbmd.training.ops.cuda.device_array import DeviceArray
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.operators import CudaOperators


class DeviceModule(ModuleType):
    """The array module over one executor. Integers stay in host memory until an op uses them."""

    def __init__(self, executor: Executor) -> None:
        super().__init__("zbmd_device")
        self.executor = executor
        self.operators_of_device = CudaOperators(executor)
        self.arange: Callable[..., npt.NDArray[Any]] = np.arange
        self.tile: Callable[..., npt.NDArray[Any]] = np.tile
        self.empty: Callable[..., npt.NDArray[Any]] = np.empty
        self.zeros: Callable[..., npt.NDArray[Any]] = np.zeros
        """Of what is never computed with: the input of the first unit."""

    def asarray(self, values: Any, dtype: npt.DTypeLike | None = None) -> Any:
        """Return floats on the device, as float32 or bfloat16; integers in host memory."""
        if isinstance(values, DeviceArray):
            return values
        host = np.asarray(values, dtype)
        return self.executor.upload(host) if host.dtype.kind in "fV" else host

    @staticmethod
    def full_like(value: Any, fill: float) -> npt.NDArray[Any]:
        """Return the gradient of a scalar, in host memory."""
        assert value.shape == (), "the output of a pass on a device is its loss"
        return np.full((), fill, np.float32)

    @staticmethod
    def may_share_memory(one: Any, other: Any) -> bool:
        """Return whether two arrays lie in one allocation."""
        return one.base is other.base
