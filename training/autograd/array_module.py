"""The array-module seam: the same code computes with numpy here and with cupy on a GPU.

Everything above takes `xp`, the array module, as a value. Only functions that both modules have are called
on it, with the same meaning (`matmul`, `einsum`, `exp`, ufuncs with `out=`, basic and integer indexing).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from zbmd.training.native import _kernels
from zbmd.transport.errors import UserError


def has_kernels(xp: ModuleType, *arrays: Array) -> bool:
    """Return whether `zbmd.training.native._kernels` computes on `arrays`, of the array module `xp`."""
    return xp is np and _kernels.fits(*arrays)


def as_indices(indices: Array) -> npt.NDArray[np.int64]:
    """Return integers of any dtype in the form that the kernels take."""
    return np.ascontiguousarray(indices, dtype=np.int64)


# A float array of the module in use. cupy ships no types; its arrays have the same interface.
Array: TypeAlias = npt.NDArray[Any]


def xp_for(device: str) -> ModuleType:
    """Return the array module for `device`: numpy for "cpu", cupy for "cuda" (on its current device).

    Raises `UserError` for another name, if cupy is missing, and if it finds no GPU.
    """
    if device == "cpu":
        return np
    if device != "cuda":
        raise UserError(f'unknown device "{device}": use "cpu" or "cuda".')
    try:  # cupy's CUDA errors share no importable base class, hence `Exception` below
        cupy = importlib.import_module("cupy")
        count = int(cupy.cuda.runtime.getDeviceCount())
    except ImportError as error:
        raise UserError(
            'device "cuda" needs cupy, which is not installed here: pip install "zbmd[gpu]".'
        ) from error
    except Exception as error:
        raise UserError(
            f'device "cuda" cannot be used ({error}): check the driver with nvidia-smi, or use device "cpu".'
        ) from error
    if count == 0:
        raise UserError('device "cuda" was asked for but no GPU is visible: use device "cpu".')
    return cupy


def nccl() -> ModuleType | None:
    """Return cupy's binding of NCCL, for comparisons, or None if it is not installed."""
    try:
        module = importlib.import_module("cupy.cuda.nccl")
    except ImportError:
        return None
    return module if module.available else None


def is_narrow(array: Array) -> bool:
    """Return whether `array` holds 16-bit floats, which are stored but not computed with."""
    return array.dtype.itemsize == 2


def widened(array: Array) -> Array:
    """Return `array` as float32 if it holds 16-bit floats (a copy), otherwise `array` itself."""
    wide: Array = array.astype(np.float32) if is_narrow(array) else array
    return wide


def bfloat16() -> np.dtype[Any]:
    """Return the dtype. Raises `UserError` if ml_dtypes is missing."""
    try:
        found: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        return found
    except ImportError as error:
        raise UserError("bfloat16 needs ml_dtypes: pip install 'zbmd[bfloat16]'.") from error


def computing_dtype(stored: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of computations, masters and moments if weights are stored as `stored`."""
    return np.dtype(np.float32) if stored.itemsize == 2 else stored


def room_like(array: Array) -> Array:
    """Return an array like `array` to compute in: float32 for 16-bit floats; its contents are undefined."""
    room = getattr(array, "room", None)  # a device's own arrays
    if room is not None:
        made: Array = room(computing_dtype(array.dtype))
        return made
    return widened(array) if is_narrow(array) else array.copy()


def is_on_host(array: Array) -> bool:
    """Return whether `array` is numpy's."""
    return isinstance(array, np.ndarray)


def maker_of(array: Array) -> Callable[..., Array]:
    """Return what makes arrays of a shape and dtype, not initialised, where `array` lies."""
    made: Callable[..., Array] = np.empty if is_on_host(array) else cast(Any, array).executor.empty
    return made


def to_host(array: Array) -> npt.NDArray[Any]:
    """Return `array` in host memory: itself if it is a numpy array, otherwise a copy."""
    download = getattr(array, "get", None)  # cupy's; numpy arrays have none
    host: npt.NDArray[Any] = array if download is None else download()
    return host
