"""Timers: the messages that an actor sends itself, and the deadlines of asks. None of them holds a task.

Deadlines share one timer: a wheel of buckets, each a set of futures with one expiry. After Varghese & Lauck,
"Hashed and hierarchical timing wheels" (1987), reduced to what asks need: a deadline is rounded up to a
multiple of a quantum of about 1/32 of its timeout (at least 1 ms). The number of buckets stays small at any
rate, and an answered ask costs one set removal.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from typing import TYPE_CHECKING

from zbmd.actors.contracts import Contract
from zbmd.actors.core.native._asking import Wheel
from zbmd.actors.core.native._mailbox import Delivery
from zbmd.actors.errors import ActorError, TooManyPending
from zbmd.transport.errors import LocalProtocolError

if TYPE_CHECKING:
    from zbmd.actors.core.native._serving import CellCore


class Expired(Exception):
    """Set on a future whose deadline passed. The code that awaits it raises an error with a text."""


class DeadlineWheel(Wheel):
    """Sets `Expired` on each future that is still in the wheel when its deadline passes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, expiry_ns: int, now_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = expiry_ns
        # A loop's clock is coarser than ours (uvloop's: 1 ms) and may fire early: then it is armed again.
        self._timer = self._loop.call_later(max(1e-3, (expiry_ns - now_ns) / 1e9), self._fire)

    def _fire(self) -> None:
        self._timer = None
        now_ns = time.monotonic_ns()
        while self._expiries_ns and self._expiries_ns[0] <= now_ns:
            for future in self._buckets.pop(heapq.heappop(self._expiries_ns)):
                if not future.done():
                    future.set_exception(Expired())
        if self._expiries_ns:
            self._arm(self._expiries_ns[0], now_ns)


TIMERS_PER_ACTOR_MAX = 256
PERIOD_S_MIN = 1e-3
DELAY_S_MAX = 30 * 24 * 3600.0


class Timer:
    """A message that an actor sends itself later. `missed`: how often the last one still waited."""

    __slots__ = ("_book", "_delivery", "_due_s", "_handle", "_message", "_number", "_period_s", "missed")

    def __init__(self, book: TimerBook, number: int, message: Contract, delay_s: float, again: bool) -> None:
        self._book = book
        self._number = number
        self._message = message
        self._period_s = delay_s if again else 0.0
        self._due_s = 0.0
        self._handle: asyncio.TimerHandle | None = None
        self._delivery: Delivery | None = None
        self.missed = 0

    def __deepcopy__(self, memo: dict[int, object]) -> Timer:
        """Itself: there is only one of it."""
        return self

    def cancel(self) -> None:
        """Stop the timer; a message that already waits in the mailbox is not handled."""
        self._book.cancel(self._number, self)

    @property
    def is_armed(self) -> bool:
        """Return whether it will fire, or has and its message waits."""
        return self._handle is not None or (self._delivery is not None and self._delivery.waits)

    def arm(self, loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
        """Begin (the system calls this)."""
        self._due_s = loop.time() + delay_s
        self._handle = loop.call_later(delay_s, self._fire)

    def disarm(self) -> None:
        """End (the system calls this)."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._delivery is not None:
            self._delivery.deadline_ns = 1  # if it waits, it will be passed over
            self._delivery = None

    def _fire(self) -> None:
        self._handle = None
        if self._delivery is not None and self._delivery.waits:
            self.missed += 1
        else:
            self._delivery = self._book.deliver(self._message)
        if self._period_s:
            loop = self._book.loop
            late_s = loop.time() - self._due_s
            skipped = max(0, int(late_s / self._period_s))
            self.missed += skipped
            self._due_s += (skipped + 1) * self._period_s
            self._handle = loop.call_later(max(0.0, self._due_s - loop.time()), self._fire)


class TimerBook:
    """The timers of one incarnation of an actor."""

    __slots__ = ("_cell", "_last", "_timers", "loop", "refused")

    def __init__(self, cell: CellCore) -> None:
        self._cell = cell
        self._last = 0
        self._timers: dict[int, Timer] = {}
        self.loop = cell.system.loop
        self.refused = 0
        """Messages for which the mailboxes of the process had no memory."""

    def set(self, message: Contract, delay_s: float, again: bool) -> Timer:
        """Return a timer. Raises `LocalProtocolError`, and `TooManyPending` if the actor has too many."""
        shortest = PERIOD_S_MIN if again else 0.0
        if not shortest <= delay_s <= DELAY_S_MAX:
            raise LocalProtocolError(f"a timer of {delay_s} s: give {shortest:g} to {DELAY_S_MAX:g}")
        if type(message) not in self._cell.handlers:
            raise LocalProtocolError(f"{self._cell.ref.address} has no handler for its own {message!r:.200}")
        traced = self._cell.traced
        if len(self._timers) >= TIMERS_PER_ACTOR_MAX:
            self._timers = {n: t for n, t in self._timers.items() if t.is_armed}
        if len(self._timers) >= TIMERS_PER_ACTOR_MAX:
            if traced is not None:
                traced.lose_track("it had too many timers, and when they fire is not recorded")
            raise TooManyPending(f"{self._cell.ref.address} has {TIMERS_PER_ACTOR_MAX} timers")
        self._last += 1
        timer = Timer(self, self._last, message, delay_s, again)
        if traced is None or traced.sets_timer(self._last, message, delay_s, again):
            self._timers[self._last] = timer
            timer.arm(self.loop, delay_s)
        return timer

    def cancel(self, number: int, timer: Timer) -> None:
        """Disarm one."""
        if self._cell.traced is not None:
            self._cell.traced.cancels_timer(number)
        timer.disarm()
        self._timers.pop(number, None)

    def deliver(self, message: Contract) -> Delivery | None:
        """Put a timer's message into the mailbox, even if that is full: each timer has one there at most."""
        cell = self._cell
        delivery = Delivery(message, 0, cell.system.new_trace(), cell.name, None, None)
        try:
            cell.mailbox.put(delivery)
        except ActorError:
            self.refused += 1
            return None
        cell.wake()
        return delivery

    def close(self) -> None:
        """End with the actor."""
        for timer in self._timers.values():
            timer.disarm()
        self._timers.clear()
