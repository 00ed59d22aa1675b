"""A region of a peer on another host: what `zbmd.transport.region.RemoteRegion` promises, over TCP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.region import RegionHandle, flat_bytes, read_only, require_cell, require_range
from zbmd.transport.transfer import Transfer

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from zbmd.transport.bulk_peer import BulkPeer


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
        require_cell(channel, value)
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
        require_cell(channel, value)
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
