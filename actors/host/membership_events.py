"""Events and actions of the machine that supervises the ranks of one host (`membership`)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from enum import Enum

from zbmd.actors.view import Outcome, View
from zbmd.transport.machine import SetTimer, TimerFired


class RunPhase(Enum):
    """Phase of the run."""

    captured_as = enum.nonmember("Phase")
    NEW = "new"
    RUNNING = "running"
    STOPPING = "stopping"  # asked to stop, the grace period runs
    KILLING = "killing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequested:
    """Start all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """The process of this incarnation exists."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkFailed:
    """The process of this incarnation could not be made."""

    rank: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """This incarnation listens and waits for a view; the other fields are those of `Member`."""

    rank: int
    incarnation: int
    address: str
    host: str = ""
    tcp_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """This incarnation has a link to every other member of the view of `epoch` and waits to enter it."""

    rank: int
    incarnation: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost:
    """This incarnation lost its link to another member in the entered view of `epoch`."""

    rank: int
    incarnation: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossProven:
    """This incarnation died without a goodbye, by the kernel's proof; its exit status is not known yet."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The process of this incarnation is gone. `code`: its exit code, or minus the signal that ended it."""

    rank: int
    incarnation: int
    code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """End the run; with `kill`, at once. `outcome`: whether that is a failure."""

    reason: str
    kill: bool = False
    outcome: Outcome = Outcome.STOPPED


Event = (
    StartRequested
    | Forked
    | ForkFailed
    | Joined
    | Linked
    | LinkLost
    | LossProven
    | Exited
    | StopRequested
    | TimerFired
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Make the process of this incarnation; answered by `Forked` or `ForkFailed`."""

    rank: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallView:
    """Send the view to each of its members."""

    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterView:
    """Tell every member that all are linked; from now on a member may leave without harming the others."""

    epoch: int
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceDown:
    """Tell every joined rank in `to` that this incarnation is dead."""

    rank: int
    incarnation: int
    reason: str
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Ask this incarnation's process to end (SIGTERM)."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End this incarnation's process (SIGKILL)."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run is over. The last action."""

    outcome: Outcome
    reason: str


Action = Fork | InstallView | EnterView | AnnounceDown | Terminate | Kill | SetTimer | RunEnded
