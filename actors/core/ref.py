"""References: addresses of actors, wherever they live, and how the end of one is reported to its holder.

Ranks of all jobs have the same names. Within a job a name is enough; outside of it a **scope** is appended:
`rank0@1f` is rank 0 of job 1f. The name of a node is unique in the cluster and has no scope. A process that
joined the cluster by way of another, its **owner**, has that in its name: `session-7@node2` is a script that
joined by node 2, which knows its address. A reference is translated for the process that decodes it, so it
names the same actor wherever it is sent.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, overload

from zbmd.transport.errors import DeadlineExceeded, ZbmdError

if TYPE_CHECKING:
    from zbmd.actors.contracts import Contract

MARK: Final = "@"
_NODE: Final = re.compile(r"node[1-9]\d{0,18}", re.ASCII)


def scope_of_job(job: int) -> str:
    """Return the scope of a job's ranks; empty for processes of none."""
    return f"{job:x}" if job else ""


def is_global(process: str) -> bool:
    """Return whether a name means the same process everywhere in a cluster."""
    return MARK in process or _NODE.fullmatch(process) is not None


def owned_name(process: str, owner: str) -> str:
    """Return the global name of a process that joined the cluster by way of `owner`."""
    return f"{process}{MARK}{owner}"


def owner_of(process: str) -> str:
    """Return the process by way of which a process joined; empty for nodes and ranks."""
    where = process.partition(MARK)[2]
    return where if where and is_global(where) else ""


def scope_of(process: str) -> str:
    """Return the scope in a name, or an empty string."""
    return "" if owner_of(process) else process.partition(MARK)[2]


def abroad(process: str, scope: str) -> str:
    """Return the name that processes outside of `scope` use for one of its processes."""
    return f"{process}{MARK}{scope}" if scope and not is_global(process) else process


def at_home(process: str, scope: str) -> str:
    """Return the name that processes within `scope` use for a process with this global name."""
    base, mark, where = process.partition(MARK)
    return base if mark and where == scope else process


def external_name(process: str, scope: str) -> str:
    """Return the name in the hello of a link outside of views: always with the mark."""
    return f"{process}{MARK}{scope}"


def name_of_external(hello: str) -> str | None:
    """Return the name in such a hello; None if it is of another kind."""
    base, mark, scope = hello.rpartition(MARK)
    if not mark or not all(base.split(MARK)) or (not scope and not is_global(base)):
        return None
    return hello if scope else base


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
