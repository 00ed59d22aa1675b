"""Bounded mailboxes: a lane for messages, a priority lane for signals, and a stated policy when full."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zbmd.actors.errors import ActorError, DeadActor, MailboxFull
from zbmd.transport.errors import LocalProtocolError

if TYPE_CHECKING:
    from zbmd.actors.peer import Peer

MAILBOX_MESSAGES = 1024
MAILBOX_MESSAGES_MAX = 1_048_576
SENDERS_WAITING_MAX = 65_536
SIGNALS_MAX = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxSpec:
    """How many messages wait for an actor, and what happens to the next.

    Full, it makes a local sender wait and refuses a remote one with `MailboxFull`. With `drop_oldest` the
    oldest message makes room instead; if it was an ask, its asker gets `MailboxFull`.
    """

    capacity: int = MAILBOX_MESSAGES
    drop_oldest: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.capacity <= MAILBOX_MESSAGES_MAX:
            raise LocalProtocolError(f"mailbox capacity {self.capacity}: give 1..{MAILBOX_MESSAGES_MAX}")


class ReplyTo(Protocol):
    """Where the answer to an ask goes."""

    def reply(self, message: Any) -> Awaitable[None] | None:
        """Send the answer; what it returns, if anything, waits until there is room on the way back."""
        ...

    def fail(self, error: ActorError) -> None:
        """Send an error."""
        ...


class LocalReply:
    """The way back to an asker of this process."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future

    def reply(self, message: Any) -> None:
        """Answer, unless the asker has given up."""
        if not self._future.done():
            self._future.set_result(message)

    def fail(self, error: ActorError) -> None:
        """Raise `error` in the asker, unless it has given up."""
        if not self._future.done():
            self._future.set_exception(error)


class Delivery:
    """One message on its way to a handler.

    `deadline_ns` is monotonic, 0 for none; `sender` the sending actor's name or empty; `peer` the process
    it came from, None for this one.
    """

    __slots__ = ("deadline_ns", "message", "peer", "reply_to", "sender", "trace_id")

    def __init__(
        self,
        message: Any,
        deadline_ns: int,
        trace_id: int,
        sender: str,
        peer: Peer | None,
        reply_to: ReplyTo | None,
    ) -> None:
        self.message = message
        self.deadline_ns = deadline_ns
        self.trace_id = trace_id
        self.sender = sender
        self.peer = peer
        self.reply_to = reply_to


class Mailbox:
    """The lanes of one actor. Order within a lane is the order of arrival, waiting senders included."""

    __slots__ = ("_messages", "_spec", "_waiting", "dropped", "signals")

    def __init__(self, spec: MailboxSpec) -> None:
        self._spec = spec
        self._messages: deque[Delivery] = deque()
        self._waiting: deque[tuple[Delivery, asyncio.Future[None]]] = deque()
        self.signals: deque[Any] = deque()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._messages)

    def offer(self, delivery: Delivery) -> bool:
        """Take the message, or say that the mailbox is full."""
        messages = self._messages
        if len(messages) < self._spec.capacity and not self._waiting:
            messages.append(delivery)
            return True
        if not self._spec.drop_oldest:
            return False
        oldest = messages.popleft()
        self.dropped += 1
        if oldest.reply_to is not None:
            oldest.reply_to.fail(MailboxFull("the message was the oldest in a full mailbox and was dropped"))
        messages.append(delivery)
        return True

    def wait(self, delivery: Delivery, room: asyncio.Future[None]) -> None:
        """Queue a sender: `room` is set once its message has been taken in, in turn."""
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()
        if len(self._waiting) >= SENDERS_WAITING_MAX:
            raise MailboxFull(f"{SENDERS_WAITING_MAX} senders already wait for this mailbox")
        self._waiting.append((delivery, room))

    def take(self) -> Delivery | None:
        """The next message, if any; a waiting sender's message moves up."""
        if not self._messages:
            return None
        delivery = self._messages.popleft()
        while self._waiting:
            waiting, room = self._waiting.popleft()
            # A sender that gave up (deadline, cancellation) has taken its message with it.
            if not room.done():
                self._messages.append(waiting)
                room.set_result(None)
                break
        return delivery

    def drain(self, why: str) -> None:
        """Fail every ask and every waiting sender with `DeadActor`: the actor has ended."""
        self.signals.clear()
        while self._messages:
            delivery = self._messages.popleft()
            if delivery.reply_to is not None:
                delivery.reply_to.fail(DeadActor(why))
        while self._waiting:
            _, room = self._waiting.popleft()
            if not room.done():
                room.set_exception(DeadActor(why))
