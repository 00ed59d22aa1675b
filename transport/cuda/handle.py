"""Handles of device memory and of events, as they travel in messages. Sans-I/O; reads untrusted input.

Whoever opens one checks what can be checked: who it is from, and, once CUDA has opened the allocation, that
the region lies in it. CUDA itself grants all or nothing: who has a handle can write all of the allocation.
"""

from __future__ import annotations

import math
from typing import Annotated, Final, TypeVar

import msgspec

from zbmd.transport.cuda.api import HANDLE_BYTES
from zbmd.transport.cuda.facts import UUID_BYTES
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle, require_owner

MESSAGE_BYTES_MAX: Final = 1 << 10
DIMENSIONS_MAX: Final = 32
ITEM_BYTES: Final = {
    **{f"|{kind}1": 1 for kind in "biu"},
    **{f"<{kind}{size}": size for kind in "iu" for size in (2, 4, 8)},
    **{f"<f{size}": size for size in (2, 4, 8)},
    **{f"<c{size}": size for size in (8, 16)},
    "<V2": 2,
}
"""Type strings of the array interface that a region may have; <V2 is how bfloat16 is told."""

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]
_Opaque = Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
_Uuid = Annotated[bytes, msgspec.Meta(min_length=UUID_BYTES, max_length=UUID_BYTES)]


class DeviceHandle(RegionHandle, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Where an array lies in device memory. `offset`: bytes from the beginning of its allocation."""

    device: _Uuid
    memory: _Opaque
    """The allocation's cudaIpcMemHandle_t."""
    typestr: Annotated[str, msgspec.Meta(max_length=8)] = "|u1"
    shape: _Shape = ()


class EventHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The event that a process records behind what it signals on a channel to one peer."""

    slot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    incarnation: Annotated[int, msgspec.Meta(gt=0)]
    channel: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    device: _Uuid
    event: _Opaque
    """Its cudaIpcEventHandle_t."""


HandleT = TypeVar("HandleT", DeviceHandle, EventHandle)


def encode(handle: DeviceHandle | EventHandle) -> bytes:
    """As it travels."""
    return msgspec.msgpack.encode(handle)


def decode(data: bytes, kind: type[HandleT], *, slot: int, incarnation: int) -> HandleT:
    """What the process in `slot` sent. Raises `RemoteProtocolError` unless it is that process's own."""
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
