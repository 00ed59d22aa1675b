"""Registered memory: one-sided `put` + notify into a peer's inbox, and reads of a peer's arena.

RDMA's WRITE_WITH_IMM is the model. A handle is a description that travels in messages; whoever uses one
checks every number in it against the memory, because it came from a wire: the peer that opens it as far as
it knows that memory, the owner (`Regions.resolve`) where bytes reach it over a network.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from zbmd.transport.arena import Arena
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.transfer import Transfer

if TYPE_CHECKING:
    from typing_extensions import Buffer

REGIONS_MAX: Final = 1 << 16
"""Regions that one process has registered at once."""


class RegionHandle(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Where registered memory lies: serialisable, and worthless to any other incarnation of its owner."""

    slot: int
    incarnation: int
    offset: int
    """Bytes from the base of the owner's segment."""
    nbytes: int
    writable: bool
    """Whether peers may put into it: it lies in the owner's inbox."""


class RemoteRegion(Protocol):
    """A peer's region, opened by `link.open_region(handle)`. For any thread and any number of tasks at once.

    What one thread puts and notifies to one peer takes effect in that order, also across regions. A notify
    cell only grows, and all values of one cell belong to one order: give concurrent users channels of their
    own. Sizes and offsets are in bytes; a buffer must be C-contiguous.
    """

    @property
    def handle(self) -> RegionHandle:
        """What was opened."""
        ...

    def put(self, src: Buffer | NDArray[Any], offset: int = 0, *, channel: int, value: int) -> Transfer:
        """Copy `src` to byte `offset` of the region, then set the peer's cell of (our slot, channel).

        The transfer is done when `src` may be reused. Once the peer's wait for `value` is over, it sees
        every byte. Raises `RemoteProtocolError` outside the region or if it is read-only, `PeerLost` if its
        owner is known to have ended, and `LocalProtocolError` on a buffer, channel or value of no use, or
        after `close`. What is found out later, the transfer raises.
        """
        ...

    def get(self, into: Buffer | NDArray[Any], offset: int = 0) -> Transfer:
        """Fill `into` from byte `offset` of the region; done when it is filled. Raises as `put`."""
        ...

    def notify(self, channel: int, value: int) -> None:
        """Set the peer's cell of (our slot, channel), behind all that was put before. Raises as `put`."""
        ...

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview | None:
        """`nbytes` (default: the rest) in place and read-only, if the memory is shared with us; else None.

        It outlives the region and its owner: a dead process's arena can be read for as long as it is held.
        Raises `RemoteProtocolError` outside the region.
        """
        ...

    def close(self) -> None:
        """No further calls; what is under way still drains. Idempotent."""
        ...


class OwnMemory(Protocol):
    """What a process can register memory of: its segment, or what stands for one in the simulator."""

    @property
    def slot(self) -> int:
        """Of the owner."""
        ...

    @property
    def incarnation(self) -> int:
        """Of the owner."""
        ...

    @property
    def inbox(self) -> Arena:
        """What peers may write."""
        ...

    @property
    def arena(self) -> Arena:
        """What peers may read."""
        ...


class Regions:
    """The registered memory of this process. Safe to use from any thread."""

    def __init__(self, own: OwnMemory) -> None:
        self._own = own
        self._lock = threading.Lock()
        self._arrays: dict[RegionHandle, NDArray[Any]] = {}

    def register(self, array: NDArray[Any]) -> RegionHandle:
        """Describe an array of our own arena (peers may read it) or inbox (peers may write it).

        The array lives until `release`. Registering it again gives the same handle. Raises
        `LocalProtocolError` if it is not C-contiguous, lies elsewhere, or `REGIONS_MAX` are registered.
        """
        own = self._own
        offset, writable = own.inbox.offset_of(array), True
        if offset is None:
            offset, writable = own.arena.offset_of(array), False
        if offset is None:
            raise LocalProtocolError(
                f"an array of shape {array.shape} cannot be registered: it is not a C-contiguous array of "
                "this process's arena or inbox; make it with arena.empty or arena.from_array"
            )
        handle = RegionHandle(
            slot=own.slot,
            incarnation=own.incarnation,
            offset=offset,
            nbytes=array.nbytes,
            writable=writable,
        )
        with self._lock:
            if len(self._arrays) >= REGIONS_MAX and handle not in self._arrays:
                raise LocalProtocolError(f"{REGIONS_MAX} regions are registered already: release some")
            self._arrays[handle] = array
        return handle

    def release(self, handle: RegionHandle) -> None:
        """Let go of the array behind one of our handles. Idempotent."""
        with self._lock:
            self._arrays.pop(handle, None)

    def resolve(self, handle: RegionHandle, offset: int, nbytes: int, *, write: bool) -> memoryview:
        """The bytes that a peer means, for links that store or read on its behalf; writable if `write`.

        The view keeps them alive. Raises `RemoteProtocolError` on a handle that is forged, stale, released,
        read-only if `write`, or too small for `offset` and `nbytes`.
        """
        if (handle.slot, handle.incarnation) != (self._own.slot, self._own.incarnation):
            raise RemoteProtocolError(
                f"a region handle for slot {handle.slot}, incarnation {handle.incarnation} came to slot "
                f"{self._own.slot}, incarnation {self._own.incarnation}"
            )
        with self._lock:
            array = self._arrays.get(handle)
        if array is None:
            raise RemoteProtocolError(
                f"a region handle names bytes {handle.offset}+{handle.nbytes}: no region"
            )
        require_range(handle, offset, nbytes)
        if write and not handle.writable:
            raise read_only(handle)
        view = array.reshape(-1).view(np.uint8).data[offset : offset + nbytes]
        return view if write else view.toreadonly()


def require_range(handle: RegionHandle, offset: int, nbytes: int) -> None:
    """Raise `RemoteProtocolError` unless the bytes are in the region."""
    if offset < 0 or nbytes < 0 or offset + nbytes > handle.nbytes:
        raise RemoteProtocolError(
            f"bytes {offset}+{nbytes} are outside a region of {handle.nbytes} of slot {handle.slot}"
        )


def read_only(handle: RegionHandle) -> RemoteProtocolError:
    """The error of a put into an arena."""
    return RemoteProtocolError(f"the region of slot {handle.slot} is read-only: it is in its arena")
