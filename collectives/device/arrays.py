"""Callers' arrays in device memory: cupy's, torch's, any with the CUDA array interface.

An array is taken as it is when an operation is called, on the thread that calls: cupy's arrays name the
stream that is current there. Work queued on that stream before the call comes before the operation.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.programs.reductions import dtype_named
from zbmd.transport.cuda.api import CudaApi, CudaFault, DeviceBytes, DeviceKernels
from zbmd.transport.cuda.array import DeviceSpan, is_device_array, strided_span_of
from zbmd.transport.cuda.runtime import runtime_at
from zbmd.transport.errors import LocalProtocolError, UserError

STRIDED_DIMENSIONS_MAX: Final = 8
"""Dimensions that `strided_copy` takes."""
# NVRTC compiles this on a GPU's machine, and any C compiler elsewhere, where a test runs it. Every argument
# is 64 bits wide, a pointer or a number.
_SOURCE: Final = r"""
#ifdef __CUDACC_RTC__
#define ZBMD_ENTRY(name, ...) extern "C" __global__ void name(__VA_ARGS__)
#define ZBMD_EACH(i, n) for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; \
                             i += (u64)gridDim.x * blockDim.x)
#else
#define ZBMD_ENTRY(name, ...) void name(__VA_ARGS__)
#define ZBMD_EACH(i, n) for (u64 i = 0; i < n; i++)
#endif
typedef unsigned char u8;
typedef unsigned long long u64;

/* Elements of `item` bytes between a flat array and one with strides, 8 dimensions, the last the fastest.
 * `inwards`: into the flat one. `at`: where the first element of the other lies in `strided`. */
ZBMD_ENTRY(zbmd_strided_copy, u8 *flat, u8 *strided, u64 n, u64 item, u64 inwards, u64 at,
           u64 e0, u64 e1, u64 e2, u64 e3, u64 e4, u64 e5, u64 e6, u64 e7,
           u64 s0, u64 s1, u64 s2, u64 s3, u64 s4, u64 s5, u64 s6, u64 s7) {
    u64 extents[8] = {e0, e1, e2, e3, e4, e5, e6, e7}, strides[8] = {s0, s1, s2, s3, s4, s5, s6, s7};
    ZBMD_EACH(i, n) {
        u64 left = i, place = at;
        for (int d = 7; d >= 0; d--) {
            place += left % extents[d] * strides[d];
            left /= extents[d];
        }
        u8 *into = inwards ? flat + i * item : strided + place;
        const u8 *from = inwards ? strided + place : flat + i * item;
        for (u64 k = 0; k < item; k++) into[k] = from[k];
    }
}
"""
KERNELS: Final = DeviceKernels(source=_SOURCE, options=("-std=c++17",))
STRIDED_COPY: Final = "zbmd_strided_copy"

_BFLOAT16: Final = "<V2"
_LEGACY_STREAM: Final = 1
"""cudaStreamLegacy, on which programs compute that name no stream."""
_STREAM_OF_THREAD: Final = 2
"""cudaStreamPerThread."""
Array: TypeAlias = NDArray[Any]
FindCuda = Callable[[int], CudaApi]
"""The CUDA of the device whose memory lies at an address."""


class CudaFinder:
    """Finds the CUDA of a device's memory in this process; a model of devices takes its place."""

    def __init__(self) -> None:
        self.find: FindCuda = runtime_at


CUDA: Final = CudaFinder()


class DeviceArray:
    """An array in device memory. `owner` keeps it alive; `stream` is what its work was asked of.

    strided: what packs its elements, if they do not lie one after the other at `address`.
    """

    __slots__ = ("address", "api", "dtype", "owner", "shape", "stream", "strided", "writeable")

    def __init__(
        self,
        api: CudaApi,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        owner: object,
        stream: int,
        writeable: bool = True,
        strided: Strided | None = None,
    ) -> None:
        self.strided = strided
        self.api = api
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.owner = owner
        self.stream = stream
        self.writeable = writeable

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return self.size * self.itemsize

    def flat(self) -> DeviceArray:
        """The same elements in one dimension."""
        return self._with(self.address, (self.size,), self.dtype)

    def reshape(self, rows: int, columns: int) -> DeviceArray:
        """The same elements in two dimensions. columns: -1 for what comes out."""
        columns = self.size // rows if columns < 0 else columns
        return self._with(self.address, (rows, columns), self.dtype)

    def as_bytes(self) -> DeviceArray:
        """The same memory as uint8, flat."""
        return self._with(self.address, (self.nbytes,), np.dtype(np.uint8))

    def part(self, begin: int, end: int) -> DeviceArray:
        """Elements begin..end of a flat array."""
        return self._with(self.address + begin * self.itemsize, (end - begin,), self.dtype)

    def _with(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        return DeviceArray(
            self.api,
            address,
            shape,
            dtype,
            owner=self.owner,
            stream=self.stream,
            writeable=self.writeable,
        )


class CallersArray:
    """An array that a caller passed, as it was then: `given`, and where its elements lie.

    It stands for `given` on the way to the data plane, whose thread has streams of its own.
    """

    __slots__ = ("given", "span")

    def __init__(self, given: object, stream: int | None = None) -> None:
        """stream: what its work was asked of, if not what it says itself. Raises `UserError`."""
        self.given = given
        try:
            span = strided_span_of(given)
        except LocalProtocolError as error:
            raise UserError(str(error)) from None
        self.span = replace(span, stream=stream or span.stream or _LEGACY_STREAM)
        if self.span.stream == _STREAM_OF_THREAD:
            raise UserError(
                "the default stream of a thread cannot be named on another: make the array on a stream of "
                "its own, or pass that as `stream`"
            )

    def operand(self) -> Array | DeviceArray:
        """Return the array to work on; one without elements lies nowhere, so it may be one of the host."""
        span, stream = self.span, self.span.stream
        assert stream is not None, "one was chosen"
        dtype = dtype_named("bfloat16") if span.typestr == _BFLOAT16 else np.dtype(span.typestr)
        if not span.nbytes:
            return np.empty(span.shape, dtype)
        api = CUDA.find(span.address)
        return DeviceArray(
            api,
            span.address,
            span.shape,
            dtype,
            owner=self.given,
            stream=stream,
            writeable=not span.readonly,
            strided=None if span.strides is None else Strided(api, span, dtype, stream),
        )


def new_array(like: DeviceArray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CallersArray:
    """A new array on the device of another, for a result. Raises `UserError`, `CudaFault`."""
    return CallersArray(like.api.new_array(shape, dtype.str))


class CallersArrays(list[Any]):
    """A list of arrays of which some lie on a device, as the caller passed it (`given`): each as `taken`."""

    def __init__(self, given: Sequence[Any], each: Sequence[Any]) -> None:
        super().__init__(each)
        self.given = given


_CALLERS: Final = frozenset((CallersArray, CallersArrays))
_TAKEN: Final = _CALLERS | {np.ndarray, int, type(None)}


def taken(x: Any, stream: Any = None) -> Any:
    """Return an argument of a call as it is now, for another thread.

    An array of a device becomes a `CallersArray`, a list or tuple with such arrays `CallersArrays`; anything
    else stays itself. stream: cupy's or torch's stream, or its address, on which the array was made; by
    default the one that it names. Raises `UserError`.
    """
    if type(x) in _TAKEN:
        return x
    if isinstance(x, list | tuple):
        each = [taken(one, stream) for one in x]
        return CallersArrays(x, each) if any(isinstance(one, CallersArray) for one in each) else x
    try:
        if not is_device_array(x):
            return x
    except RuntimeError as error:  # as torch says it of a tensor that takes part in autograd
        raise UserError(f"a {type(x).__name__} gives no array: {error}") from None
    return CallersArray(x, stream_address(stream))


def stream_address(stream: Any) -> int | None:
    """Of cupy's `Stream.ptr`, torch's `Stream.cuda_stream`, or a number. Raises `UserError`."""
    if stream is None or isinstance(stream, int):
        return stream
    for name in ("ptr", "cuda_stream"):
        found = getattr(stream, name, None)
        if isinstance(found, int):
            return found
    raise UserError(f"stream is a {type(stream).__name__}; pass cupy's or torch's stream, or its address")


def given_back(x: Any) -> Any:
    """Return the array that the caller passed, from the one that `taken` made of it."""
    return x.given if type(x) in _CALLERS else x


class DeviceBlock:
    """Memory of a device for packed elements, until nobody has it any more."""

    def __init__(self, api: CudaApi, nbytes: int) -> None:
        self._api = api
        self.address = api.malloc(max(1, nbytes))

    def __del__(self) -> None:
        if hasattr(self, "address"):
            with contextlib.suppress(CudaFault):  # a device that has failed keeps nothing
                self._api.free(self.address)  # waits for the device


class Strided:
    """A caller's array that is not C-contiguous, and its elements packed, in memory of their own.

    Both copies are asked of the stream that the array is used on, so they are in order with its other work.
    """

    __slots__ = ("_arguments", "_bytes", "packed")

    def __init__(self, api: CudaApi, span: DeviceSpan, dtype: np.dtype[Any], stream: int) -> None:
        extents, strides = _merged(span.shape, span.strides or ())
        if len(extents) > STRIDED_DIMENSIONS_MAX:
            raise UserError(
                f"a device array of {len(extents)} dimensions with strides cannot be packed: pass a "
                "contiguous one"
            )
        steps = [(extent - 1) * step for extent, step in zip(extents, strides, strict=True)]
        begin = sum(step for step in steps if step < 0)
        end = sum(step for step in steps if step > 0) + dtype.itemsize
        gap = STRIDED_DIMENSIONS_MAX - len(extents)
        self._bytes = (span.address + begin, end - begin)
        self._arguments = (-begin, *[1] * gap, *extents, *[0] * gap, *strides)
        nbytes = span.nbytes
        block = DeviceBlock(api, nbytes)
        self.packed = DeviceArray(api, block.address, span.shape, dtype, owner=(block, span), stream=stream)

    def copy(self, *, inwards: bool) -> None:
        """Ask for a copy into the packed elements, or out of them. Raises `CudaFault`."""
        packed = self.packed
        packed.api.launch(
            KERNELS,
            STRIDED_COPY,
            packed.size,
            (
                DeviceBytes(packed.address, packed.nbytes, inwards),
                DeviceBytes(*self._bytes, not inwards),
                packed.size,
                packed.itemsize,
                int(inwards),
                *self._arguments,
            ),
            packed.stream,
        )


def _merged(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The same elements in the same order, in as few dimensions as can be."""
    extents: list[int] = []
    steps: list[int] = []
    for extent, step in itertools.compress(
        zip(shape, strides, strict=True), (extent != 1 for extent in shape)
    ):
        if steps and steps[-1] == extent * step:
            extents[-1] *= extent
            steps[-1] = step
        else:
            extents.append(extent)
            steps.append(step)
    return extents, steps
