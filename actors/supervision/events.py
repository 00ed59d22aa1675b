"""Events and actions of the supervision machine, and the policies of children."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from zbmd.transport.errors import LocalProtocolError

BACK_OFF_FACTOR_MAX = 16


class Strategy(Enum):
    """Choose the siblings that are restarted together with a child that ended."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"


class Restart(Enum):
    """Choose when a child that ended is restarted."""

    PERMANENT = "permanent"  # always
    TRANSIENT = "transient"  # unless it ended normally
    TEMPORARY = "temporary"  # never, not even when a sibling's end stopped it


class AutoShutdown(Enum):
    """Choose whether a supervisor stops when significant children have ended for good."""

    NEVER = "never"
    ANY_SIGNIFICANT = "any_significant"  # with the first
    ALL_SIGNIFICANT = "all_significant"  # with the last


class ChildRefusal(Enum):
    """The reason for which a request concerning a child is refused."""

    captured_as = enum.nonmember("Refusal")
    UNKNOWN = "unknown"  # there is no such child
    PRESENT = "present"  # there is one, down; it may be restarted or deleted
    UP = "up"  # there is one, running or on its way
    STOPPING = "stopping"  # the supervisor does not run (any more)
    TOO_MANY = "too_many"  # it has as many children as it may have


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPolicy:
    """The state of one child in the machine.

    shutdown_ns: from being asked to stop to being killed; 0 kills without asking (OTP's brutal_kill), None
    waits for as long as it takes (infinity). significant: see `AutoShutdown`; not of a permanent child.
    """

    child: str
    restart: Restart = Restart.PERMANENT
    shutdown_ns: int | None = 5_000_000_000
    significant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """Delay the restarts of a child that keeps failing.

    Not at all after the first failure; then `first_ns`, and `factor` times more after each, up to `max_ns`. A
    share of up to `jitter` of it is left off, by `seed`, so that many do not come back at once. A child that
    has been up for the supervisor's period begins again.
    """

    first_ns: int = 100_000_000
    factor: int = 2
    max_ns: int = 30_000_000_000
    jitter: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.first_ns <= self.max_ns or not 1 <= self.factor <= BACK_OFF_FACTOR_MAX:
            raise LocalProtocolError(
                f"{self!r}: give 0 < first_ns <= max_ns, factor 1..{BACK_OFF_FACTOR_MAX}"
            )
        if not 0 <= self.jitter <= 1:
            raise LocalProtocolError(f"{self!r}: give a jitter of 0 to 1")

    def delay_ns(self, child: str, failures: int) -> int:
        """Return the delay after so many failures in a row, ns."""
        if failures < 2:
            return 0
        whole_ns = self.first_ns
        for _ in range(failures - 2):
            whole_ns *= self.factor
            if whole_ns >= self.max_ns:
                whole_ns = self.max_ns
                break
        digest = hashlib.blake2b(f"{self.seed} {child} {failures}".encode(), digest_size=8).digest()
        return int(whole_ns * (1 - self.jitter * int.from_bytes(digest) / (1 << 64)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequested:
    """Start all children, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStarted:
    """The child is up."""

    child: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStartFailed:
    """The child never came up."""

    child: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildExited:
    """The child ended. `normal`: it was done, or was asked to stop."""

    child: str
    normal: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildTimerFired:
    """The shutdown deadline of this incarnation of the child, or the back-off after it, has passed."""

    captured_as: ClassVar[str] = "TimerFired"
    child: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Stop all children in reverse order; with `kill`, kill all of them at once."""

    reason: str
    kill: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequested:
    """Start one more child, behind the others (`supervisor:start_child`). It is forgotten if that fails."""

    policy: ChildPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateRequested:
    """Stop a child and leave it down (`terminate_child`); a temporary one is forgotten."""

    child: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRequested:
    """Start a child that is down (`restart_child`)."""

    child: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteRequested:
    """Forget a child that is down (`delete_child`)."""

    child: str


Event = (
    StartRequested
    | ChildStarted
    | ChildStartFailed
    | ChildExited
    | ChildTimerFired
    | StopRequested
    | AddRequested
    | TerminateRequested
    | RestartRequested
    | DeleteRequested
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartChild:
    """Start the child; `incarnation` counts its starts from 1."""

    child: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopChild:
    """Ask the child to stop."""

    child: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillChild:
    """End the child without asking."""

    child: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveDown:
    """The child ended or never started, and stays down or is forgotten; nothing to perform."""

    child: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetChildTimer:
    """Deliver `ChildTimerFired` with the same fields at `at_ns`. A child has at most one timer."""

    captured_as: ClassVar[str] = "SetTimer"
    child: str
    incarnation: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelChildTimer:
    """The child ended in time: its timer is no longer wanted."""

    captured_as: ClassVar[str] = "CancelTimer"
    child: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Escalate:
    """All children are down and this supervisor has failed: its own supervisor decides. The last action."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """All children are down: it was requested, or significant children have ended. The last action."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The request concerning a child is refused."""

    child: str
    why: ChildRefusal


Action = (
    StartChild
    | StopChild
    | KillChild
    | LeaveDown
    | SetChildTimer
    | CancelChildTimer
    | Escalate
    | Stopped
    | Refuse
)
