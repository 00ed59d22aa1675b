from asyncio import Future, TimerHandle
from collections.abc import Awaitable, Coroutine
from typing import Any, Final

from zbmd.actors.contracts import Contract
from zbmd.actors.core import wire
from zbmd.actors.core.cell import ActorCell
from zbmd.actors.core.native._mailbox import Delivery
from zbmd.actors.core.native._serving import Post
from zbmd.actors.core.peer import Peer
from zbmd.actors.core.ref import Ref
from zbmd.actors.errors import ActorError
from zbmd.transport.errors import PeerLost
from zbmd.transport.frames import FrameHeader
from zbmd.transport.link._link import FrameSink
from zbmd.transport.link.interface import Link

TIMEOUT_NS_MAX: Final[int]
"""A longer timeout counts as this."""
ASKS_PENDING_MAX: Final[int]
"""Asks of one process that wait for their answers."""
QUANTUM_NS_LOG2_MIN: Final[int]
QUANTA_PER_TIMEOUT_LOG2: Final[int]

Bucket = set[Future[Any]]

class Wheel:
    """The hot path of a `DeadlineWheel`, which has the rest: `_arm` sets its timer to an expiry."""

    _buckets: dict[int, Bucket]
    _expiries_ns: list[int]
    _timer: TimerHandle | None
    _timer_ns: int
    pending: int
    """Futures that are watched."""
    def __init__(self, *_: Any) -> None: ...
    def add(self, future: Future[Any], deadline_ns: int, timeout_ns: int) -> Bucket:
        """Watch `future`; the caller owes one `remove` with the bucket that is returned."""
    def remove(self, future: Future[Any], bucket: Bucket) -> None:
        """Stop watching `future`."""

class RemoteReply:
    """The way back to an asker of another process."""

    def __init__(self, peer: PeerCore, call: int) -> None: ...
    @property
    def peer(self) -> Peer: ...
    @property
    def call(self) -> int: ...
    def reply(self, message: Any) -> Awaitable[None] | None:
        """Send the answer. If the asker's process is gone there is nobody to tell."""
    def post(self, message: Any) -> None:
        """Send the answer, from the peer's bounded outbox if need be."""
    def fail(self, error: ActorError) -> None:
        """Send the error."""

class PeerCore(FrameSink):
    """The part of a peer that runs at every message. `Peer` has the rest."""

    name: str
    incarnation: int
    link: Link
    lost: PeerLost | None
    _system: Any
    """The `CoreSystem` that its link belongs to."""
    _codec: wire.Codec
    _outbox: Any
    _calls: dict[int, tuple[Future[Any], bool]]
    _next_call: int
    def __init__(self, *_: Any) -> None: ...
    def try_send(self, payload: wire.Payload, trace_id: int = 0) -> bool:
        """Send now, in order; False if there is no room. Raises `PeerLost`."""
    def answer(self, payload: wire.Payload) -> Awaitable[None] | None:
        """Send an answer; returns what waits for room if there was none."""
    def open_call(self, future: Future[Any], *, wants_ref: bool = False) -> int:
        """A number under which the answer will come back."""
    def close_call(self, call: int) -> None:
        """Expect no answer (any more): a late one is dropped."""
    def _on_frame(self, header: FrameHeader, payload: memoryview | bytes) -> None:
        """A frame has come: asks, answers and tells are dealt with here, the others by `_on_rarer`."""
    def _on_reply(self, m: wire.Reply) -> None:
        """An answer has come, wanted or not. Raises `RemoteProtocolError` if it is none."""
    def _deliver(self, to: str, incarnation: int, delivery: Delivery) -> None:
        """Put a message into a mailbox. Raises `DeadActor` or `MailboxFull`."""

class Asked:
    """An ask that is under way: what has to be undone, or waited for. One of cell and peer is None.

    waits: whether the message has still to be taken, for want of room; payload: what is to be sent then.
    """

    @property
    def future(self) -> Future[Any]: ...
    @property
    def call(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...
    @property
    def timeout_ns(self) -> int: ...
    @property
    def cell(self) -> ActorCell | None: ...
    @property
    def peer(self) -> Peer | None: ...
    @property
    def delivery(self) -> Delivery: ...
    @property
    def payload(self) -> wire.Payload: ...
    @property
    def waits(self) -> bool: ...
    def over(self) -> None:
        """Expect no answer any more. Idempotent."""

def ask(system: Post, ref: Ref, message: Contract, timeout: float | None) -> Asked:
    """Send a question. Raises all that `Ref.ask` does before there is anything to wait for."""

def envelope(system: Post, message: object) -> tuple[int, str]:
    """Trace id and sender's name for a message sent here and now. Raises `InvalidMessage`."""

def deadline(timeout: float | None, inherited_ns: int, whom: object) -> tuple[int, int]:
    """(deadline, time left), ns: the earlier of the timeout, in s, and what is inherited, if it is not 0.

    Raises `MissingDeadline` if there is neither.
    """

class Asking(Coroutine[Any, Any, Any]):
    """What `Ref.ask` returns: the short way, and at length where there is no way or no room yet.

    Collected while it waits, it is given up as by `close`.
    """

    def __init__(
        self, system: Asker, ref: Ref, message: Contract, wanted: type[Any] | None, timeout: float | None
    ) -> None: ...
    @property
    def ref(self) -> Ref:
        """The actor that is asked."""
    @property
    def delivery(self) -> Delivery | None:
        """The message that is there and waits to be answered, in this process."""
    @property
    def cr_await(self) -> Any: ...
    def send(self, value: object) -> Any: ...
    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any: ...
    def close(self) -> None: ...
    def __await__(self) -> Asking: ...
    def __iter__(self) -> Asking: ...
    def __next__(self) -> Any: ...

class Asker(Post):
    """A system that asks. `Messaging` has the rest: what is done at length, and where an ask fails."""

    def _ask(
        self, ref: Ref, message: Contract, wanted: type[Any] | None, timeout: float | None
    ) -> Coroutine[Any, Any, Any]:
        """What `Ref.ask` returns."""
