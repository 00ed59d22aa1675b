"""Registered memory: one-sided `put` + notify into a peer's inbox, and reads of a peer's arena in place.

RDMA's WRITE_WITH_IMM is the model. A handle is a description that travels in messages; whoever uses one
checks every number in it against the mapping, because it came from a wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.segment import PeerSegment, Segment


class RegionHandle(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Where registered memory lies: serialisable, and worthless to any other incarnation of its owner."""

    slot: int
    incarnation: int
    offset: int
    """Bytes from the base of the owner's segment."""
    nbytes: int
    writable: bool
    """Whether peers may put into it: it lies in the owner's inbox."""


class Regions:
    """The registered memory of this process and of the peers whose segments it has mapped.

    `peers` maps slots to segments and may change as members come and go.
    """

    def __init__(self, own: Segment, peers: Mapping[int, PeerSegment]) -> None:
        self._own = own
        self._peers = peers

    def register(self, array: NDArray[Any]) -> RegionHandle:
        """Describe an array of our own arena (peers may read it) or inbox (peers may write it).

        Keep the array alive for as long as a peer may use the handle. Raises `LocalProtocolError` if it
        is not C-contiguous or lies elsewhere.
        """
        offset, writable = self._own.inbox.offset_of(array), True
        if offset is None:
            offset, writable = self._own.arena.offset_of(array), False
        if offset is None:
            raise LocalProtocolError(
                f"an array of shape {array.shape} cannot be registered: it is not a C-contiguous array of "
                "this process's arena or inbox; make it with arena.empty or arena.from_array"
            )
        return RegionHandle(
            slot=self._own.slot,
            incarnation=self._own.incarnation,
            offset=offset,
            nbytes=array.nbytes,
            writable=writable,
        )

    def get(self, handle: RegionHandle, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """A read-only view, without a copy, of `nbytes` (default: the rest) of a peer's region.

        Raises `RemoteProtocolError` on a handle that is forged, stale or out of bounds.
        """
        count = handle.nbytes - offset if nbytes is None else nbytes
        peer = self._checked(handle, offset, count)
        if handle.writable:
            return peer.inbox_view(handle.offset + offset, count).toreadonly()
        return peer.arena_view(handle.offset + offset, count)

    def put(
        self, src: NDArray[Any], handle: RegionHandle, offset: int = 0, *, channel: int, value: int
    ) -> None:
        """Copy `src` into a peer's region at byte `offset`, then notify the peer on `channel`.

        Once the peer's wait for `value` is over it sees every byte. Raises `RemoteProtocolError` as `get`
        does, also on a region that is not writable, and `LocalProtocolError` if `src` is not C-contiguous.
        """
        if not src.flags.c_contiguous:
            raise LocalProtocolError(f"put of an array of shape {src.shape} that is not C-contiguous")
        peer = self._checked(handle, offset, src.nbytes)
        if not handle.writable:
            raise RemoteProtocolError(f"the region of slot {handle.slot} is read-only: it is in its arena")
        target = peer.inbox_view(handle.offset + offset, src.nbytes)
        np.copyto(np.ndarray(src.shape, src.dtype, buffer=target), src)
        peer.notify(self._own.slot, channel, value)

    def _checked(self, handle: RegionHandle, offset: int, nbytes: int) -> PeerSegment:
        peer = self._peers.get(handle.slot)
        if peer is None:
            raise RemoteProtocolError(f"a region handle names slot {handle.slot}, which is no peer of ours")
        if handle.incarnation != peer.incarnation:
            raise RemoteProtocolError(
                f"a region handle of slot {handle.slot}, incarnation {handle.incarnation}, is stale: "
                f"incarnation {peer.incarnation} is there now"
            )
        if offset < 0 or nbytes < 0 or offset + nbytes > handle.nbytes:
            raise RemoteProtocolError(
                f"bytes {offset}+{nbytes} are outside a region of {handle.nbytes} of slot {handle.slot}"
            )
        return peer
