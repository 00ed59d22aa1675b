"""The one seam through which callers' arrays come in: numpy, DLPack, the buffer protocol, arrays of devices.

An array that is not C-contiguous is packed before an operation, and unpacked after it.
"""

from __future__ import annotations

from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.device.arrays import CallersArray, DeviceArray, taken
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import address_of

Array: TypeAlias = NDArray[Any]
Placed: TypeAlias = Array | DeviceArray
"""An array, wherever it lies."""
PlacedT = TypeVar("PlacedT", bound=Placed)


def as_placed(x: Any, name: str) -> Placed:
    """As `as_array`; an array of a device (the CUDA array interface) stays where it lies."""
    if isinstance(x, np.ndarray):
        return x
    x = taken(x)
    return x.operand() if isinstance(x, CallersArray) else as_array(x, name)


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


def address(x: Placed) -> int:
    """Of the first byte."""
    return x.address if isinstance(x, DeviceArray) else address_of(x)


def packed(x: PlacedT) -> PlacedT:
    """The elements in C order, flat: a view if `x` is contiguous, else a copy."""
    flat: Placed
    if not isinstance(x, DeviceArray):
        flat = np.ascontiguousarray(x).reshape(-1)
    elif x.strided is None:
        flat = x.flat()
    else:
        x.strided.copy(inwards=True)
        flat = x.strided.packed.flat()
    return cast("PlacedT", flat)


def as_bytes(flat: PlacedT, name: str) -> PlacedT:
    """A flat array's bytes. Raises `UserError` if its dtype holds Python objects."""
    if isinstance(flat, DeviceArray):
        return cast("PlacedT", flat.as_bytes())
    if flat.dtype.hasobject:
        raise UserError(f"{name} has dtype {flat.dtype}, which holds Python objects")
    return cast("PlacedT", flat.view(np.uint8))


class Target(Generic[PlacedT]):
    """An array that an operation writes: `flat` takes the result, `bring_home` copies it from there."""

    __slots__ = ("_home", "flat")

    def __init__(self, x: PlacedT, name: str, *, load: bool = False) -> None:
        """`load`: the operation reads it too. Raises `UserError` if `x` is not writeable."""
        require_writeable(x, name)
        in_place = x.strided is None if isinstance(x, DeviceArray) else x.flags.c_contiguous
        self._home: Placed | None = None if in_place else x
        flat: Placed
        if in_place or load:
            flat = packed(x)
        elif isinstance(x, DeviceArray) and x.strided is not None:
            flat = x.strided.packed.flat()
        else:
            flat = np.empty(x.size, x.dtype)
        self.flat: PlacedT = cast("PlacedT", flat)

    def bring_home(self) -> None:
        """Write the result to where it belongs, unless it is there."""
        home, flat = self._home, self.flat
        if isinstance(home, DeviceArray) and home.strided is not None:
            home.strided.copy(inwards=False)
        elif isinstance(home, np.ndarray) and isinstance(flat, np.ndarray):
            home[...] = flat.reshape(home.shape)


def require_writeable(x: Placed, name: str) -> None:
    """Raise `UserError` if `x` is read-only."""
    if not (x.writeable if isinstance(x, DeviceArray) else x.flags.writeable):
        raise UserError(f"{name} is read-only; pass an array that can be written")


def require_size(x: PlacedT, dtype: np.dtype[Any], size: int, name: str) -> PlacedT:
    """`x` itself. Raises `UserError` unless it has `size` elements of `dtype`."""
    if x.dtype != dtype or x.size != size:
        raise UserError(f"{name} must have {size} elements of {dtype}, not {x.size} of {x.dtype}")
    return x


def is_block(part: Placed, whole: Placed, begin: int) -> bool:
    """Whether flat `part` lies exactly at element `begin` of flat `whole`."""
    return part.size > 0 and address(part) == address(whole) + begin * part.itemsize


def require_apart(a: Placed, b: Placed) -> None:
    """Raise `UserError` if the arrays, which are flat if they are a device's, overlap."""
    if isinstance(a, DeviceArray) and isinstance(b, DeviceArray):
        overlap = a.address < b.address + b.nbytes and b.address < a.address + a.nbytes
    elif isinstance(a, DeviceArray) or isinstance(b, DeviceArray):
        overlap = False
    else:
        overlap = np.may_share_memory(a, b)
    if overlap:
        raise UserError("input and output overlap; operate in place, or on arrays that are apart")
