"""The one seam through which callers' arrays come in: numpy, DLPack, the buffer protocol.

An array that is not C-contiguous is packed before an operation, and unpacked after it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zbmd.transport._native import address_of
from zbmd.transport.errors import UserError

Array: TypeAlias = NDArray[Any]


def as_array(x: Any, name: str) -> Array:
    """`x` as a numpy array over the same memory.

    Takes numpy arrays, whatever speaks DLPack on the host (torch, jax, cupyx.empty_pinned), and the buffer
    protocol (`bytes`, `array.array`, `memoryview`). Raises `UserError` for anything else.
    """
    if isinstance(x, np.ndarray):
        return x
    try:
        if hasattr(x, "__dlpack__"):
            return np.from_dlpack(x)
        return np.asarray(memoryview(x))
    except (TypeError, BufferError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{name} is a {type(x).__name__}, which gives no array in host memory: {error}. "
            "Pass a numpy array, or an object with DLPack or the buffer protocol"
        ) from None


def packed(x: Array) -> Array:
    """The elements in C order, flat: a view if `x` is contiguous, else a copy."""
    return np.ascontiguousarray(x).reshape(-1)


def as_bytes(flat: Array, name: str) -> Array:
    """A flat array's bytes. Raises `UserError` if its dtype holds Python objects."""
    if flat.dtype.hasobject:
        raise UserError(f"{name} has dtype {flat.dtype}, which holds Python objects")
    return flat.view(np.uint8)


class Target:
    """An array that an operation writes: `flat` takes the result, `bring_home` copies it from there."""

    __slots__ = ("_home", "flat")

    def __init__(self, x: Array, name: str, *, load: bool = False) -> None:
        """`load`: the operation reads it too. Raises `UserError` if `x` is not writeable."""
        if not x.flags.writeable:
            raise UserError(f"{name} is read-only; pass an array that can be written")
        self._home = None if x.flags.c_contiguous else x
        if self._home is None:
            self.flat = x.reshape(-1)
        else:
            self.flat = packed(x) if load else np.empty(x.size, x.dtype)

    def bring_home(self) -> None:
        """Write the result to where it belongs, unless it is there."""
        if self._home is not None:
            self._home[...] = self.flat.reshape(self._home.shape)


def require_size(x: Array, dtype: np.dtype[Any], size: int, name: str) -> Array:
    """`x` itself. Raises `UserError` unless it has `size` elements of `dtype`."""
    if x.dtype != dtype or x.size != size:
        raise UserError(f"{name} must have {size} elements of {dtype}, not {x.size} of {x.dtype}")
    return x


def is_block(part: Array, whole: Array, begin: int) -> bool:
    """Whether flat `part` lies exactly at element `begin` of flat `whole`."""
    return part.size > 0 and address_of(part) == address_of(whole) + begin * part.itemsize


def require_apart(a: Array, b: Array) -> None:
    """Raise `UserError` if the arrays overlap."""
    if np.may_share_memory(a, b):
        raise UserError("input and output overlap; operate in place, or on arrays that are apart")
