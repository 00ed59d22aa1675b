"""A region of a peer on another host: what `zbmd.transport.memory.region.RemoteRegion` promises, over TCP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zbmd.transport.memory.checked_region import CheckedRegion
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.transfer import Transfer

if TYPE_CHECKING:
    from zbmd.transport.bulk.peer import BulkPeer


class BulkRegion(CheckedRegion):
    """See `zbmd.transport.memory.region.RemoteRegion`. Made by `BulkPeer.open_region`.

    A call only hands the transfer to the data-plane thread; raises `LinkFull` if too many are under way.
    """

    def __init__(self, peer: BulkPeer, handle: RegionHandle) -> None:
        super().__init__(handle)
        self._peer = peer

    def _put(self, view: memoryview, offset: int, channel: int, value: int, owner: object) -> Transfer:
        return self._peer.put(self._handle, view, offset, channel=channel, value=value, owner=owner)

    def _put_now(self, view: memoryview, offset: int, channel: int, value: int) -> bool:
        return self._peer.put_now(self._handle, view, offset, channel=channel, value=value)

    def _get(self, view: memoryview, offset: int, owner: object) -> Transfer:
        return self._peer.get(self._handle, view, offset, owner=owner)

    def _notify(self, channel: int, value: int) -> None:
        self._peer.notify(channel, value)
