"""Arrays in device memory, whoever made them: the CUDA array interface, version 3, as numba specifies it.

cupy, torch, numba and jax speak it, so nothing here imports any of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeGuard, TypeVar, cast

import msgspec

from zbmd.transport.cuda.api import HANDLE_BYTES, UUID_BYTES
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle, require_owner

# Handles of device memory and of events, as they travel in messages. Sans-I/O; reads untrusted input.
#
# The process that opens one checks what can be checked: who it is from, and, once CUDA has opened the
# allocation, that the region lies in it. CUDA itself grants all or nothing: who has a handle can write all of
# the allocation.

MESSAGE_BYTES_MAX: Final = 1 << 10
DIMENSIONS_MAX: Final = 32
ITEM_BYTES: Final = {
    **{f"|{kind}1": 1 for kind in "biu"},
    **{f"<{kind}{size}": size for kind in "iu" for size in (2, 4, 8)},
    **{f"<f{size}": size for size in (2, 4, 8)},
    **{f"<c{size}": size for size in (8, 16)},
    "<V2": 2,
}
"""Type strings of the array interface that a region may have; <V2 stands for bfloat16."""

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]
OpaqueHandle = Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
DeviceUuid = Annotated[bytes, msgspec.Meta(min_length=UUID_BYTES, max_length=UUID_BYTES)]


class DeviceHandle(RegionHandle, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Locate an array in device memory. offset: bytes from the beginning of its allocation."""

    device: DeviceUuid
    memory: OpaqueHandle
    """The allocation's cudaIpcMemHandle_t."""
    typestr: Annotated[str, msgspec.Meta(max_length=8)] = "|u1"
    shape: _Shape = ()


class EventHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The event that a process records behind what it signals on a channel to one peer."""

    slot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    incarnation: Annotated[int, msgspec.Meta(gt=0)]
    channel: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    device: DeviceUuid
    event: OpaqueHandle
    """Its cudaIpcEventHandle_t."""


HandleT = TypeVar("HandleT", DeviceHandle, EventHandle)


def encode_handle(handle: DeviceHandle | EventHandle) -> bytes:
    """Return the handle as the bytes that are sent to a peer."""
    return msgspec.msgpack.encode(handle)


def decode_handle(data: bytes, kind: type[HandleT], *, slot: int, incarnation: int) -> HandleT:
    """Decode a handle that the process in `slot` sent.

    Raises `RemoteProtocolError` if it is malformed, or is not of that process and incarnation.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise RemoteProtocolError(f"slot {slot} sent a handle of {len(data)} bytes")
    try:
        handle = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"what slot {slot} sent is no {kind.__name__}: {error}") from None
    if isinstance(handle, DeviceHandle):
        require_device_handle(handle, slot=slot, incarnation=incarnation)
    elif (handle.slot, handle.incarnation) != (slot, incarnation):
        raise RemoteProtocolError(
            f"slot {slot}, incarnation {incarnation}, sent an event of slot {handle.slot}, incarnation "
            f"{handle.incarnation}"
        )
    return handle


def require_device_handle(handle: DeviceHandle, *, slot: int, incarnation: int) -> None:
    """Raise `RemoteProtocolError` unless the handle can be that process's, and its numbers fit together."""
    require_owner(handle, slot=slot, incarnation=incarnation)
    if len(handle.memory) != HANDLE_BYTES or len(handle.device) != UUID_BYTES:
        raise RemoteProtocolError(f"a device handle of slot {slot} has fields of the wrong size")
    item_bytes = ITEM_BYTES.get(handle.typestr)
    if item_bytes is None or math.prod(handle.shape) * item_bytes != handle.nbytes:
        raise RemoteProtocolError(
            f"a device handle of slot {slot} has {handle.nbytes} bytes, which are no {handle.typestr!r} "
            f"of shape {handle.shape}"
        )


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
    """Return its span. Raises `LocalProtocolError` if it is not C-contiguous, or its dtype unfit."""
    span = strided_span_of(array)
    if span.strides is not None:
        raise LocalProtocolError(f"a device array of shape {span.shape} is not C-contiguous")
    return span


def strided_span_of(array: object) -> DeviceSpan:
    """Return the span of the elements of any array. Raises `LocalProtocolError` if its dtype is unfit."""
    given = cast("dict[str, Any]", getattr(array, "__cuda_array_interface__", None) or {})
    try:
        shape = tuple(int(extent) for extent in given["shape"])
        typestr, (address, readonly) = str(given["typestr"]), given["data"]
        given_strides, stream = given.get("strides"), given.get("stream")
        strides = None if given_strides is None else tuple(int(step) for step in given_strides)
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
