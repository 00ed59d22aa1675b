"""The one seam through which callers' arrays come in: numpy, DLPack, the buffer protocol, arrays of devices.

An array that is not C-contiguous is packed before an operation, and unpacked after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.device.arrays import CallersArray, DeviceArray, new_array, taken
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import address_of

Array: TypeAlias = NDArray[Any]
Placed: TypeAlias = Array | DeviceArray
"""An array, wherever it lies."""
PlacedT = TypeVar("PlacedT", bound=Placed)


def as_placed(x: Any, name: str) -> Placed:
    """As `as_array`; an array of a device (the CUDA array interface) stays where it lies."""
    if isinstance(x, np.ndarray | DeviceArray):
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


def require_blocks(x: PlacedT, size: int) -> PlacedT:
    """`x` itself. Raises `UserError` unless its first extent is the group's size."""
    if x.ndim == 0 or x.shape[0] != size:
        raise UserError(f"x has shape {x.shape}; its first extent must be the group's size, {size}")
    return x


def new_output(x: Any, shape_of: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
    """A new array for the result of a plain `x`; None for any other.

    It is made before the fast path is asked, which takes calls whose arrays are all there.
    """
    return np.empty(shape_of(x.shape), x.dtype) if type(x) is np.ndarray else None


def output(out: Any, shape: tuple[int, ...], like: Placed) -> tuple[Any, Target[Any]]:
    """What the caller gets back, and the array to write: `out`, or, if it is None, a new one of `shape` with
    the dtype of `like`, where that lies.
    """
    dtype, size = like.dtype, int(np.prod(shape, dtype=np.int64))
    if out is not None:
        return out, Target(require_size(as_placed(out, "out"), dtype, size, "out"), "out")
    if isinstance(like, DeviceArray):
        made = new_array(like, shape, dtype)
        return made.given, Target(made.operand(), "out")
    result = np.empty(shape, dtype)
    return result, Target(result, "out")


def reduced_arrays(given: Placed, out: Any) -> tuple[Placed, Target[Any]]:
    """Return the array that a reduction reads and the one it writes: `out`, or, if that is None, in place."""
    if out is None:
        target = Target(given, "x", load=True)
        return target.flat, target
    target = Target(require_size(as_placed(out, "out"), given.dtype, given.size, "out"), "out")
    source = packed(given)
    require_apart(source, target.flat)
    return source, target


def own_block(given: Placed, target: Target[Any], place: int) -> Placed:
    """The bytes of an input that may be block `place` of the output, and else must be apart from it."""
    source, flat = as_bytes(packed(given), "x"), as_bytes(target.flat, "out")
    if not is_block(source, flat, place * source.size):
        require_apart(source, flat)
    return source
