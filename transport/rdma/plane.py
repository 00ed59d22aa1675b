"""The data plane over RDMA: one device, the registered segment, and the thread that takes completions.

The thread polls natively, without the GIL, for a while after each completion, and then sleeps until the next;
Python runs on it only when a transfer that somebody holds is done, or a connection ends. A thread that waits
for what the plane brings polls itself (`wait`, `Transfer.wait`) or may do so (`driving`, `drive`). Its
own thread stands by meanwhile, and half a millisecond longer, unless somebody sleeps who counts on it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.errors import LinkClosed, ZbmdError
from zbmd.transport.host.link_choice import choose_address
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native import _native
from zbmd.transport.rdma.native._rdma import ATTENTION, ENDS_MAX, NEVER_NS, Plane
from zbmd.transport.rdma.native._rdma_device import ACTIVE, ROCE_V1, Device, Path, Registration
from zbmd.transport.rdma.setup import RETRIES, TIMEOUT, QueuePairAt
from zbmd.transport.rdma.transfer import TransferCounts

if TYPE_CHECKING:
    from zbmd.transport.rdma.native._rdma_device import Device


# ---- a port of an RDMA device, its address, and the path from a queue pair there to one of a peer


class PortAt(NamedTuple):
    """A port of a device, and its address."""

    port: int
    gid_index: int
    gid: bytes
    mtu: int
    """As ibv_mtu."""
    lid: int
    message_bytes_max: int

    def queue_pair(self, number: int, first_psn: int) -> QueuePairAt:
        """Describe to a peer a queue pair here, whose first packet has that sequence number."""
        return QueuePairAt(gid=self.gid, lid=self.lid, number=number, first_psn=first_psn, mtu=self.mtu)

    def path_to(self, peer: QueuePairAt, own_psn: int, *, timeout: int = TIMEOUT) -> Path:
        """From a queue pair here, whose first packet has `own_psn`, to the peer's; timeout: see `TIMEOUT`."""
        return Path(
            peer.gid,
            number=peer.number,
            first_psn=peer.first_psn,
            own_psn=own_psn,
            lid=peer.lid,
            mtu=min(peer.mtu, self.mtu),
            port=self.port,
            gid_index=self.gid_index,
            timeout=timeout,
            retries=RETRIES,
        )


def choose_port(device: Device, address: str | None) -> PortAt:
    """An address of an active port, RoCE v2 or InfiniBand; rather one that is not link-local.

    Raises `UserError` if there is none, or none with `address`.
    """
    return choose_address(device.name, address, _usable(device))


def _usable(device: Device) -> Iterator[tuple[IPv6Address, PortAt]]:
    for port, index, gid_type, raw in device.gids():
        state, mtu, lid, message_bytes_max = device.port(port)
        gid = IPv6Address(raw)
        if gid_type != ROCE_V1 and state == ACTIVE and int(gid):
            yield gid, PortAt(port, index, raw, mtu, lid, message_bytes_max)


# ---- registrations beside the segment: arrays while they live, and regions of peers

KEPT_MAX: Final = 256
"""Arrays outside of the segment whose registration is kept; past it, the one that was unused longest goes."""


class Registrations:
    """Registrations of what users own. For any thread.

    That of a NumPy array is kept until the array is gone, which is reported before its memory is freed: so
    none outlives its memory, and no array lives longer for it. What transfers use lives until they are done.
    Other buffers are registered for one transfer.
    """

    def __init__(self, device: Device) -> None:
        self._device: Device | None = device
        self._lock = threading.RLock()  # an array may go at any line of ours
        self._kept: OrderedDict[int, tuple[weakref.ref[NDArray[Any]], Registration]] = OrderedDict()

    @property
    def kept(self) -> int:
        """Return how many there are."""
        return len(self._kept)

    def lend(self, owner: object, address: int, nbytes: int) -> tuple[Registration, bool]:
        """One that covers these bytes of `owner`, and whether it was there. Raises `UserError`."""
        root, device = _root(owner), self._device
        if device is None:
            raise LinkClosed("the RDMA data plane of this process is closed")
        if root is None:
            return device.register(address, nbytes), False
        key = id(root)
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found[0]() is root:
                self._kept.move_to_end(key)
                return found[1], True
            made = device.register(root.ctypes.data, root.nbytes)
            self._kept[key] = weakref.ref(root, lambda gone: self._forget(key, gone)), made
            while len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
            return made, False

    def close(self) -> None:
        """Let go of all of them, and of the device. Idempotent."""
        with self._lock:
            self._kept.clear()
            self._device = None

    def _forget(self, key: int, gone: weakref.ref[NDArray[Any]]) -> None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found[0] is gone:
                del self._kept[key]


class RdmaRegionKeys:
    """A registration of its own for each region that peers may put into: `RegionKeys` of a segment.

    To end it costs those who put into it after its end their connection, and us nothing.
    """

    def __init__(self, device: Device, base: int) -> None:
        self._device: Device | None = device
        self._base = base
        self._lock = threading.Lock()
        self._made: dict[int, Registration] = {}

    def add(self, offset: int, nbytes: int) -> int:
        """See `RegionKeys`."""
        with self._lock:
            if self._device is None:
                return 0
            made = self._device.register(self._base + offset, nbytes, remote_read=True, remote_write=True)
            self._made[made.key] = made
            return made.key

    def revoke(self, key: int) -> None:
        """See `RegionKeys`."""
        with self._lock:
            made = self._made.pop(key, None)
        if made is not None:
            made.revoke()

    def close(self) -> None:
        """Revoke all of them, and let go of the device. Idempotent."""
        with self._lock:
            self._device = None
            made, self._made = self._made, {}
        for registration in made.values():
            registration.revoke()


def _root(owner: object) -> NDArray[Any] | None:
    """The array that owns the memory, if it is one and its memory cannot move."""
    while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
        owner = owner.base
    if isinstance(owner, np.ndarray) and owner.flags.owndata and owner.flags.c_contiguous:
        return owner
    return None


PARK_MS: Final = 1
"""Longest sleep of a driving thread: what it waits for may end without a wake-up."""
ENDS_MIN: Final = 62
"""Queue pairs that a small job's plane has room for; a larger job's has one a rank."""
_CLOSED: Final = "the RDMA data plane of this process is closed"


class RdmaPlanePeer(Protocol):
    """The calls of the plane to a peer. See `peer.RdmaPeer`."""

    @property
    def counts(self) -> TransferCounts:
        """Of its transfers so far."""
        ...

    def look(self) -> None:
        """Something may have completed."""
        ...

    def timer_fired(self) -> None:
        """The time given to `set_timer` has come."""
        ...

    def cut(self, error: ZbmdError) -> None:
        """End now."""
        ...


class RdmaPlane:
    """The thread, and what it polls. Start it after forking; `close` it before the end.

    name, address: as `open_rdma_device`. segment: ours, which is registered whole: peers may read and
    write its inbox and read its arena, as those of one host may. A region of the inbox that is registered
    from now on has a key of its own, too, which ends with it. Raises `UserError` if the device cannot be
    used, or too little memory may be locked.
    """

    def __init__(self, name: str, address: str | None = None, *, segment: Segment) -> None:
        device = Device(name)
        self.port = choose_port(device, address)
        self.segment = segment
        self.native = Plane(device, min(max(segment.slots, ENDS_MIN), ENDS_MAX))
        self.registrations = Registrations(device)
        base, arena_offset = segment.base, segment.nbytes - segment.arena.capacity_bytes
        inbox_bytes = arena_offset - _native.OFF_END
        self.inbox_key = self.arena_key = 0
        if inbox_bytes:
            inbox = device.register(base + _native.OFF_END, inbox_bytes, remote_read=True, remote_write=True)
            self.native.keep(inbox)
            self.inbox_key = inbox.key
        if arena_offset < segment.nbytes:
            arena = device.register(base + arena_offset, segment.nbytes - arena_offset, remote_read=True)
            self.native.keep(arena)
            self.arena_key = arena.key
        self.native.keep(
            device.register(base + _native.OFF_DESCRIPTORS, _native.OFF_END - _native.OFF_DESCRIPTORS)
        )
        self._kept = segment.mapping
        self._keys = RdmaRegionKeys(device, base)
        segment.regions.keyed_by(self._keys)
        self._peers: dict[RdmaPlanePeer, None] = {}
        self._ended_counts = TransferCounts()
        self._timers: dict[RdmaPlanePeer, int] = {}
        self._calls: deque[Callable[[], None]] = deque()
        """Calls from other threads: connects, closes and aborts, a few of each peer."""
        self._lock = threading.Lock()
        self._turns = threading.Lock()
        """Held by the thread that finishes transfers and ends connections."""
        self._driver = 0
        self._drives = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="zbmd-rdma", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> TransferCounts:
        """Of the transfers of all peers, also of those that have ended."""
        with self._lock:
            counts, peers = self._ended_counts, list(self._peers)
        for peer in peers:
            counts = counts.plus(peer.counts)
        return counts

    def add(self, peer: RdmaPlanePeer) -> None:
        """Serve `peer` from now on. Raises `LinkClosed` once closed."""
        if not self.call(lambda: self._peers.update({peer: None})):
            peer.cut(LinkClosed(_CLOSED))
            raise LinkClosed(_CLOSED)

    def call(self, function: Callable[[], None]) -> bool:
        """Have the thread call `function`, in the order of these calls; False if the plane is closed."""
        with self._lock:
            if self._closing:
                return False
            self._calls.append(function)
        self.native.wake()
        return True

    def wait(
        self,
        slot: int,
        channel: int,
        value: int,
        *,
        group_mask: int = 0,
        deadline_ns: int = 0,
    ) -> int:
        """`Segment.wait`, by a thread that takes completions itself: no other is woken, and no Python runs.

        It polls three times as long as to be woken costs on this host (`native.spin_ns`), then has the device
        wake it, and after 20 ms in vain leaves that to the plane's own thread.
        """
        return self.native.wait(
            self._kept, slot, channel, value, group_mask=group_mask, deadline_ns=deadline_ns
        )

    # -- a thread that waits polls itself, as with `bulk.plane.DataPlane` ----------------------------------

    @contextmanager
    def driving(self) -> Generator[None]:
        """For the time of the context this thread, if no other does so, polls by `drive`."""
        ident = threading.get_ident()
        with self._lock:
            ours = self._driver == 0
            if ours:
                self._driver = ident
        try:
            yield
        finally:
            if ours:
                self.hand_over()
                self._driver = 0

    def drive(self) -> bool:
        """Take what has completed; whether there was anything. Only within `driving`."""
        if self._driver == threading.get_ident() and not self._drives:
            self._drives = True
            self.native.enter()
        found = self.native.poll()
        if found & ATTENTION or self._calls:
            self._turn()
        return bool(found)

    def park(self) -> None:
        """Sleep until something completes, but not for long."""
        self.native.doze(PARK_MS)

    def hand_over(self) -> None:
        """This thread polls no more for now: the plane's own does."""
        if self._driver == threading.get_ident() and self._drives:
            self._drives = False
            self.native.leave()

    def wake(self) -> None:
        """Have a thread that sleeps in `park` look again."""
        self.native.wake()

    # -- the thread ----------------------------------------------------------------------------------------

    def set_timer(self, peer: RdmaPlanePeer, at_ns: int) -> None:
        """Fire the peer's one timer at this monotonic time. On the thread."""
        self._timers[peer] = at_ns
        self.native.wake()

    def forget(self, peer: RdmaPlanePeer) -> None:
        """This peer has ended. On the thread."""
        with self._lock:
            if peer in self._peers:
                del self._peers[peer]
                self._ended_counts = self._ended_counts.plus(peer.counts)
        self._timers.pop(peer, None)

    def close(self) -> None:
        """End the thread and every connection at once; close peers first for an orderly end. Idempotent."""
        with self._lock:
            closing, self._closing = self._closing, True
        if closing:
            return
        self.native.stop()
        self._thread.join()
        self.segment.regions.keyed_by(None)
        self._keys.close()
        self.registrations.close()
        self.native.close()

    def _run(self) -> None:
        try:
            while self.native.run(self.native.spin_ns, min(self._timers.values(), default=NEVER_NS)):
                self._turn()
        finally:
            # Also after a bug of ours: nobody may wait for ever for a thread that has ended.
            with self._lock:
                self._closing = True
            with self._turns:
                while self._calls:
                    self._calls.popleft()()
                for peer in list(self._peers):
                    peer.cut(LinkClosed(_CLOSED))

    def _turn(self) -> None:
        if not self._turns.acquire(blocking=False):
            self.native.wake()  # whoever holds it may have looked already
            os.sched_yield()
            return
        try:
            while self._calls:
                self._calls.popleft()()
            for peer in list(self._peers):
                peer.look()
            now_ns = _native.now_ns()
            for peer in [peer for peer, at_ns in self._timers.items() if at_ns <= now_ns]:
                del self._timers[peer]
                peer.timer_fired()
        finally:
            self._turns.release()
