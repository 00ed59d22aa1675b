"""Targets of device memory: handles of memory and of events, as peers send them."""

from __future__ import annotations

import math

from zbmd.tools.fuzzing.target import Broken, Target
from zbmd.transport.cuda.array import ITEM_BYTES, DeviceHandle, EventHandle, decode_handle, encode_handle
from zbmd.transport.errors import RemoteProtocolError

_SLOT, _INCARNATION = 3, 7
_UUID, _OPAQUE = bytes(range(16)), bytes(range(64))


def _seeds() -> tuple[bytes, ...]:
    memory = DeviceHandle(
        slot=_SLOT,
        incarnation=_INCARNATION,
        offset=512,
        nbytes=24,
        writable=True,
        device=_UUID,
        memory=_OPAQUE,
        typestr="<f4",
        shape=(2, 3),
    )
    event = EventHandle(slot=_SLOT, incarnation=_INCARNATION, channel=5, device=_UUID, event=_OPAQUE)
    return b"\0" + encode_handle(memory), b"\1" + encode_handle(event)


def _handle(data: bytes) -> None:
    """The first byte picks what is due."""
    if data[:1] == b"\1":
        event = decode_handle(data[1:], EventHandle, slot=_SLOT, incarnation=_INCARNATION)
        if (event.slot, event.incarnation) != (_SLOT, _INCARNATION) or len(event.event) != len(_OPAQUE):
            raise Broken(f"{event}")
        return
    handle = decode_handle(data[1:], DeviceHandle, slot=_SLOT, incarnation=_INCARNATION)
    fits = math.prod(handle.shape) * ITEM_BYTES[handle.typestr] == handle.nbytes
    if not fits or handle.offset < 0 or (handle.slot, handle.incarnation) != (_SLOT, _INCARNATION):
        raise Broken(f"{handle}")


TARGETS = (
    Target(
        name="device.handle",
        what="a handle of device memory or of an event",
        allowed=(RemoteProtocolError,),
        seeds=_seeds,
        run=_handle,
    ),
)
