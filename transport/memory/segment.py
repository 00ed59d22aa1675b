"""A process's shared segment: control words, an inbox that peers write, an arena that peers read.

The layout is native/segment.h's. What peers write is in a memfd of each process incarnation, so a killed
process leaves nothing behind, and no peer of a dead incarnation writes to its replacement. The arena may lie
in a memfd that outlives the process, in which its replacement finds what it has kept
(`zbmd.transport.memory.kept`).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from zbmd.transport.errors import LinkFull, LocalProtocolError, PeerLost, RemoteProtocolError, ZbmdError
from zbmd.transport.memory._region import Cells, Deferred, Pinned, ShmRegion
from zbmd.transport.memory.arena import Arena
from zbmd.transport.memory.frame_loans import FrameLender
from zbmd.transport.memory.kept import KeptBlocks, file_of
from zbmd.transport.memory.memfd import (
    PAGE_BYTES,
    TABLE_BYTES,
    PlacedMemory,
    map_from_peer,
    place,
    sealed_size,
)
from zbmd.transport.memory.region import RegionHandle, Regions, RemoteRegion, require_owner
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native import _native
from zbmd.transport.native._native import Mapping

# Copies that would hold up an event loop: done in order, for one peer, by a thread of their own.

COPIES_MAX: Final = 1024
"""Copies and notifications that wait for one peer."""


class Performer(Protocol):
    """A region, as this queue sees it."""

    def perform(self, kind: int, buffer: Pinned | None, offset: int, channel: int, value: int) -> None:
        """Do now what was put off."""
        ...


class CopyQueue(Deferred):
    """What all regions of one peer have put off. `deferred` says how much that is; while it is not 0,
    whatever follows must queue up too, or it would overtake.

    The thread lives for as long as there is something to do.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._queue: deque[tuple[Transfer, Performer, int, Pinned | None, int, int, int]] = deque()
        self._thread: threading.Thread | None = None

    def submit(
        self, region: Performer, kind: int, buffer: Pinned | None, offset: int, channel: int, value: int
    ) -> Transfer:
        """Have `region` perform it after all that was submitted before. Raises `LinkFull`."""
        transfer = Transfer(buffer)
        with self._lock:
            if len(self._queue) >= COPIES_MAX:
                raise LinkFull(
                    f"{COPIES_MAX} copies wait for this peer already; await one of their transfers"
                )
            self._queue.append((transfer, region, kind, buffer, offset, channel, value))
            self.defer(1)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="zbmd-copy")
                self._thread.start()
        return transfer

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                transfer, region, kind, buffer, offset, channel, value = self._queue.popleft()
            error: ZbmdError | None = None
            try:
                region.perform(kind, buffer, offset, channel, value)
            except ZbmdError as found:
                error = found
            del buffer
            with self._lock:
                self.defer(-1)
            transfer.finish(error)


NODE_SLOT = _native.MAX_SLOTS - 1
"""The slots below it are for ranks."""


class _Ends:
    """The lost processes that are proven to touch our memory no more.

    Apart from the segment, so that arenas can ask without keeping it alive.
    """

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self.proven = 0

    def any_unsettled(self) -> bool:
        return _native.lost_mask(self._mapping.address) & ~self.proven != 0


class Segment(Cells):
    """This process's own segment, mapped read-write."""

    def __init__(self, placed: PlacedMemory, *, slot: int, incarnation: int, slots: int) -> None:
        mapping, arena_offset = placed.mapping, placed.arena_offset
        self._fds = [placed.fd] if placed.arena_fd is None else [placed.fd, placed.arena_fd]
        self.placement = placed.placement
        """The pages and the NUMA node that it got."""
        self._mapping: Mapping | None = mapping
        self._open_cells(mapping)
        self.slot = slot
        self.incarnation = incarnation
        self.slots = slots
        """Of peers that may watch us or be dialed: those from 0 to one below it, and the node's."""
        self._ends = _Ends(mapping)
        inbox_bytes = arena_offset - _native.OFF_END
        self.inbox = Arena(mapping, _native.OFF_END, inbox_bytes, unsettled=self._ends.any_unsettled)
        self._filler = placed.filler
        table = 0 if placed.arena_fd is None else TABLE_BYTES
        self.arena = Arena(
            mapping,
            arena_offset + table,
            mapping.nbytes - arena_offset - table,
            filler=placed.filler,
            was_used=placed.was_used,
        )
        self.kept = KeptBlocks(self.arena, mapping, arena_offset) if table else None
        """Blocks that outlive this process; None: nothing does."""
        self.kept_file = file_of(placed.arena_fd) if placed.arena_fd is not None else None
        """The identity of the memfd that they are in: see `file_of`."""
        self.frame_lender = FrameLender(self.arena)
        self.regions = Regions(slot=slot, incarnation=incarnation, inbox=self.inbox, arena=self.arena)

    @classmethod
    def create(
        cls,
        *,
        slot: int,
        incarnation: int,
        arena_bytes: int,
        inbox_bytes: int,
        slots: int = NODE_SLOT,
        kept_fd: int | None = None,
    ) -> Segment:
        """Allocate and lay out a segment; both sizes are rounded up to pages.

        slots: how many ranks the job has, at most; a small job's deaths are noticed sooner for it. kept_fd: a
        memfd for the arena that outlives this process, which may be its predecessor's; it belongs to the
        segment from now on.

        Raises `OutOfMemory` if the sizes do not fit into the machine's or cgroup's memory,
        `LocalProtocolError` on a slot, number of slots, incarnation or size out of range.
        """
        if not 0 <= slots <= NODE_SLOT:
            raise LocalProtocolError(f"{slots} slots for ranks: there are 0 to {NODE_SLOT}")
        if not 0 <= slot < _native.MAX_SLOTS:
            raise LocalProtocolError(f"slot {slot} is not in 0..{_native.MAX_SLOTS - 1}")
        if not 0 < incarnation < 1 << 64 or arena_bytes < 0 or inbox_bytes < 0:
            raise LocalProtocolError(
                f"segment with incarnation {incarnation}, arena {arena_bytes}, inbox {inbox_bytes}: "
                "the incarnation must be a positive u64 and the sizes not negative"
            )
        try:
            placed = place(
                f"zbmd-segment-{slot}",
                head_bytes=_native.OFF_END + inbox_bytes,
                arena_bytes=arena_bytes,
                kept_fd=kept_fd,
            )
        except BaseException:
            if kept_fd is not None:
                os.close(kept_fd)
            raise
        if kept_fd is not None and placed.arena_fd is None:
            os.close(kept_fd)
        mapping = placed.mapping
        mapping.store64(_native.OFF_TOTAL, mapping.nbytes)
        mapping.store64(_native.OFF_INBOX, _native.OFF_END)
        mapping.store64(_native.OFF_ARENA, placed.arena_offset)
        mapping.store64(_native.OFF_PID, os.getpid())
        mapping.store64(_native.OFF_INCARNATION, incarnation)
        mapping.store32(_native.OFF_SLOT, slot)
        mapping.store64(_native.OFF_MAGIC, _native.MAGIC)
        return cls(placed, slot=slot, incarnation=incarnation, slots=slots)

    @property
    def fds(self) -> Sequence[int]:
        """The memfds, to hand to peers: that of the segment and, if it is apart, that of the arena.

        Raises `LocalProtocolError` once closed.
        """
        if not self._fds:
            raise self._closed()
        return self._fds

    @property
    def mapping(self) -> Mapping:
        """The mapping. Raises `LocalProtocolError` once closed."""
        if self._mapping is None:
            raise self._closed()
        return self._mapping

    @property
    def base(self) -> int:
        """The segment's address, for native code; valid until `close` or the end of this object."""
        return self.mapping.address

    @property
    def nbytes(self) -> int:
        """Bytes in the whole segment."""
        return self.mapping.nbytes

    def lost_mask(self) -> int:
        """Bit s is set once the process in slot s is known to have ended."""
        return _native.lost_mask(self.mapping.address)

    def set_lost(self, slot: int) -> None:
        """Mark the process in `slot`, which is on another host, as lost: waits for it end."""
        _native.set_lost(self.base, slot)

    def extend_waits(self, until_ns: int) -> None:
        """Have no wait for a notification here time out before a monotonic time. From any thread."""
        mapping = self._mapping
        if mapping is not None:
            mapping.store64(_native.OFF_PATIENT, until_ns)

    def clear_lost(self, slot: int) -> None:
        """Forget the death of the process in `slot`, which is proven, for a replacement takes its place."""
        self.end_proven(slot)
        _native.clear_lost(self.base, slot)
        self._ends.proven &= ~(1 << slot)

    def end_proven(self, slot: int) -> None:
        """Release for reuse what the lost process in `slot` could write: it can store no more. Idempotent.

        Call it once the kernel has reported the end of the process or closed its socket, or, if it was on
        another host, once nobody stores on its behalf any more. A death notice proves nothing: it comes
        before the process's other threads have stopped.
        """
        self.regions.writer_gone(slot)
        self._ends.proven |= 1 << slot

    def close(self) -> None:
        """Close the memfds and let go of the mapping, which ends with the last array in it. Idempotent."""
        self._mapping = None
        self._close_cells()
        if self._filler is not None:
            self._filler.stop()
        while self._fds:
            os.close(self._fds.pop())

    def _closed(self) -> LocalProtocolError:
        return LocalProtocolError(f"the segment of slot {self.slot} is closed")


class PeerSegment:
    """A peer's segment: control words and inbox mapped read-write, the arena read-only."""

    def __init__(self, mapping: Mapping, *, slot: int, incarnation: int, pid: int, arena_offset: int) -> None:
        self._mapping: Mapping | None = mapping
        self._has_ended = False
        self._copies = CopyQueue()
        self.slot = slot
        self.incarnation = incarnation
        self.pid = pid
        self.inbox_offset = _native.OFF_END
        self.arena_offset = arena_offset

    @classmethod
    def attach(cls, fds: Sequence[int], *, slot: int) -> PeerSegment:
        """Map the segment behind one or two `fds`, which the peer in `slot` sent; they stay the caller's.

        Everything in it is untrusted: raises `RemoteProtocolError` on a memfd that can still shrink or
        cannot be mapped, a wrong magic number, sizes that do not fit the files, another slot, or incarnation
        0, and `OutOfMemory` if there is no room to map it.
        """
        fd, arena_fd = fds[0], fds[1] if len(fds) > 1 else None
        head = total = sealed_size(fd)
        if total < _native.OFF_END:
            raise RemoteProtocolError(f"the segment of slot {slot} has {total} bytes, too few for its header")
        header = map_from_peer(fd, head, 0)  # the whole, since huge pages cannot be mapped in part
        if arena_fd is not None:
            total += sealed_size(arena_fd)
        arena_offset = header.load64(_native.OFF_ARENA)
        incarnation = header.load64(_native.OFF_INCARNATION)
        sizes_fit = (
            header.load64(_native.OFF_MAGIC) == _native.MAGIC
            and header.load64(_native.OFF_TOTAL) == total
            and header.load64(_native.OFF_INBOX) == _native.OFF_END
            and _native.OFF_END <= arena_offset <= total
            and arena_offset % PAGE_BYTES == 0
            and (arena_fd is None or arena_offset == head < total)
        )
        if not sizes_fit:
            raise RemoteProtocolError(f"what the peer in slot {slot} sent as its segment is not one of ours")
        if header.load32(_native.OFF_SLOT) != slot or incarnation == 0:
            raise RemoteProtocolError(
                f"the segment sent for slot {slot} says slot {header.load32(_native.OFF_SLOT)}, "
                f"incarnation {incarnation}"
            )
        pid = header.load64(_native.OFF_PID)
        mapping = map_from_peer(fd, total, arena_offset, arena_fd, head)
        return cls(mapping, slot=slot, incarnation=incarnation, pid=pid, arena_offset=arena_offset)

    @property
    def mapping(self) -> Mapping:
        """The mapping. Raises `LocalProtocolError` once closed, and `PeerLost` after `end`."""
        if self._has_ended:
            raise PeerLost(self.slot, f"its incarnation {self.incarnation} has ended, its memory is unmapped")
        if self._mapping is None:
            raise LocalProtocolError(f"the mapping of slot {self.slot}'s segment is closed")
        return self._mapping

    @property
    def base(self) -> int:
        """The address of the peer's segment here; valid until `close` or the end of this object."""
        return self.mapping.address

    @property
    def nbytes(self) -> int:
        """Bytes in the whole segment."""
        return self.mapping.nbytes

    def notify(self, our_slot: int, channel: int, value: int) -> None:
        """Publish `value` in the peer's cell of (our slot, channel), after all that we stored before it."""
        mapping = self.mapping
        _native.notify(mapping.address, our_slot, channel, value)

    def open_region(self, handle: RegionHandle, own: Segment) -> ShmRegion:
        """The peer's region behind `handle`; its notifications name `own` as their sender.

        It keeps this segment mapped. Raises `RemoteProtocolError` on a handle that is forged, stale or out
        of bounds: its numbers are a peer's.
        """
        require_owner(handle, slot=self.slot, incarnation=self.incarnation)
        begin, end = (
            (self.inbox_offset, self.arena_offset) if handle.writable else (self.arena_offset, self.nbytes)
        )
        if handle.offset < begin or handle.offset + handle.nbytes > end:
            raise RemoteProtocolError(
                f"a region handle of slot {self.slot} has bytes {handle.offset}+{handle.nbytes}, outside its "
                f"{'inbox' if handle.writable else 'arena'} ({begin}..{end})"
            )
        return ShmRegion(own.mapping, own.slot, self.mapping, handle, self._copies)

    def arena_view(self, offset: int, nbytes: int) -> memoryview:
        """A read-only view of [offset, offset + nbytes), counted from the segment's base.

        Raises `RemoteProtocolError` if that is not wholly inside the peer's arena: the numbers are a peer's.
        """
        self.require_arena(offset, nbytes)
        return self.mapping.view(offset, nbytes)

    def require_arena(self, offset: int, nbytes: int) -> None:
        """Raise `RemoteProtocolError` unless [offset, offset + nbytes) is wholly inside the peer's arena."""
        if offset < self.arena_offset or nbytes < 0 or offset + nbytes > self.nbytes:
            raise RemoteProtocolError(
                f"range {offset}+{nbytes} is outside the arena of slot {self.slot} "
                f"({self.arena_offset}..{self.nbytes})"
            )

    def close(self) -> None:
        """Let go of the mapping, which ends with the last view of it. Idempotent."""
        self._mapping = None

    def end(self) -> None:
        """`close`, since the peer has ended: later uses raise `PeerLost`. Idempotent."""
        self._has_ended = True
        self.close()


# What a process holds of a peer's memory, wherever that is: mapped on one host, over TCP between two.


class PeerMemory(Protocol):
    """The memory of one incarnation of one peer: a `PeerSegment` or a `RemoteMemory`."""

    @property
    def slot(self) -> int:
        """The index of the peer's cells, and of its bit in the lost mask, in our segment."""
        ...

    @property
    def incarnation(self) -> int:
        """Of the peer."""
        ...

    @property
    def arena_offset(self) -> int:
        """The offset of its arena, behind its inbox, bytes from the base of its segment."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes in its whole segment."""
        ...

    def open_region(self, handle: RegionHandle, own: Segment) -> RemoteRegion:
        """The peer's region behind `handle`; its notifications name `own` as their sender.

        Raises `RemoteProtocolError` on a handle that is forged, stale or out of bounds.
        """
        ...

    def close(self) -> None:
        """Let go of it. Idempotent."""
        ...
