"""The context of a running handler: its actor and message, and replies after it has returned."""

from __future__ import annotations

import time
import weakref
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from zbmd.actors.contracts import Contract, contract_tag
from zbmd.actors.errors import ActorError, DeadActor, NoReply, TooManyPending
from zbmd.transport.errors import LocalProtocolError

if TYPE_CHECKING:
    from zbmd.actors.core.native._mailbox import Delivery
    from zbmd.actors.core.native._serving import CellCore

current_delivery: ContextVar[Delivery | None] = ContextVar("zbmd_delivery", default=None)
current_cell: ContextVar[CellCore | None] = ContextVar("zbmd_cell", default=None)


def trace_id() -> int:
    """Return the trace id of the message being handled, 0 outside of handlers."""
    delivery = current_delivery.get()
    return 0 if delivery is None else delivery.trace_id


def deadline_ns() -> int:
    """Return the deadline (monotonic, ns) under which the current handler runs, 0 for none."""
    delivery = current_delivery.get()
    return 0 if delivery is None else delivery.deadline_ns


def sender_process() -> str:
    """Return the process that sent the message being handled, proven by its link; "" for our own."""
    delivery = current_delivery.get()
    return "" if delivery is None or delivery.peer is None else delivery.peer.name


class ActorClock:
    """Clocks of an actor. Use them instead of `time.time()`, whose results cannot be replayed.

    While the actor is recorded, the clocks stand still between two of its awaits: they show the time at which
    the running turn began. Do not poll them in a loop without an await. Time a computation with
    `time.perf_counter()`, and let nothing depend on its result.
    """

    __slots__ = ("_cell",)

    def __init__(self, cell: CellCore) -> None:
        self._cell = cell

    def monotonic_ns(self) -> int:
        """Return the monotonic time, ns."""
        traced = self._cell.traced
        return time.monotonic_ns() if traced is None else traced.now_ns

    def wall_ns(self) -> int:
        """Return the wall-clock time, ns since 1970."""
        traced = self._cell.traced
        return time.time_ns() if traced is None else traced.wall_ns()


class ReplyTo(Protocol):
    """The way back to an asker."""

    def reply(self, message: Any) -> Awaitable[None] | None:
        """Send the answer; what it returns, if anything, waits until there is room on the way back."""
        ...

    def post(self, message: Any) -> None:
        """Send the answer without waiting for room."""
        ...

    def fail(self, error: ActorError) -> None:
        """Send an error."""
        ...


DEFERRED_MAX = 65_536


class DeferredReply:
    """Returned by a handler in place of a reply: see `Actor.defer` and `Actor.stash`."""

    __slots__ = ("__weakref__",)


DEFERRED = DeferredReply()


class Deferred(DeferredReply):
    """A reply that is owed. Give it with `reply` or `fail`, once, from any task of the actor's loop.

    If the last reference to it is dropped before, its asker gets `NoReply`; if the actor ends, `DeadActor`.
    """

    __slots__ = ("_book", "_number", "_replies", "_reply_to", "_what")

    def __init__(
        self,
        book: DeferredBook,
        number: int,
        reply_to: ReplyTo | None,
        replies: frozenset[type],
        what: str,
    ) -> None:
        self._book = book
        self._number = number
        self._reply_to = reply_to
        self._replies = replies
        self._what = what

    def __deepcopy__(self, memo: dict[int, object]) -> Deferred:
        """Itself: an answer is owed once."""
        return self

    def __repr__(self) -> str:
        return f"<Deferred answer to {self._what}>"

    def reply(self, message: Contract | None) -> None:
        """Answer, with one of the contracts that the handler is annotated to return.

        Raises `LocalProtocolError` if it is another, or if the answer has been given.
        """
        if type(message) not in self._replies:
            raise LocalProtocolError(f"{message!r:.200} is none of the answers to {self._what}")
        if not self._settle():
            raise LocalProtocolError(f"the answer to {self._what} has been given already")
        self._book.replied(self._number, message)
        if self._reply_to is not None:
            self._reply_to.post(message)

    def fail(self, error: ActorError) -> None:
        """Raise `error` in the asker. Raises `LocalProtocolError` if the answer has been given."""
        if not self._settle():
            raise LocalProtocolError(f"the answer to {self._what} has been given already")
        self._book.failed(self._number, error)
        if self._reply_to is not None:
            self._reply_to.fail(error)

    def abandon(self, error: ActorError) -> None:
        """Raise `error` in the asker, if no reply was given."""
        if self._settle() and self._reply_to is not None:
            self._reply_to.fail(error)

    def is_owed_to(self, reply_to: ReplyTo) -> bool:
        """Return whether this is the answer that is awaited there."""
        return self._reply_to is reply_to

    def void(self) -> bool:
        """Drop the reply; return False if it was given."""
        return self._settle()

    def _settle(self) -> bool:
        return self._book.open.pop(self._number, None) is not None

    def __del__(self) -> None:
        if self._book.open.pop(self._number, None) is not None and self._reply_to is not None:
            self._book.dropped(self._reply_to, self._what)


class DeferredBook:
    """The deferred replies of one incarnation of an actor."""

    __slots__ = ("_cell", "_last", "open")

    def __init__(self, cell: CellCore) -> None:
        self._cell = cell
        self._last = 0
        self.open: dict[int, weakref.ref[Deferred]] = {}

    def defer(self, delivery: Delivery) -> Deferred:
        """Defer the reply to the current message."""
        cell = self._cell
        if len(self.open) >= DEFERRED_MAX:
            raise TooManyPending(f"{cell.ref.address} owes {DEFERRED_MAX} answers")
        replies = cell.handlers[type(delivery.message)].replies
        reply_to, delivery.reply_to = delivery.reply_to, None
        self._last += 1
        what = f"{contract_tag(delivery.message)} by {cell.ref.address}"
        deferred = Deferred(self, self._last, reply_to, replies, what)
        self.open[self._last] = weakref.ref(deferred)
        if cell.traced is not None:
            cell.traced.defers(self._last)
        return deferred

    def replied(self, number: int, message: Contract | None) -> None:
        """Record a deferred reply that the actor itself gives."""
        if self._cell.traced is not None and current_cell.get() is self._cell:
            self._cell.traced.replies_later(number, message)

    def failed(self, number: int, error: ActorError) -> None:
        """Record an error that the actor itself gives as a deferred reply."""
        if self._cell.traced is not None and current_cell.get() is self._cell:
            self._cell.traced.fails_later(number, error)

    def dropped(self, reply_to: ReplyTo, what: str) -> None:
        """Fail the asker of a dropped reply. May run on any thread that collects garbage."""
        loop = self._cell.system.loop
        if not loop.is_closed():
            loop.call_soon_threadsafe(reply_to.fail, NoReply(f"the answer to {what} was put off and dropped"))

    def reclaim(self, reply_to: ReplyTo) -> bool:
        """Take a deferred reply back, so that it can be given again; return False if it was given."""
        for found in list(self.open.values()):
            deferred = found()
            if deferred is not None and deferred.is_owed_to(reply_to):
                return deferred.void()
        return False

    def close(self, why: str) -> None:
        """End with the actor."""
        for number in list(self.open):
            found = self.open.get(number)
            deferred = None if found is None else found()
            if deferred is not None:
                deferred.abandon(DeadActor(why))
