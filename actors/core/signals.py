"""How an actor's end is reported: reasons, signals, and monitors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from zbmd.actors.core.ref import Ref
from zbmd.transport.errors import DeadlineExceeded, ZbmdError


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
    """A monitored actor ended. `ref` names the life that ended."""

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
