"""The data-plane thread: one a process, moves the bulk bytes of all its peers on other hosts.

It is Python, but while bytes move it is inside the kernel without the GIL: every call moves up to 4 MiB.
Under a MAC a second thread tags what is moved meanwhile, without the GIL, too (`secure.protection`).

A thread that waits for what the plane brings may take its turns itself (`driving`, `drive`): a message then
costs no wake-up on its way. The plane's own thread stands by meanwhile, and is back when nobody drives.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Final, Protocol

import structlog

from zbmd.transport.errors import LinkClosed, LocalProtocolError, ZbmdError
from zbmd.transport.host.topology.cpus import usable_cpus
from zbmd.transport.native import _native
from zbmd.transport.secure.protection import TagHelper

EVENTS_PER_WAKE: Final = 64
"""Sockets that are served before the thread looks at what was asked for."""
IDLE_MS: Final = 60_000
"""The thread looks around at least this often."""
SILENCE_CHECK_NS: Final = 250_000_000
"""Interval of the check that hosts acknowledge what is sent to them."""
PARK_MS: Final = 1
"""Longest sleep of a driving thread: what it waits for may end without a wake-up."""
STAND_BY_MS: Final = 2
"""The thread takes its turns again when nobody has driven for so long."""
HELPER_CPUS_MIN: Final = 3
"""With fewer processors nobody makes tags beside the thread: it has one, and the network another."""
_READ: Final = select.EPOLLIN | select.EPOLLRDHUP
log: Final = structlog.stdlib.get_logger("zbmd.transport.bulk")


class DataPlanePeer(Protocol):
    """The calls of the plane to a peer, always on the thread that takes a turn. See `peer.BulkPeer`."""

    def readable(self, number: int, /) -> None:
        """Bytes may have arrived on a stripe."""
        ...

    def writable(self, number: int, /) -> None:
        """A stripe's socket may take bytes."""
        ...

    def flush(self) -> None:
        """Send on every stripe that has something to send."""
        ...

    def timer_fired(self) -> None:
        """The time given to `set_timer` has come."""
        ...

    def check_stripes(self) -> None:
        """Use more stripes if those in use are too few for the path."""
        ...

    def check_silence(self) -> bool:
        """Give the peer up if its host is silent; return whether there is something to check again."""
        ...

    def cut(self, error: ZbmdError) -> None:
        """End now."""
        ...


class Driving(AbstractContextManager[None]):
    """See `DataPlane.driving`."""

    __slots__ = ("_ours", "_plane")

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._ours = False

    def __enter__(self) -> None:
        self._ours = self._plane.take_wheel()

    def __exit__(self, *_: object) -> None:
        self._plane.leave_wheel(ours=self._ours)


class DataPlane:
    """The thread and what it watches. Start it after forking; `close` it before the end."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        """Calls from other threads, bounded by their peers' limits on transfers."""
        self._peers: dict[DataPlanePeer, None] = {}
        self._watched: dict[int, tuple[DataPlanePeer, int, int]] = {}
        """File descriptor to peer, stripe, and the events it is registered for."""
        self._again: dict[tuple[DataPlanePeer, int], None] = {}
        """Stripes that may have more to read than their turn allowed."""
        self._to_flush: dict[DataPlanePeer, None] = {}
        self._held_back: dict[DataPlanePeer, None] = {}
        """Those that have acknowledgements alone to send: they leave with what follows, or before a sleep."""
        self._timers: dict[DataPlanePeer, int] = {}
        self._owed: dict[DataPlanePeer, None] = {}
        """Those whose host may have something to acknowledge."""
        self._check_at_ns = 0
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self.tag_helper = TagHelper() if usable_cpus() >= HELPER_CPUS_MIN else None
        """Makes tags beside the thread; None where it would have no processor for that."""
        self._turns = threading.Lock()
        """Held by the thread that takes a turn: all that a turn touches is its."""
        self._driver = 0
        """The thread that drives, by its ident; 0: none."""
        self._driven = 0
        """Turns that were not the thread's own."""
        self._stands_by = False
        self._in_stand_by = False
        """The thread is in `_stand_by`, and looks for what is held back when it leaves it for good."""
        self._wake_poll = select.poll()
        self._wake_poll.register(self._wake_fd, select.POLLIN)
        self._asleep = False
        self._parked = False
        self._parking = threading.Lock()
        """Held by the thread that sleeps in `park`, and to close what it sleeps on."""
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="zbmd-data", daemon=True)
        self._thread.start()

    def add(self, peer: DataPlanePeer) -> None:
        """Serve `peer` from now on. Raises `LocalProtocolError` once closed."""
        if not self.call(lambda: self._peers.update({peer: None})):
            raise LocalProtocolError("the data plane is closed")

    def call(self, function: Callable[[], None]) -> bool:
        """Have the thread call `function`, in the order of these calls; False if the plane is closed."""
        with self._lock:
            if self._closing:
                return False
            self._calls.append(function)
            # A thread that is about to sleep sets its flag first and checks `_calls` after; a driver calls
            # next.
            if self._parked or (self._asleep and self._driver != threading.get_ident()):
                os.eventfd_write(self._wake_fd, 1)
        return True

    def driving(self) -> Driving:
        """For the time of the context this thread, if no other does so, performs its own calls by `drive`.

        It waits for nothing else than by `drive`, or by any means after `hand_over`.
        """
        return Driving(self)

    def take_wheel(self) -> bool:
        """Have the calling thread drive from now on; False if another, or it itself, does already."""
        with self._lock:
            if self._driver:
                return False
            self._driver = threading.get_ident()
            return True

    def leave_wheel(self, *, ours: bool) -> None:
        """The end of a `driving`. ours: what `take_wheel` said."""
        if ours:
            self._driver = 0
            left_over = bool(self._held_back) and not self._in_stand_by
            if left_over or self._is_due():
                self._take_turn(whole=left_over)
        if self._is_due() or self._any_unsent() or (self._held_back and not self._in_stand_by):
            self.hand_over()

    def at_once(self, send: Callable[[], bool]) -> bool:
        """Have the thread that drives do this now, if nothing was asked for before; whether it was done."""
        if self._driver != threading.get_ident() or self._calls or not self._turns.acquire(blocking=False):
            return False
        try:
            self._stands_by = True
            self._driven += 1
            return not self._closing and not self._to_flush and send()
        finally:
            self._turns.release()

    @property
    def is_driven(self) -> bool:
        """Whether a thread waits for what comes, and takes turns."""
        return self._driver != 0

    def _is_due(self) -> bool:
        return bool(self._calls or self._to_flush or self._again)

    def _any_unsent(self) -> bool:
        with self._turns:
            return any(events & select.EPOLLOUT for _, _, events in self._watched.values())

    def drive(self) -> bool:
        """Take one turn on the calling thread, without waiting; whether there was anything to do."""
        return self._take_turn(whole=False)

    def _take_turn(self, *, whole: bool) -> bool:
        if not self._turns.acquire(blocking=False):
            return False
        try:
            if self._closing:
                return False
            self._stands_by = True
            self._driven += 1
            return self._turn(self._epoll.poll(0, EVENTS_PER_WAKE), whole=whole)
        finally:
            self._turns.release()

    def park(self) -> None:
        """Sleep on behalf of the thread that drives until there may be something to do, or for `PARK_MS`."""
        if not self._turns.acquire(timeout=PARK_MS / 1e3):
            return  # somebody else's turn lasts
        self._release_held_back()
        self._turns.release()
        if not self._parking.acquire(blocking=False):
            return
        try:
            self._parked = True
            if not (self._is_due() or self._closing):
                self._epoll.poll(PARK_MS / 1e3, 1)  # `drive` finds it again
        finally:
            self._parked = False
            self._parking.release()

    def wake(self) -> None:
        """Have a thread that sleeps in `park` look around; from any thread."""
        with self._lock:
            if self._parked and not self._closing:
                os.eventfd_write(self._wake_fd, 1)

    def hand_over(self) -> None:
        """The thread is to take its turns again at once: the caller drives no more, for now."""
        with self._lock:
            self._stands_by = False
            if self._asleep and not self._closing:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """End the thread and every connection at once; close peers first for an orderly end. Idempotent."""
        with self._lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join()

    # -- for peers, on the thread --------------------------------------------------------------------

    def watch(self, sock: socket.socket, peer: DataPlanePeer, stripe: int) -> None:
        """Tell `peer` when the stripe's socket can be read."""
        self._watched[sock.fileno()] = peer, stripe, _READ
        self._epoll.register(sock.fileno(), _READ)

    def want_write(self, sock: socket.socket, *, wanted: bool) -> None:
        """Tell the peer, too, when the socket can be written, or not any more."""
        fd = sock.fileno()
        peer, stripe, events = self._watched[fd]
        self._set_events(fd, peer, stripe, events | select.EPOLLOUT if wanted else events & ~select.EPOLLOUT)

    def want_read(self, sock: socket.socket, *, wanted: bool) -> None:
        """Tell the peer when the socket can be read, or not any more."""
        fd = sock.fileno()
        peer, stripe, events = self._watched[fd]
        self._set_events(fd, peer, stripe, events | _READ if wanted else events & ~_READ)

    def unwatch(self, sock: socket.socket) -> None:
        """Forget a socket that is about to be closed."""
        if self._watched.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock.fileno())

    def again(self, peer: DataPlanePeer, stripe: int) -> None:
        """Read this stripe again after the others have had their turn."""
        self._again[peer, stripe] = None

    def flush_soon(self, peer: DataPlanePeer) -> None:
        """Have `peer` send what it has, before the thread sleeps."""
        self._held_back.pop(peer, None)
        self._to_flush[peer] = None

    def flush_later(self, peer: DataPlanePeer) -> None:
        """Have `peer` send what it has with what follows, or else soon: nobody works on for it."""
        if peer not in self._to_flush:
            self._held_back[peer] = None

    def flushed(self, peer: DataPlanePeer) -> None:
        """All that was held back for `peer` has left."""
        self._held_back.pop(peer, None)

    def check_silence_of(self, peer: DataPlanePeer) -> None:
        """Something has been sent to this peer."""
        if peer not in self._owed:
            if not self._owed:
                self._check_at_ns = _native.now_ns() + SILENCE_CHECK_NS
            self._owed[peer] = None

    def set_timer(self, peer: DataPlanePeer, at_ns: int) -> None:
        """Fire the peer's one timer at this monotonic time."""
        self._timers[peer] = at_ns

    def forget(self, peer: DataPlanePeer) -> None:
        """This peer has ended and has no stripe left."""
        self._peers.pop(peer, None)
        self._timers.pop(peer, None)
        self._to_flush.pop(peer, None)
        self._held_back.pop(peer, None)
        self._owed.pop(peer, None)
        for key in [key for key in self._again if key[0] is peer]:
            del self._again[key]

    def _set_events(self, fd: int, peer: DataPlanePeer, stripe: int, events: int) -> None:
        if events != self._watched[fd][2]:
            self._watched[fd] = peer, stripe, events
            self._epoll.modify(fd, events)

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                if self._stands_by:
                    self._stand_by()
                    continue
                found = self._poll()
                if not self._stands_by:  # what was found is there for the driver, too
                    with self._turns:
                        self._turn(found, whole=True)
        finally:
            # Also after a bug of ours: nobody may wait for ever for a thread that has ended.
            with self._lock:
                self._closing = True
            with self._turns:
                self._end()

    def _end(self) -> None:
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            error = LinkClosed("the data plane of this process is closed")
            for peer in list(self._peers):
                peer.cut(error)
            if self.tag_helper is not None:
                self.tag_helper.close()
            with self._parking:
                self._epoll.close()
            os.close(self._wake_fd)

    def _stand_by(self) -> None:
        """Somebody drives: wait until nobody does, or somebody else calls."""
        seen = self._driven
        self._asleep = self._in_stand_by = True
        try:
            if not self._stands_by:
                return
            # What the driver has asked for it does itself, and who else asks wakes us.
            called = (self._calls and not self._driver) or self._closing or self._wake_poll.poll(STAND_BY_MS)
        finally:
            self._asleep = self._in_stand_by = False
        if called:
            self._read_wake_up()
            with self._turns:
                self._turn((), whole=True)
        elif self._driven == seen and not self._turns.locked():  # a long turn is one, too
            self._stands_by = False

    def _turn(self, found: Sequence[tuple[int, int]], *, whole: bool) -> bool:
        """Do what there is to do, and read and write the sockets `found`; whether there was anything.

        whole: send what is held back, too.
        """
        some = bool(found or self._calls or self._to_flush or self._again)
        while self._calls:
            self._calls.popleft()()
        self._flush()
        again, self._again = self._again, {}
        for peer, stripe in again:
            peer.readable(stripe)
        self._fire_timers()
        for fd, events in found:
            watched = self._watched.get(fd)
            if watched is None:
                if fd == self._wake_fd:
                    self._read_wake_up()
                continue
            peer, stripe, _ = watched
            if events & ~select.EPOLLOUT:
                peer.readable(stripe)
            if events & select.EPOLLOUT:
                peer.writable(stripe)
        if whole:
            self._release_held_back()
        self._flush()
        return some

    def _release_held_back(self) -> None:
        self._to_flush.update(self._held_back)
        self._held_back.clear()

    def _flush(self) -> None:
        while self._to_flush:
            self._to_flush.popitem()[0].flush()

    def _read_wake_up(self) -> None:
        with suppress(BlockingIOError):  # the other, driver or thread, was faster
            os.eventfd_read(self._wake_fd)

    def _poll(self) -> list[tuple[int, int]]:
        self._asleep = True
        busy = self._is_due() or self._held_back or self._closing
        try:
            return self._epoll.poll(0 if busy else self._sleep_s(), EVENTS_PER_WAKE)
        finally:
            self._asleep = False

    def _sleep_s(self) -> float:
        times_ns = [*self._timers.values(), *([self._check_at_ns] if self._owed else [])]
        if not times_ns:
            return IDLE_MS / 1e3
        return max(0.0, min(IDLE_MS / 1e3, (min(times_ns) - _native.now_ns()) / 1e9))

    def _fire_timers(self) -> None:
        if not self._timers and not self._owed:
            return
        now_ns = _native.now_ns()
        for peer in [peer for peer, at_ns in self._timers.items() if at_ns <= now_ns]:
            del self._timers[peer]
            peer.timer_fired()
        if self._owed and now_ns >= self._check_at_ns:
            self._check_at_ns = now_ns + SILENCE_CHECK_NS
            for peer in list(self._owed):
                peer.check_stripes()
                if not peer.check_silence():
                    self._owed.pop(peer, None)
