"""The views of a job, and what the membership machine (`membership`) hears and says of them.

A view is a list of incarnations that take part, under an epoch that only grows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

_RANK_NAME = re.compile(r"rank(\d{1,3})", re.ASCII)


def child_id(rank: int) -> str:
    """The supervision machine's id, and the process name, of a rank."""
    return f"rank{rank}"


def rank_of(name: str) -> int | None:
    """The rank whose process is called `name`; None if it is no rank's."""
    found = _RANK_NAME.fullmatch(name)
    return int(found[1]) if found is not None else None


RANKS_MAX = (
    1022  # slots 0..1021 of a segment (ZBMD_MAX_SLOTS in transport/native/segment.h); 1023 is the node's
)
EPOCH_MAX = 2**32 - 1
USAGE_EXIT_CODE = 2  # as argparse: what was asked for cannot be done, and asking again will not help


class OnLoss(Enum):
    """What the run does when a rank is lost."""

    REPLACE = "replace"
    SHRINK = "shrink"
    STOP = "stop"


class RankState(Enum):
    """Where one rank's current incarnation stands."""

    WAITING = "waiting"  # not forked yet
    STARTING = "starting"  # forked or being forked, not joined
    JOINED = "joined"
    FINISHED = "finished"  # ended normally
    LOST = "lost"  # ended otherwise; a replacement may be on its way


class Phase(Enum):
    """Where the run stands."""

    NEW = "new"
    RUNNING = "running"
    STOPPING = "stopping"  # asked to stop, the grace period runs
    KILLING = "killing"
    ENDED = "ended"


class Outcome(Enum):
    """How a run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # by request


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One live process of a view. `address`: the name its listener answers to on its own host.

    host: which host it is on, an opaque name; two members share memory if it is the same. tcp_address: where
    members on other hosts dial it, `host:port`; empty if it listens for none.
    """

    rank: int
    incarnation: int
    address: str
    host: str = ""
    tcp_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Who takes part, as agreed for `epoch`. `finished` and `lost`: ranks that will not come back."""

    epoch: int
    members: tuple[Member, ...]
    finished: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks, ascending."""
        return tuple(m.rank for m in self.members)

    def member(self, rank: int) -> Member | None:
        """The member with this rank, if it is in the view."""
        return next((m for m in self.members if m.rank == rank), None)


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
    """This incarnation has lost its link to another member in the view of `epoch`, which it has entered."""

    rank: int
    incarnation: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossProven:
    """The kernel says that this incarnation died without a goodbye; its exit status is not known yet."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """The time asked for by the last `SetTimer` has come."""


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
    """Tell every member that all are linked: from here on any of them may leave without harm to another."""

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
class SetTimer:
    """Deliver `TimerFired` at `at_ns`; replaces the timer before it."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run is over. The last action."""

    outcome: Outcome
    reason: str


Action = Fork | InstallView | EnterView | AnnounceDown | Terminate | Kill | SetTimer | RunEnded
