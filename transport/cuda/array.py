"""Arrays in device memory, whoever made them: the CUDA array interface, version 3, as numba specifies it.

cupy, torch, numba and jax speak it, so nothing here imports any of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from zbmd.transport.cuda.handle import DIMENSIONS_MAX, ITEM_BYTES
from zbmd.transport.errors import LocalProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpan:
    """An array. stream: what its last work was asked of; None if it may be used at once.

    strides: in bytes, by dimension; None: it is C-contiguous.
    """

    address: int
    shape: tuple[int, ...]
    typestr: str
    strides: tuple[int, ...] | None = None
    stream: int | None = None
    readonly: bool = False

    @property
    def nbytes(self) -> int:
        """Of all its elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.typestr]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array itself, to whoever speaks the interface."""
        return {
            "shape": self.shape,
            "typestr": self.typestr,
            "data": (self.address, self.readonly),
            "strides": self.strides,
            "version": 3,
            "stream": self.stream,
        }


def is_device_array(array: object) -> TypeGuard[Any]:
    """Whether it lies in device memory, and says so."""
    return hasattr(array, "__cuda_array_interface__")


def span_of(array: object) -> DeviceSpan:
    """Where the array lies. Raises `LocalProtocolError` if it is not C-contiguous, or of no dtype of use."""
    span = strided_span_of(array)
    if span.strides is not None:
        raise LocalProtocolError(f"a device array of shape {span.shape} is not C-contiguous")
    return span


def strided_span_of(array: object) -> DeviceSpan:
    """Where the elements of any array lie. Raises `LocalProtocolError` if it is of no dtype of use."""
    given = cast("dict[str, Any]", getattr(array, "__cuda_array_interface__", None) or {})
    try:
        shape = tuple(int(extent) for extent in given["shape"])
        typestr, (address, readonly) = str(given["typestr"]), given["data"]
        told, stream = given.get("strides"), given.get("stream")
        strides = None if told is None else tuple(int(step) for step in told)
    except (KeyError, TypeError, ValueError) as error:
        raise LocalProtocolError(
            f"a {type(array).__name__} is no array in device memory: {error!r}"
        ) from None
    if typestr not in ITEM_BYTES or len(shape) > DIMENSIONS_MAX or min(shape, default=0) < 0:
        raise LocalProtocolError(f"a device array of shape {shape} and type {typestr!r} cannot be moved")
    if given.get("mask") is not None:
        raise LocalProtocolError("a device array with a mask cannot be moved")
    if strides is not None and len(strides) != len(shape):
        raise LocalProtocolError(f"a device array of shape {shape} has the strides {strides}")
    if strides is not None and (0 in shape or _contiguous(shape, strides, ITEM_BYTES[typestr])):
        strides = None
    return DeviceSpan(
        address=int(address or 0),
        shape=shape,
        typestr=typestr,
        strides=strides,
        stream=None if stream is None else int(stream),
        readonly=bool(readonly),
    )


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> bool:
    step = item_bytes
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True
