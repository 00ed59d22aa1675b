"""The data plane's end of a peer over RDMA: one-sided transfers, and the connection's end.

Any thread puts and gets, and posts its work itself; what ends the connection is done on the plane's thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, assert_never

import numpy as np
import structlog
from numpy.typing import NDArray

from zbmd.transport.bulk.events import BulkLimits, BulkPeerInfo, CloseAsked, End, MarkLost, OnEnded
from zbmd.transport.errors import (
    DeadlineExceeded,
    LinkClosed,
    PeerLost,
    RemoteProtocolError,
    ZbmdError,
)
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.memory.region import (
    CheckedRegion,
    RegionHandle,
    flat_bytes,
    require_cell,
    require_owner,
    require_range,
)
from zbmd.transport.memory.transfer import DONE, Transfer
from zbmd.transport.native import _native
from zbmd.transport.rdma.closing import (
    ClosingEvent,
    Failed,
    GoodbyeArrived,
    GoodbyeCame,
    RdmaClosing,
    SayGoodbye,
)
from zbmd.transport.rdma.native._rdma import ACCESS_REFUSED, GET, MALFORMED, PUT
from zbmd.transport.rdma.native._rdma import End as NativeEnd
from zbmd.transport.rdma.plane import RdmaPlane
from zbmd.transport.rdma.setup import MemoryAt, why_broken
from zbmd.transport.rdma.transfer import TransferCounts

if TYPE_CHECKING:
    from typing_extensions import Buffer

TRIAL_BYTES: Final = 8
LET_GO_NS: Final = 1_000_000_000
"""Longest time that a caller that gives up waits for its transfers to drain; then the connection ends."""

log: Final = structlog.stdlib.get_logger("zbmd.transport.rdma")


class RdmaPeer:
    """One-sided transfers to and from one incarnation of a peer, as `bulk.peer.BulkPeer` over TCP.

    Send `at` to the peer, and give the peer's to `connect`, before anything is put. on_ended: called once
    from the plane's thread, when the connection has ended. Raises `UserError` if the device gives no queue
    pair, and `LinkClosed` once the plane is closed.
    """

    def __init__(
        self,
        plane: RdmaPlane,
        info: BulkPeerInfo,
        *,
        limits: BulkLimits | None = None,
        on_ended: OnEnded | None = None,
    ) -> None:
        limits = limits or BulkLimits()
        self.info = info
        self.ended = Transfer()
        """Done when the connection has ended and nothing is touched any more; raises why, if not orderly."""
        self.plane = plane
        self._segment = plane.segment
        self._mapping = plane.segment.mapping
        self._on_ended = on_ended
        self._psn = secrets.randbits(24)
        self._native = NativeEnd(
            plane.native,
            self._mapping,
            info.slot,
            plane.port.message_bytes_max,
            limits.transfers_max,
            plane.registrations.lend,
        )
        self._theirs: MemoryAt | None = None
        self._closing = RdmaClosing(peer=info.name, close_ns=limits.close_ns)
        self._heard = False
        self._trials = 0
        plane.add(self)

    @property
    def at(self) -> MemoryAt:
        """For the peer."""
        port, segment = self.plane.port, self._segment
        return MemoryAt(
            at=port.queue_pair(self._native.number, self._psn),
            base=self._mapping.address,
            nbytes=segment.nbytes,
            arena_offset=segment.nbytes - segment.arena.capacity_bytes,
            inbox_key=self.plane.inbox_key,
            arena_key=self.plane.arena_key,
        )

    @property
    def one_sided(self) -> bool:
        """The peer's device reaches our memory without us."""
        return True

    @property
    def counts(self) -> TransferCounts:
        """Of its transfers so far; the trial is none of them."""
        end = self._native
        return TransferCounts(
            in_segment=end.in_segment,
            reused=end.reused,
            registered=end.registered - self._trials,
            inlined=end.inlined,
            copied=end.copied,
        )

    def connect(self, theirs: MemoryAt) -> None:
        """Ready to receive and to send. Raises `UserError` if the device cannot, `RemoteProtocolError`."""
        if not _native.OFF_END <= theirs.arena_offset <= theirs.nbytes:
            raise RemoteProtocolError(f"{self.info.name} says what no segment is like: {theirs}")
        self._native.connect(self.plane.port.path_to(theirs.at, self._psn))
        self._theirs = theirs

    def trial(self) -> Transfer:
        """A read of a few bytes of the peer: done once the way there and back has been gone."""
        theirs = self._theirs
        if theirs is None or theirs.arena_offset < _native.OFF_END + TRIAL_BYTES:
            return DONE  # it lets us read nothing of its inbox
        into = memoryview(bytearray(TRIAL_BYTES))
        self._trials += 1
        return self._native.submit(GET, into, into, theirs.base + _native.OFF_END, theirs.inbox_key, 0, 0)

    def open_region(self, handle: RegionHandle) -> RdmaRegion:
        """The peer's region behind `handle`. Raises `RemoteProtocolError` if it is forged or stale."""
        require_owner(handle, slot=self.info.slot, incarnation=self.info.incarnation)
        theirs = self._theirs
        if theirs is None:
            raise LinkClosed(f"the memory of {self.info.name} is not connected yet")
        begin, end, key = (
            (_native.OFF_END, theirs.arena_offset, theirs.inbox_key)
            if handle.writable
            else (theirs.arena_offset, theirs.nbytes, theirs.arena_key)
        )
        if handle.offset < begin or handle.offset + handle.nbytes > end:
            raise RemoteProtocolError(
                f"a region handle of {self.info.name} has bytes {handle.offset}+{handle.nbytes}, outside its "
                f"{'inbox' if handle.writable else 'arena'} ({begin}..{end})"
            )
        return RdmaRegion(self._native, handle, theirs.base + handle.offset, handle.key or key)

    def settled(self) -> Transfer:
        """Done once all that was put and notified before has arrived; raises what ends the connection."""
        return self._native.settled()

    def let_go(self, transfers: Iterable[Transfer]) -> None:
        """Once this returns, `transfers` touch their buffers no more: they are done, or the connection cut.

        For who has to give up, and cannot wait for the peer for long.
        """
        deadline_ns = _native.now_ns() + LET_GO_NS
        for transfer in transfers:
            try:
                transfer.wait(deadline_ns)
            except DeadlineExceeded:
                self.abort(LinkClosed(f"{self.info.name} did not take what was given up in time"))
                transfer.wait()
            except ZbmdError:
                continue

    def close(self) -> None:
        """Finish what is under way, say goodbye and end, within `BulkLimits.close_ns`. Idempotent."""
        self._native.refuse_new(LinkClosed(f"the connection to the memory of {self.info.name} is closed"))
        self.plane.call(lambda: self._handle(CloseAsked()))

    def abort(self, error: ZbmdError) -> None:
        """End at once, with `error` for all that is under way: the peer is known to be gone. Idempotent."""
        self._native.refuse_new(error)
        self.plane.call(lambda: self.cut(error))

    # -- on the plane's thread ---------------------------------------------------------------------------

    def cut(self, error: ZbmdError) -> None:
        """End now, without a word to the peer."""
        self._handle(Failed(error=error))

    def look(self) -> None:
        """Something may have completed."""
        self._native.settle()
        if self._native.goodbye and not self._heard:
            self._heard = True
            self._handle(GoodbyeCame())
        if self._native.failed:
            self._handle(Failed(error=self._error()))

    def timer_fired(self) -> None:
        """The time asked for has come."""
        self._handle(TimerFired())

    def _error(self) -> ZbmdError:
        name, status = self.info.name, self._native.status
        if status == MALFORMED:
            return RemoteProtocolError(f"{name} sent a note that is none over RDMA")
        if status == ACCESS_REFUSED:
            return RemoteProtocolError(
                f"a put or get was refused between {name} and us: no region of that key, or it is released"
            )
        return PeerLost(name, why_broken(status))

    def _handle(self, event: ClosingEvent) -> None:
        for action in self._closing.handle(event, now_ns=_native.now_ns()):
            match action:
                case SayGoodbye():
                    self._native.refuse_new(LinkClosed(f"{self.info.name} has closed its memory"))
                    self._say_goodbye()
                case SetTimer(at_ns=at_ns):
                    self.plane.set_timer(self, at_ns)
                case End(error=error):
                    self._end(error)
                case MarkLost():
                    _native.set_lost(self._mapping.address, self.info.slot)
                case _:
                    assert_never(action)

    def _say_goodbye(self) -> None:
        goodbye = self._native.say_goodbye()
        goodbye.then(lambda: self._goodbye_done(goodbye))

    def _goodbye_done(self, goodbye: Transfer) -> None:
        if goodbye.error is None:
            self.plane.call(lambda: self._handle(GoodbyeArrived()))

    def _end(self, error: ZbmdError | None) -> None:
        self._native.close(error or LinkClosed(f"the memory of {self.info.name} is closed"))
        # Nobody writes on its behalf any more.
        self._segment.regions.writer_gone(self.info.slot)
        self.plane.forget(self)
        self.ended.finish(error)
        if self._on_ended is not None:
            self._on_ended(error)
        if error is not None:
            log.warning("RDMA connection ended", peer=self.info.name, reason=str(error))


class RdmaRegion(CheckedRegion):
    """See `zbmd.transport.memory.region.RemoteRegion`. Made by `RdmaPeer.open_region`.

    at: the address of its first byte in the peer. Raises `LinkFull` if too many transfers are under way.
    """

    def __init__(self, end: NativeEnd, handle: RegionHandle, at: int, key: int) -> None:
        super().__init__(handle)
        self._end = end
        self._at = at
        self._key = key

    def ping(
        self,
        src: Buffer | NDArray[Any],
        *,
        channel: int,
        value: int,
        first: bool,
        rounds: int,
        deadline_ns: int,
    ) -> NDArray[np.uint64]:
        """`rounds` puts of `src` and the peer's answers, natively; returns what each took, in nanoseconds.

        The peer does the same on its side with the same values, which begin at `value`; `first` says who
        begins. For whoever wants to know how quick a connection is. Raises as `put`, `PeerLost`, and
        `DeadlineExceeded` once CLOCK_MONOTONIC passes `deadline_ns`.
        """
        self._check_open()
        require_cell(channel, value)
        view = flat_bytes(src)
        require_range(self.handle, 0, view.nbytes)
        ended, samples_ns = self._end.ping(
            view,
            src,
            self._at,
            self._key,
            channel,
            value,
            first=first,
            rounds=rounds,
            deadline_ns=deadline_ns,
        )
        if ended == _native.WAIT_DEADLINE:
            raise DeadlineExceeded(f"slot {self.handle.slot} did not answer all {rounds} puts in time")
        if ended != _native.WAIT_OK:
            raise self._end.error or PeerLost(self.handle.slot, "it was lost while it was pinged")
        return samples_ns

    def _put(self, view: memoryview, offset: int, channel: int, value: int, owner: object) -> Transfer:
        return self._end.submit(PUT, view, owner, self._at + offset, self._key, channel, value)

    def _get(self, view: memoryview, offset: int, owner: object) -> Transfer:
        return self._end.submit(GET, view, owner, self._at + offset, self._key, 0, 0)

    def _notify(self, channel: int, value: int) -> None:
        self._end.submit(PUT, _NOTHING, None, self._at, self._key, channel, value)


_NOTHING: Final = memoryview(b"")
