"""The ends of work: of a copy whose epoch is over, and of a run that cannot go on."""

from __future__ import annotations

from enum import Enum, auto

from zbmd.transport.errors import ZbmdError


class FailureKind(Enum):
    """Why a rank stopped."""

    DIVERGED = auto()
    STATE_LOST = auto()


class StepFailed(ZbmdError):
    """The run cannot continue on this rank. `kind` says why."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class WorkCancelled(ZbmdError):
    """Work was interrupted because its epoch has ended."""


class Cancellation:
    """Tells running work that its epoch has ended."""

    def __init__(self) -> None:
        self._cancelled = False  # a plain flag: one store and one load, and `check` is called often

    def cancel(self) -> None:
        """Ask the work to end; callable from any thread."""
        self._cancelled = True

    def check(self) -> None:
        """Raise `WorkCancelled` if the work must end. Call it between parts of the work."""
        if self._cancelled:
            raise WorkCancelled("the epoch of this work is over")
