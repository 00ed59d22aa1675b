"""Decides when the communicators of another backend are made and aborted. Sans-I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, assert_never

from zbmd.transport.errors import LocalProtocolError, ZbmdError


@dataclass(frozen=True, slots=True)
class Made:
    """The group of an epoch is there."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The group of an epoch has lost a member, or is given up. epoch: 0 for the one under way."""

    epoch: int
    error: ZbmdError


@dataclass(frozen=True, slots=True)
class Closed:
    """The process group is destroyed."""


Event: TypeAlias = Made | Lost | Closed


@dataclass(frozen=True, slots=True)
class Make:
    """Make communicators of this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End what waits in the communicators, and give them up."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Give the communicators up, of which no member is lost."""


Action: TypeAlias = Make | Abort | Shutdown


class Stage(Enum):
    """Of the communicators of one process group."""

    NONE = "none"
    LIVE = "live"
    ABORTED = "aborted"
    CLOSED = "closed"


class CompanionMachine:
    """Decides when the communicators of one process group are made and aborted."""

    def __init__(self) -> None:
        self.stage = Stage.NONE
        self.epoch = 0
        self.error: ZbmdError | None = None
        """Why they were aborted."""

    def handle(self, event: Event, *, now_ns: int = 0) -> list[Action]:
        """Return the actions to carry out. Raises `LocalProtocolError` on an event that cannot come."""
        actions = self._dispatch(event)
        self.check_invariants()
        return actions

    def _dispatch(self, event: Event) -> list[Action]:
        match event:
            case Made(epoch=epoch):
                return self._made(epoch)
            case Lost(epoch=epoch, error=error):
                if self.stage is not Stage.LIVE or epoch not in (0, self.epoch):
                    return []  # the notice of an epoch that is over, or a second one
                self.stage, self.error = Stage.ABORTED, error
                return [Abort()]
            case Closed():
                before, self.stage = self.stage, Stage.CLOSED
                return [Shutdown()] if before is Stage.LIVE else []
            case _:
                assert_never(event)

    def _made(self, epoch: int) -> list[Action]:
        if self.stage is Stage.CLOSED:
            raise LocalProtocolError("a process group that is destroyed is made again")
        if self.stage is not Stage.NONE and epoch <= self.epoch:
            raise LocalProtocolError(f"communicators of epoch {epoch} after those of epoch {self.epoch}")
        # The former ones may be live: another group of this process has lost a rank, and all begin again.
        abort: list[Action] = [Abort()] if self.stage is Stage.LIVE else []
        self.stage, self.epoch, self.error = Stage.LIVE, epoch, None
        return [*abort, Make(epoch)]

    def check_invariants(self) -> None:
        """Raise `AssertionError` if an invariant does not hold."""
        assert (self.stage is Stage.ABORTED) <= (self.error is not None), "they were aborted for no reason"
        assert self.stage is not Stage.LIVE or self.error is None, "live ones have an error"
