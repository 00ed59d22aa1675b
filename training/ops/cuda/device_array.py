"""Arrays in device memory, with as much of numpy's interface as the tape, the layouts and reductions use.

An array is contiguous; slices along the first axis and reshapes are views. What computes launches a kernel.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt


class ArrayExecutor(Protocol):
    """The part of an executor that arrays use; see `zbmd.training.ops.cuda.executor.Executor`."""

    @property
    def stream(self) -> int:
        """The stream that computes."""
        ...

    def empty(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> DeviceArray:
        """Return a new array with undefined contents."""
        ...

    def clear(self, array: DeviceArray) -> None:
        """Set all bytes to zero."""
        ...

    def upload(self, host: npt.NDArray[Any], into: DeviceArray | None = None) -> DeviceArray:
        """Copy from the host."""
        ...

    def download(self, array: DeviceArray, into: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Copy to the host."""
        ...

    @property
    def copy(self) -> Callable[[DeviceArray, DeviceArray], None]:
        """Copy on the device, into the first from the second."""
        ...

    @property
    def each(self) -> Callable[..., None]:
        """Launch a kernel over elements."""
        ...

    @property
    def launch(self) -> Callable[..., None]:
        """Launch a kernel with a grid."""
        ...


@dataclass(frozen=True, slots=True)
class Flags:
    """As numpy's: every array is contiguous; memory is owned by the executor."""

    c_contiguous: bool = True
    owndata: bool = False


FLAGS: Final = Flags()
SQUARES_BLOCK: Final = 16_384
"""Elements of a block of the kernel `block_squares`."""


class Pool:
    """Memory that no array uses, by size. heir: gets what comes back after this one was closed."""

    __slots__ = ("free", "heir")

    def __init__(self) -> None:
        self.free: dict[int, list[int]] = defaultdict(list)
        self.heir: Pool | None = None

    def take(self, nbytes: int) -> int | None:
        """Return the address of memory of this size, None if there is none."""
        try:
            return self.free[nbytes].pop()
        except IndexError:
            return None

    def close(self, into: Pool) -> None:
        """Hand all memory to `into`, also what comes back later."""
        self.heir = into
        for nbytes, addresses in self.free.items():
            into.free[nbytes] += addresses
            addresses.clear()


class Block:
    """Memory that returns to the pool when no array uses it any more."""

    __slots__ = ("address", "nbytes", "pool")

    def __init__(self, pool: Pool, nbytes: int, address: int) -> None:
        self.pool, self.nbytes, self.address = pool, nbytes, address

    def __del__(self) -> None:
        (self.pool.heir or self.pool).free[self.nbytes].append(self.address)


class DeviceArray:
    """A contiguous array of a device. base: keeps its memory."""

    __slots__ = ("address", "base", "dtype", "executor", "shape", "size")

    def __init__(
        self,
        executor: ArrayExecutor,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        base: Block,
    ) -> None:
        self.executor, self.address, self.shape, self.dtype, self.base = executor, address, shape, dtype, base
        self.size = math.prod(shape)

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def flags(self) -> Flags:
        """See `Flags`."""
        return FLAGS

    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes, by axis."""
        return tuple(
            math.prod(self.shape[axis + 1 :]) * self.dtype.itemsize for axis in range(len(self.shape))
        )

    @property
    def kind(self) -> str:
        """The ending of the names of its kernels: f32 or bf16."""
        return "bf16" if self.dtype.itemsize == 2 else "f32"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | int) -> DeviceArray:
        if isinstance(rows, int):
            return self[rows : rows + 1].reshape(self.shape[1:])
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise IndexError(f"{rows}: views of device arrays are runs along the first axis")
        each = math.prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(0, stop - start), *self.shape[1:])
        return DeviceArray(self.executor, self.address + start * each, shape, self.dtype, self.base)

    def __setitem__(self, rows: slice | EllipsisType, value: object) -> None:
        target = self if isinstance(rows, EllipsisType) else self[rows]
        if isinstance(value, DeviceArray):
            self.executor.copy(target, value)
        elif isinstance(value, np.ndarray):
            self.executor.upload(value, target)
        elif value == 0:
            self.executor.clear(target)
        else:
            self.executor.upload(np.full(target.shape, value, target.dtype), target)

    def __iadd__(self, other: DeviceArray) -> DeviceArray:
        if other.dtype != self.dtype:
            other = other.astype(self.dtype)
        self.executor.each(f"add_{self.kind}", self.size, Out(self), self, other, np.uint64(self.size))
        return self

    def reshape(self, *shape: Any) -> DeviceArray:
        """Return a view of another shape; one extent may be -1."""
        extents = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        if -1 in extents:
            rest = math.prod(extent for extent in extents if extent != -1)
            extents = tuple(self.size // rest if extent == -1 else extent for extent in extents)
        if math.prod(extents) != self.size:
            raise ValueError(f"cannot reshape an array of shape {self.shape} into {extents}")
        return DeviceArray(self.executor, self.address, extents, self.dtype, self.base)

    def copy(self) -> DeviceArray:
        """Return a new array with the same contents."""
        made = self.executor.empty(self.shape, self.dtype)
        self.executor.copy(made, self)
        return made

    def astype(self, dtype: npt.DTypeLike) -> DeviceArray:
        """Return a new array of another float dtype, rounded to nearest."""
        made = self.executor.empty(self.shape, dtype)
        self.executor.copy(made, self)
        return made

    def room(self, dtype: npt.DTypeLike) -> DeviceArray:
        """Return a new array of the same shape with undefined contents."""
        return self.executor.empty(self.shape, dtype)

    def block_squares(self) -> npt.NDArray[np.float32]:
        """Return the sums of squares of blocks of `SQUARES_BLOCK` elements; waits for the device."""
        blocks = -(-self.size // SQUARES_BLOCK)
        squares = self.executor.empty(blocks, np.float32)
        self.executor.launch(f"block_squares_{self.kind}", blocks, Out(squares), self, np.uint64(self.size))
        return squares.get()

    def get(self) -> npt.NDArray[Any]:
        """Return a copy in host memory, after what the device was asked for so far."""
        return self.executor.download(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array itself, to whoever speaks the interface; ordered by the stream that computes."""
        return {
            "shape": self.shape,
            "typestr": "<V2" if self.dtype.itemsize == 2 else self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": self.executor.stream,
        }


@dataclass(frozen=True, slots=True)
class Out:
    """An argument of a kernel that it writes, and may read."""

    array: DeviceArray
