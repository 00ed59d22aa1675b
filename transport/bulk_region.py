"""A region of a peer on another host: what `zbmd.transport.region.RemoteRegion` promises, over TCP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zbmd.transport._native import CHANNELS
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.region import RegionHandle, read_only, require_range
from zbmd.transport.transfer import Transfer

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from zbmd.transport.bulk_peer import BulkPeer

_VALUE_MAX = (1 << 64) - 1
_ADDRESS_MAX = (1 << 63) - 1


class BulkRegion:
    """See `zbmd.transport.region.RemoteRegion`. Made by `BulkPeer.open_region`.

    A call only hands the transfer to the data-plane thread; raises `LinkFull` if too many are under way.
    """

    def __init__(self, peer: BulkPeer, handle: RegionHandle) -> None:
        self._peer = peer
        self._handle = handle
        self._closed = False

    @property
    def handle(self) -> RegionHandle:
        """What was opened."""
        return self._handle

    def put(self, src: Buffer | NDArray[Any], offset: int = 0, *, channel: int, value: int) -> Transfer:
        """See `RemoteRegion.put`."""
        self._check_usable()
        _check_cell(channel, value)
        if not self._handle.writable:
            raise read_only(self._handle)
        view = flat_bytes(src)
        require_range(self._handle, offset, len(view))
        return self._peer.put(self._handle, view, offset, channel=channel, value=value, owner=src)

    def get(self, into: Buffer | NDArray[Any], offset: int = 0) -> Transfer:
        """See `RemoteRegion.get`."""
        self._check_usable()
        view = flat_bytes(into)
        if view.readonly:
            raise LocalProtocolError("get into a buffer that cannot be written")
        require_range(self._handle, offset, len(view))
        return self._peer.get(self._handle, view, offset, owner=into)

    def notify(self, channel: int, value: int) -> None:
        """See `RemoteRegion.notify`."""
        self._check_usable()
        _check_cell(channel, value)
        self._peer.notify(channel, value)

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview | None:
        """None: the memory is another host's. Raises `RemoteProtocolError` outside the region."""
        require_range(self._handle, offset, self._handle.nbytes - offset if nbytes is None else nbytes)
        return None

    def close(self) -> None:
        """See `RemoteRegion.close`."""
        self._closed = True

    def _check_usable(self) -> None:
        if self._closed:
            raise LocalProtocolError(f"the region of slot {self._handle.slot} is closed")


def flat_bytes(buffer: Buffer | NDArray[Any]) -> memoryview:
    """A C-contiguous buffer as flat bytes, without a copy. Raises `LocalProtocolError` on any other."""
    try:
        if isinstance(buffer, np.ndarray):
            if not buffer.flags.c_contiguous:
                raise LocalProtocolError(f"an array of shape {buffer.shape} is not C-contiguous")
            return buffer.reshape(-1).view(np.uint8).data
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise LocalProtocolError(f"a buffer of shape {view.shape} is not C-contiguous")
        return view.cast("B") if view.nbytes else memoryview(bytearray())
    except (TypeError, ValueError, BufferError) as error:
        raise LocalProtocolError(
            f"{type(buffer).__name__} is no buffer that can be moved: {error}"
        ) from error


def check_handle(handle: RegionHandle, *, slot: int, incarnation: int) -> None:
    """Raise `RemoteProtocolError` unless a handle can be one of this owner's."""
    if handle.slot != slot:
        raise RemoteProtocolError(f"a region handle from slot {slot} names slot {handle.slot}")
    if handle.incarnation != incarnation:
        raise RemoteProtocolError(
            f"a region handle of slot {slot}, incarnation {handle.incarnation}, is stale: incarnation "
            f"{incarnation} is there now"
        )
    if handle.offset < 0 or handle.nbytes < 0 or handle.offset + handle.nbytes > _ADDRESS_MAX:
        raise RemoteProtocolError(
            f"a region handle of slot {slot} names bytes {handle.offset}+{handle.nbytes}: there are none"
        )


def _check_cell(channel: int, value: int) -> None:
    if not 0 <= channel < CHANNELS:
        raise LocalProtocolError(f"channel {channel} is not below {CHANNELS}")
    if not 0 <= value <= _VALUE_MAX:
        raise LocalProtocolError(f"a notification's value must be a u64, not {value}")
