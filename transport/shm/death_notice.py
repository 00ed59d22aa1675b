"""Death notice on one host: a life thread holds futex words, which peers watch (life.h has the mechanism).

A notice says that a process's life thread has ended. It is not a fence: other threads of the dead process
may still be storing, so memory that it could write is reused only once its pidfd or socket confirms the end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native._native import LifeThread as NativeLifeThread
from zbmd.transport.native._native import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathNotice:
    """The end of a peer, as its watcher saw it."""

    at_ns: int
    """CLOCK_MONOTONIC, taken by the native watcher."""
    clean: bool
    """Whether the peer had said goodbye first."""


OnDeath = Callable[[int, DeathNotice], None]
"""Takes the peer's slot and the notice; called on the loop."""


class LifeThread:
    """Hold this process's futex words until `goodbye`, or until the process ends in any other way.

    Start it before the segment is handed to any peer. Raises OSError if no thread can be had.
    """

    def __init__(self, segment: Segment) -> None:
        self._life = NativeLifeThread(segment.mapping, segment.slots)

    def goodbye(self) -> None:
        """Tell every watcher that this process leaves cleanly. Idempotent."""
        self._life.leave()


class DeathWatch:
    """Watches peers for their end, one parked native thread a peer.

    On a notice the thread itself, without the GIL, sets the peer's bit in our own lost mask and wakes our
    native waits; the loop hears of it after that.
    """

    def __init__(self, own: Segment, loop: asyncio.AbstractEventLoop) -> None:
        self._own = own
        self._mapping = own.mapping
        self._loop = loop
        self._watches: dict[int, tuple[Watch, OnDeath]] = {}
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._event_fd, self._on_notice)

    def watch(self, peer: PeerSegment, callback: OnDeath) -> None:
        """Call `callback` once when the process behind `peer` has ended, even if it already has.

        Raises `RemoteProtocolError` if the peer never started its life thread, and `LocalProtocolError`
        if its slot is watched already or the watch is closed.
        """
        if self._event_fd < 0:
            raise LocalProtocolError("this death watch is closed")
        if peer.slot in self._watches or peer.slot == self._own.slot:
            raise LocalProtocolError(f"slot {peer.slot} is our own or watched already: unwatch it first")
        watch = Watch(self._mapping, self._own.slot, peer.mapping, peer.slot, self._event_fd)
        self._watches[peer.slot] = (watch, callback)

    def unwatch(self, slot: int) -> None:
        """Stop watching; a notice that has not reached its callback yet is dropped. Idempotent."""
        watch = self._watches.pop(slot, None)
        if watch is not None:
            watch[0].stop()

    def close(self) -> None:
        """Stop every watcher thread and close the eventfd. Idempotent."""
        for slot in list(self._watches):
            self.unwatch(slot)
        if self._event_fd >= 0:
            self._loop.remove_reader(self._event_fd)
            os.close(self._event_fd)
            self._event_fd = -1

    def _on_notice(self) -> None:
        os.eventfd_read(self._event_fd)
        for slot, (watch, callback) in list(self._watches.items()):
            notice = watch.notice()
            if notice is None:
                continue
            del self._watches[slot]
            watch.stop()
            at_ns, clean = notice
            # On its own turn of the loop, so that one callback's error cannot swallow another's notice.
            self._loop.call_soon(callback, slot, DeathNotice(at_ns=at_ns, clean=clean))
