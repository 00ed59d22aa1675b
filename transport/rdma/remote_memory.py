"""The memory of a peer on another host: what it lends us is read and written over RDMA or TCP.

Each side keeps, in its own inbox, a *mirror*: a copy of the peer's operation descriptors, which the peer puts
there. So what is read in place on one host is read in place here too, and costs one message a peer.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.bulk.events import BulkPeerInfo
from zbmd.transport.errors import RemoteProtocolError, ZbmdError
from zbmd.transport.memory.region import CheckedRegion, RegionHandle, RemoteRegion
from zbmd.transport.memory.segment import Segment
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native import _native

MIRROR_BYTES: Final = (_native.OFF_END - _native.OFF_DESCRIPTORS) // _native.CHANNELS * _native.FAR_CHANNELS
"""The descriptors of one process in the channels of groups over several hosts."""
SEGMENT_BYTES_MAX: Final = 1 << 48


class RemotePlane(Protocol):
    """The plane that moves the bytes: see `bulk.plane.DataPlane` and `rdma.plane.RdmaPlane`."""

    def driving(self) -> AbstractContextManager[None]:
        """For the time of the context this thread, if no other does so, moves them itself by `drive`."""
        ...

    def drive(self) -> bool:
        """Take one turn, without waiting; whether there was anything to do."""
        ...

    def park(self) -> None:
        """Sleep until there may be something to do, but not for long."""
        ...

    def wake(self) -> None:
        """Have a thread that sleeps in `park` look again."""
        ...

    def hand_over(self) -> None:
        """The plane's own thread goes on."""
        ...


class RemotePeer(Protocol):
    """Transfers to and from one incarnation of a peer: `bulk.peer.BulkPeer` or `rdma_peer.RdmaPeer`."""

    info: BulkPeerInfo
    ended: Transfer

    @property
    def plane(self) -> RemotePlane:
        """The plane that moves the bytes."""
        ...

    @property
    def one_sided(self) -> bool:
        """Whether our memory is read and written without us: it cannot be taken back by refusing."""
        ...

    def open_region(self, handle: RegionHandle) -> CheckedRegion:
        """The peer's region behind `handle`. Raises `RemoteProtocolError` if it is forged or stale."""
        ...

    def settled(self) -> Transfer:
        """Done once all that was put and notified before has arrived; raises what ends the connection."""
        ...

    def let_go(self, transfers: Iterable[Transfer]) -> None:
        """Once this returns, `transfers` touch their buffers no more."""
        ...

    def close(self) -> None:
        """Finish what is under way, say goodbye and end. Idempotent."""
        ...

    def abort(self, error: ZbmdError) -> None:
        """End at once, with `error` for all that is under way. Idempotent."""
        ...


class Mirror:
    """The array of our inbox into which one peer puts its descriptors. Raises `ArenaFull`."""

    def __init__(self, own: Segment, slot: int) -> None:
        self._own = own
        self._array = own.inbox.empty(MIRROR_BYTES, np.uint8)
        self._array[:] = 0
        self.handle = own.regions.register(self._array, writers=(slot,))
        """For the peer."""

    @property
    def address(self) -> int:
        """Of the first descriptor; valid as long as this object."""
        return _native.address_of(self._array)

    def close(self) -> None:
        """Give it back, once the peer can write it no more. Idempotent."""
        self._own.regions.release(self.handle)


class RemoteMemory:
    """See `zbmd.transport.memory.segment.PeerMemory`. mirror: ours of the peer; theirs: where the peer
    has ours.

    arena_offset, nbytes: as the peer says. Raises `RemoteProtocolError` on what no peer of ours says.
    """

    def __init__(
        self, bulk: RemotePeer, mirror: Mirror, theirs: RegionHandle, *, arena_offset: int, nbytes: int
    ) -> None:
        if not _native.OFF_END <= arena_offset <= nbytes <= SEGMENT_BYTES_MAX:
            raise RemoteProtocolError(
                f"{bulk.info.name} says that its segment has {nbytes} bytes and its arena begins at "
                f"{arena_offset}: there is none like that"
            )
        if theirs.nbytes != MIRROR_BYTES or not theirs.writable:
            raise RemoteProtocolError(f"{bulk.info.name} offers a mirror of no use: {theirs}")
        self._bulk = bulk
        self._mirror = mirror
        self._theirs = bulk.open_region(theirs)
        self.slot = bulk.info.slot
        self.incarnation = bulk.info.incarnation
        self.arena_offset = arena_offset
        self.nbytes = nbytes

    def __repr__(self) -> str:
        return f"<memory of {self._bulk.info.name}#{self.incarnation} on another host>"

    @property
    def descriptors(self) -> int:
        """The address here of the peer's descriptors, channel by channel."""
        return self._mirror.address

    @property
    def plane(self) -> RemotePlane:
        """The plane that moves the bytes."""
        return self._bulk.plane

    @property
    def ended(self) -> bool:
        """Whether nobody stores on the peer's behalf any more."""
        return self._bulk.ended.done

    @property
    def one_sided(self) -> bool:
        """See `RemotePeer.one_sided`."""
        return self._bulk.one_sided

    def describe(self, offset: int, data: bytes | NDArray[np.uint8], *, channel: int, value: int) -> Transfer:
        """Put a descriptor of ours at `offset` of the peer's mirror, then set its cell of us; see `put`."""
        return self._theirs.put(data, offset, channel=channel, value=value)

    def notify(self, channel: int, value: int) -> None:
        """Set the peer's cell of us, behind all puts; see
        `zbmd.transport.memory.region.RemoteRegion.notify`."""
        self._theirs.notify(channel, value)

    def lent(self, offset: int, nbytes: int, *, writable: bool) -> CheckedRegion:
        """Open bytes that the peer lends of its segment; over TCP it refuses transfers if it lends none."""
        handle = RegionHandle(
            slot=self.slot, incarnation=self.incarnation, offset=offset, nbytes=nbytes, writable=writable
        )
        return self._bulk.open_region(handle)

    def open_region(self, handle: RegionHandle, own: Segment) -> RemoteRegion:
        """See `zbmd.transport.memory.segment.PeerMemory`."""
        return self._bulk.open_region(handle)

    def let_go(self, transfers: Iterable[Transfer]) -> None:
        """See `RemotePeer.let_go`."""
        self._bulk.let_go(transfers)

    def abort(self, error: ZbmdError) -> None:
        """End all that is under way: the peer is known to be gone. Idempotent."""
        self._bulk.abort(error)

    def close(self) -> None:
        """Give the mirror back, once the connection has ended. Idempotent."""
        self._mirror.close()
