from asyncio import Future
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from zbmd.actors.contracts import Contract
from zbmd.actors.core.context import ReplyTo
from zbmd.actors.core.peer import Peer
from zbmd.actors.errors import ActorError

SENDERS_WAITING_MAX: Final[int]
SIGNALS_MAX: Final[int]

def message_bytes(message: Contract) -> int:
    """About what a waiting message takes in memory. Of a long collection a sample is looked at."""

class LocalReply:
    """The way back to an asker of this process."""

    def __init__(self, future: Future[Any]) -> None: ...
    def reply(self, message: Any) -> None:
        """Answer, unless the asker has given up."""
    def post(self, message: Any) -> None:
        """As `reply`."""
    def fail(self, error: ActorError) -> None:
        """Raise `error` in the asker, unless it has given up."""

class Delivery:
    """One message on its way to a handler.

    `deadline_ns` is monotonic, 0 for none, 1 when the asker has given up; `sender` the sending actor's name
    or empty; `peer` the process it came from, None for this one.
    """

    @property
    def message(self) -> Any: ...
    @property
    def trace_id(self) -> int: ...
    @property
    def sender(self) -> str: ...
    @property
    def peer(self) -> Peer | None: ...
    deadline_ns: int
    reply_to: ReplyTo | None
    @property
    def waits(self) -> bool:
        """Whether it is in a mailbox."""
    def __init__(
        self,
        message: Any,
        deadline_ns: int,
        trace_id: int,
        sender: str,
        peer: Peer | None,
        reply_to: ReplyTo | None,
    ) -> None: ...

class MailboxMemory:
    """The bytes that wait in all mailboxes of a system, and their bound.

    refusal: makes the error for a message of so many bytes that does not fit.
    """

    def __init__(self, bound: int, refusal: Callable[[int], ActorError]) -> None: ...
    @property
    def used(self) -> int: ...
    @property
    def bound(self) -> int: ...

class Mailbox:
    """The lanes of one actor. Order within a lane is the order of arrival, waiting senders included."""

    def __init__(self, capacity: int, memory: MailboxMemory) -> None: ...
    def __len__(self) -> int: ...
    @property
    def signals(self) -> deque[Any] | None:
        """The priority lane: signals, handled before messages."""
    @property
    def dropped(self) -> int:
        """The number of telemetry messages that were dropped."""
    @property
    def nbytes(self) -> int:
        """The number of waiting messages, those stashed and those of waiting senders included."""
    @property
    def stashed(self) -> int: ...
    def offer(self, delivery: Delivery) -> bool:
        """Take the message, or say that the mailbox is full. Raises the memory's refusal."""
    def put(self, delivery: Delivery) -> None:
        """Take the message even if the mailbox is full. Raises the memory's refusal."""
    def wait(self, delivery: Delivery, room: Future[None]) -> None:
        """Queue a sender: `room` is set once its message has been taken in, in turn. Raises `MailboxFull`."""
    def post(self, signal: Any) -> bool:
        """Put a signal into the priority lane, or say that the lane is full."""
    def take(self) -> Delivery | None:
        """The next message, if any; a waiting sender's message moves up."""
    def rest(self) -> None:
        """Hold no memory for lanes that are empty."""
    def stash(self, delivery: Delivery) -> bool:
        """Put a message aside, or say that as many are aside as the mailbox may hold."""
    def unstash(self) -> int:
        """Put all that is aside before what waits, in order; returns how many."""
    def forget_stash(self) -> None:
        """Drop what is aside: a replay brings it again."""
    def withdraw(self, reply_to: ReplyTo) -> bool:
        """The asker there has given up: its message, if it waits, will not be handled."""
    def drain(self, why: str) -> None:
        """Fail every ask and every waiting sender with `DeadActor`: the actor has ended."""
