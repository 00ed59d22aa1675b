"""Registered memory: one-sided `put` + notify into a peer's inbox, and reads of a peer's arena.

RDMA's WRITE_WITH_IMM is the model. A handle is a description that travels in messages; whoever uses one
checks every number in it against the memory, because it came from a wire: the peer that opens it as far as
it knows that memory, the owner (`Regions.resolve`) where bytes reach it over a network.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.memory.arena import Arena
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native._native import CHANNELS

if TYPE_CHECKING:
    from typing_extensions import Buffer


REGIONS_MAX: Final = 1 << 16
"""Regions that one process has registered at once."""
_ADDRESS_MAX: Final = (1 << 63) - 1


class RegionHandle(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Locate registered memory: serialisable, and invalid for any other incarnation of its owner."""

    slot: int
    incarnation: int
    offset: int
    """Bytes from the base of the owner's segment."""
    nbytes: int
    writable: bool
    """Whether peers may put into it: it lies in the owner's inbox."""
    key: int = 0
    """Its key at the device that serves it, refused once the region is released; 0: none serves it."""


class RegionKeys(Protocol):
    """Registers writable regions with a device; an `RdmaPlane` has one. For any thread."""

    def add(self, offset: int, nbytes: int) -> int:
        """Let peers put into these bytes of the segment by the key that is returned. Raises `UserError`."""
        ...

    def revoke(self, key: int) -> None:
        """Once this returns, nobody reaches memory by that key. Idempotent."""
        ...


class RemoteRegion(Protocol):
    """A peer's region, opened by `link.open_region(handle)`. For any thread and any number of tasks at once.

    What one thread puts and notifies to one peer takes effect in that order, also across regions. A notify
    cell only grows, and all values of one cell belong to one order: give concurrent users channels of their
    own. Sizes and offsets are in bytes; a buffer must be C-contiguous.
    """

    @property
    def handle(self) -> RegionHandle:
        """Return the handle that was opened."""
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
        """Return `nbytes` (default: the rest) in place and read-only if the memory is shared, else None.

        It outlives the region and its owner: a dead process's arena can be read for as long as it is held.
        Raises `RemoteProtocolError` outside the region.
        """
        ...

    def close(self) -> None:
        """No further calls; what is under way still drains. Idempotent."""
        ...


class _Region:
    """A registered array, its key, and the slots of those that may still write it."""

    __slots__ = ("array", "key", "writers")

    def __init__(self, array: NDArray[Any], key: int) -> None:
        self.array = array
        self.key = key
        self.writers: set[int] = set()


class Regions:
    """The registered memory of this process: `segment.regions`. Safe to use from any thread."""

    def __init__(self, *, slot: int, incarnation: int, inbox: Arena, arena: Arena) -> None:
        self._slot = slot
        self._incarnation = incarnation
        self._inbox = inbox
        self._arena = arena
        self._lock = threading.Lock()
        self._keys: RegionKeys | None = None
        self._regions: dict[RegionHandle, _Region] = {}
        """By their handles without keys, which is how peers name them over TCP."""
        self._closing: dict[RegionHandle, _Region] = {}
        self._lent: dict[RegionHandle, tuple[NDArray[Any], int]] = {}
        """Arrays that are lent to peers, and how many times."""
        self.version = 0
        """Another number whenever memory is not peers' any more."""

    def register(self, array: NDArray[Any], *, writers: Iterable[int] = ()) -> RegionHandle:
        """Describe an array of our own arena (peers may read it) or inbox (peers may write it).

        The array lives until `release`; and if `writers` names the slots that get the handle, then until each
        of these is proven gone. Registering it again gives the same handle and adds writers. Raises
        `LocalProtocolError` if it is not C-contiguous, lies elsewhere, or `REGIONS_MAX` are registered, and
        `UserError` if a device that is to serve it takes no more memory.
        """
        offset, writable = self._inbox.offset_of(array), True
        if offset is None:
            offset, writable = self._arena.offset_of(array), False
        if offset is None:
            raise LocalProtocolError(
                f"an array of shape {array.shape} cannot be registered: it is not a C-contiguous array of "
                "this process's arena or inbox; make it with arena.empty or arena.from_array"
            )
        handle = self._describe(offset, array.nbytes, writable=writable)
        with self._lock:
            region = self._regions.get(handle) or self._closing.pop(handle, None)
            if region is None:
                self._require_room()
                keyed = self._keys is not None and writable and array.nbytes
                region = _Region(array, self._keys.add(offset, array.nbytes) if self._keys and keyed else 0)
            self._regions[handle] = region
            if writable:
                region.writers.update(writers)
        return msgspec.structs.replace(handle, key=region.key) if region.key else handle

    def keyed_by(self, keys: RegionKeys | None) -> None:
        """From now on a device serves what is registered, or none does; what is registered stays as it is.

        Raises `LocalProtocolError` if another device does already.
        """
        with self._lock:
            if keys is not None and self._keys is not None:
                raise LocalProtocolError("an RDMA plane serves this segment already: one can")
            self._keys = keys

    def lend(self, array: NDArray[Any], offset: int, *, writable: bool) -> RegionHandle:
        """Let peers on other hosts reach `array`, at `offset` of our segment, until `take_back`.

        For the time of an operation: cheap, and apart from what is registered. As often as it has been lent
        it is to be taken back. Raises `LocalProtocolError` if `REGIONS_MAX` are.
        """
        handle = self._describe(offset, array.nbytes, writable=writable)
        with self._lock:
            if handle not in self._lent:
                self._require_room()
            lent = self._lent.get(handle, (array, 0))
            self._lent[handle] = lent[0], lent[1] + 1
        return handle

    def take_back(self, handle: RegionHandle) -> None:
        """The end of one `lend`: who asks for it after the last is refused.

        A transfer that is being served from it goes on: see `BulkPeer.let_go`.
        """
        with self._lock:
            self.version += 1
            array, times = self._lent.pop(handle)
            if times > 1:
                self._lent[handle] = array, times - 1

    def _describe(self, offset: int, nbytes: int, *, writable: bool) -> RegionHandle:
        return RegionHandle(
            slot=self._slot, incarnation=self._incarnation, offset=offset, nbytes=nbytes, writable=writable
        )

    def _require_room(self) -> None:
        if len(self._regions) + len(self._closing) + len(self._lent) >= REGIONS_MAX:
            raise LocalProtocolError(f"{REGIONS_MAX} regions are registered already: release some")

    def release(self, handle: RegionHandle) -> None:
        """Let go of the array behind one of our handles, once none of its writers is left. Idempotent.

        Its key is revoked then, before the memory can be another's.
        """
        handle = _without_key(handle)
        with self._lock:
            region = self._regions.pop(handle, None)
            if region is None:
                return
            self.version += 1
            if region.writers:
                self._closing[handle] = region
            else:
                self._revoke(region)

    def writer_gone(self, slot: int) -> None:
        """The process in `slot` is proven gone. Idempotent."""
        with self._lock:
            for regions in (self._regions, self._closing):
                for region in regions.values():
                    region.writers.discard(slot)
            for handle in [handle for handle, region in self._closing.items() if not region.writers]:
                self._revoke(self._closing.pop(handle))

    def _revoke(self, region: _Region) -> None:
        if self._keys is not None and region.key:
            self._keys.revoke(region.key)

    @property
    def closing(self) -> int:
        """Regions that are released, and live until their writers are proven gone."""
        with self._lock:
            return len(self._closing)

    def resolve(self, handle: RegionHandle, offset: int, nbytes: int, *, write: bool) -> memoryview:
        """The bytes that a peer means, for links that store or read on its behalf; writable if `write`.

        The view keeps them alive. Raises `RemoteProtocolError` on a handle that is forged, stale, released,
        read-only if `write`, or too small for `offset` and `nbytes`.
        """
        if (handle.slot, handle.incarnation) != (self._slot, self._incarnation):
            raise RemoteProtocolError(
                f"a region handle for slot {handle.slot}, incarnation {handle.incarnation} came to slot "
                f"{self._slot}, incarnation {self._incarnation}"
            )
        handle = _without_key(handle)
        with self._lock:
            region, lent = self._regions.get(handle), self._lent.get(handle)
        if region is not None:
            array = region.array
        elif lent is not None:
            array = lent[0]
        else:
            raise RemoteProtocolError(
                f"a region handle names bytes {handle.offset}+{handle.nbytes}: no region"
            )
        require_range(handle, offset, nbytes)
        if write and not handle.writable:
            raise read_only(handle)
        view = array.reshape(-1).view(np.uint8).data[offset : offset + nbytes]
        return view if write else view.toreadonly()


def _without_key(handle: RegionHandle) -> RegionHandle:
    return msgspec.structs.replace(handle, key=0) if handle.key else handle


def require_range(handle: RegionHandle, offset: int, nbytes: int) -> None:
    """Raise `RemoteProtocolError` unless the bytes are in the region."""
    if offset < 0 or nbytes < 0 or offset + nbytes > handle.nbytes:
        raise RemoteProtocolError(
            f"bytes {offset}+{nbytes} are outside a region of {handle.nbytes} of slot {handle.slot}"
        )


def require_owner(handle: RegionHandle, *, slot: int, incarnation: int) -> None:
    """Raise `RemoteProtocolError` unless the handle can be one of the process that a link leads to."""
    if handle.slot != slot:
        raise RemoteProtocolError(f"a region handle from slot {slot} names slot {handle.slot}")
    if handle.incarnation != incarnation:
        raise RemoteProtocolError(
            f"a region handle of slot {handle.slot}, incarnation {handle.incarnation}, is stale: "
            f"incarnation {incarnation} is there now"
        )
    if handle.offset < 0 or handle.nbytes < 0 or handle.offset + handle.nbytes > _ADDRESS_MAX:
        raise RemoteProtocolError(
            f"a region handle of slot {slot} names bytes {handle.offset}+{handle.nbytes}: there are none"
        )
    if not 0 <= handle.key < 1 << 32:
        raise RemoteProtocolError(f"a region handle of slot {slot} has the key {handle.key}: there is none")


def require_cell(channel: int, value: int) -> None:
    """Raise `LocalProtocolError` unless there is such a channel, and the value fits its cell."""
    if not 0 <= channel < CHANNELS:
        raise LocalProtocolError(f"channel {channel} is not below {CHANNELS}")
    if not 0 <= value < 1 << 64:
        raise LocalProtocolError(f"a notification's value is {value}, not in 0..2**64 - 1")


def read_only(handle: RegionHandle) -> RemoteProtocolError:
    """The error of a put into an arena."""
    return RemoteProtocolError(f"the region of slot {handle.slot} is read-only: it is in its arena")


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


# A peer's region that is reached by messages: what is checked here before anything is sent, once.


class CheckedRegion(ABC):
    """See `zbmd.transport.memory.region.RemoteRegion`. A transport adds how bytes travel."""

    def __init__(self, handle: RegionHandle) -> None:
        self._handle = handle
        self._closed = False

    @abstractmethod
    def _put(self, view: memoryview, offset: int, channel: int, value: int, owner: object) -> Transfer:
        """Send the bytes of `view`, which are `owner`'s, and the notification behind them."""

    def _put_now(self, view: memoryview, offset: int, channel: int, value: int) -> bool:
        """Do so, if the bytes of `view` are needed no more when it returns; else nothing, and False."""
        return False

    @abstractmethod
    def _get(self, view: memoryview, offset: int, owner: object) -> Transfer:
        """Fill `view`, whose bytes are `owner`'s."""

    @abstractmethod
    def _notify(self, channel: int, value: int) -> None:
        """Send the notification."""

    def _check_usable(self) -> None:
        """Raise if nothing can be sent; see `RemoteRegion.put`."""
        self._check_open()

    @property
    def handle(self) -> RegionHandle:
        """Return the handle that was opened."""
        return self._handle

    def put(self, src: Buffer | NDArray[Any], offset: int = 0, *, channel: int, value: int) -> Transfer:
        """See `RemoteRegion.put`."""
        return self._put(self._what_is_put(src, offset, channel, value), offset, channel, value, src)

    def put_now(self, src: Buffer | NDArray[Any], offset: int = 0, *, channel: int, value: int) -> bool:
        """As `put`, if `src` may be reused as soon as this returns, whatever becomes of the connection.

        False: nothing has been put, since that cannot be had now. Raises as `put`.
        """
        return self._put_now(self._what_is_put(src, offset, channel, value), offset, channel, value)

    def get(self, into: Buffer | NDArray[Any], offset: int = 0) -> Transfer:
        """See `RemoteRegion.get`."""
        self._check_usable()
        view = flat_bytes(into)
        if view.readonly:
            raise LocalProtocolError("get into a buffer that cannot be written")
        require_range(self._handle, offset, view.nbytes)
        return self._get(view, offset, into)

    def notify(self, channel: int, value: int) -> None:
        """See `RemoteRegion.notify`."""
        self._check_usable()
        require_cell(channel, value)
        self._notify(channel, value)

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview | None:
        """None: the memory is not shared with us. Raises `RemoteProtocolError` outside the region."""
        require_range(self._handle, offset, self._handle.nbytes - offset if nbytes is None else nbytes)
        return None

    def close(self) -> None:
        """See `RemoteRegion.close`."""
        self._closed = True

    def _what_is_put(self, src: Buffer | NDArray[Any], offset: int, channel: int, value: int) -> memoryview:
        self._check_usable()
        require_cell(channel, value)
        if not self._handle.writable:
            raise read_only(self._handle)
        view = flat_bytes(src)
        require_range(self._handle, offset, view.nbytes)
        return view

    def _check_open(self) -> None:
        if self._closed:
            raise LocalProtocolError(f"the region of slot {self._handle.slot} is closed")
