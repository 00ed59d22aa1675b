"""References: addresses of actors, wherever they live; and how the end of one is reported to its holder."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from zbmd.actors.contracts import Contract
import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from zbmd.transport.errors import DeadlineExceeded, ZbmdError

ContractT = TypeVar("ContractT", bound="Contract")


class Messenger(Protocol):
    """Sends for the references of a process: its actor system."""

    def _tell(self, ref: Ref, message: Contract) -> Coroutine[Any, Any, None]: ...

    def _ask(
        self, ref: Ref, message: Contract, wanted: type[Any] | None, timeout: float | None
    ) -> Coroutine[Any, Any, Any]: ...


class Ref:
    """The address of one actor, of this or of another process.

    `incarnation` 0 addresses the holder of the name at the arrival of the message; any other addresses one
    incarnation, in the incarnation `process_incarnation` of the process. References may be fields of
    contracts. Messages from one sender to one actor arrive in order, each at most once.
    """

    __zbmd_wire_name__ = "zbmd.Ref"
    __slots__ = ("_system", "actor", "incarnation", "process", "process_incarnation")

    def __init__(
        self, system: Messenger, process: str, process_incarnation: int, actor: str, incarnation: int
    ) -> None:
        self._system = system
        self.process = process
        self.process_incarnation = process_incarnation
        self.actor = actor
        self.incarnation = incarnation

    @property
    def address(self) -> str:
        """`"process/actor"`."""
        return f"{self.process}/{self.actor}"

    def tell(self, message: Contract) -> Coroutine[Any, Any, None]:
        """Send `message` without a reply. Waits while a local mailbox or the link is full.

        Raises `DeadActor` or `PeerLost` if that is known now. A message that another process rejects later
        comes back to a sending actor as an `Undelivered` signal; otherwise it is logged.
        """
        return self._system._tell(self, message)

    @overload
    def ask(self, message: Contract, *, timeout: float | None = None) -> Coroutine[Any, Any, Any]: ...

    @overload
    def ask(
        self, message: Contract, *, reply: type[ContractT], timeout: float | None = None
    ) -> Coroutine[Any, Any, ContractT]: ...

    def ask(
        self, message: Contract, *, reply: type[Any] | None = None, timeout: float | None = None
    ) -> Coroutine[Any, Any, Any]:
        """Send `message` and return the reply, of type `reply` if that is given.

        timeout: seconds. A handler that runs under a deadline inherits it: the earlier of the two holds, and
        `timeout` may be left out. Elsewhere it is required (`MissingDeadline`).
        Raises `DeadlineExceeded`, `DeadActor`, `MailboxFull` (another process), `ActorFailed`,
        `NotUnderstood`, `UnknownContract`, `InvalidMessage`, `PeerLost`, `TooManyPending`.
        A cancelled ask is withdrawn: a waiting message is not handled; a running handler is cancelled
        (`asyncio.CancelledError` at its `await`), while its actor lives on. A handler shields work that must
        not be interrupted (`asyncio.shield`).
        """
        return self._system._ask(self, message, reply, timeout)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    def __deepcopy__(self, memo: dict[int, Any]) -> Ref:
        """Return itself: an address is immutable."""
        return self

    def __repr__(self) -> str:
        numbers = f"#{self.process_incarnation}.{self.incarnation}" if self.incarnation else ""
        return f"<Ref {self.address}{numbers}>"

    def key(self) -> tuple[str, int, str, int]:
        """Return (process, its incarnation, actor, its incarnation): equal references have equal keys."""
        return (self.process, self.process_incarnation, self.actor, self.incarnation)


# --- how the end of an actor is reported ------------------------------------------------------------------


class ReasonKind(Enum):
    """The kinds of end an actor can have."""

    NORMAL = "normal"  # it had nothing more to do
    SHUTDOWN = "shutdown"  # it was asked to stop
    KILLED = "killed"
    FAILED = "failed"  # it raised
    LOST = "lost"  # its process ended or was cut off
    NO_ACTOR = "no_actor"  # there was none to begin with


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an actor ended."""

    kind: ReasonKind
    text: str = ""

    @property
    def is_normal(self) -> bool:
        """Return whether a transient child is left down after it."""
        return self.kind is ReasonKind.NORMAL or self.kind is ReasonKind.SHUTDOWN

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.text}" if self.text else self.kind.value


class Signal:
    """A notice from the system to an actor; signals come before messages, and their handlers are optional."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Down(Signal):
    """A monitored actor ended. `ref` names the incarnation that ended."""

    ref: Ref
    reason: Reason


@dataclass(frozen=True, slots=True)
class Exited(Signal):
    """A linked actor ended; delivered only to actors with `trap_exit`, others end with it."""

    ref: Ref
    reason: Reason


@dataclass(frozen=True, slots=True)
class Undelivered(Signal):
    """A message this actor told to another process was rejected there. `contract`: its `"id/version"`."""

    ref: Ref
    contract: str
    error: ZbmdError


class Monitor:
    """Delivers one `Down` for `ref`, also if its process is lost or there is no such actor."""

    __slots__ = ("_cancel", "_down", "ref")

    def __init__(self, ref: Ref, loop: asyncio.AbstractEventLoop) -> None:
        self.ref = ref
        self._down: asyncio.Future[Down] = loop.create_future()
        self._cancel: Callable[[], None] | None = None

    def armed(self, cancel: Callable[[], None]) -> None:
        """Set what `cancel` undoes (the system calls this)."""
        self._cancel = cancel

    def deliver(self, down: Down) -> None:
        """Take the notice (the system calls this)."""
        if not self._down.done():
            self._down.set_result(down)

    async def down(self, *, timeout: float | None = None) -> Down:
        """Wait for the end. timeout: seconds, None for as long as it takes; raises `DeadlineExceeded`."""
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self._down)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.ref!r} is still there after {timeout} s") from None

    def cancel(self) -> None:
        """Watch no longer; `down()` will not return."""
        if self._cancel is not None and not self._down.done():
            self._cancel()
            self._cancel = None
