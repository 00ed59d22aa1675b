"""What happens while the code of a class of actors is changed, and what follows: events, orders, actions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Fate(Enum):
    """What becomes of the new version in one process."""

    OPEN = "open"
    KEPT = "kept"
    TAKEN_BACK = "taken back"


class Order(Enum):
    """What whoever leads a change tells a process."""

    PREPARE = "prepare"  # check that it can be done
    CHANGE = "change"  # every actor at its next message boundary, on probation
    KEEP = "keep"  # the probation is over
    TAKE_BACK = "take back"  # every actor at its next message boundary
    DISMISS = "dismiss"  # everybody is done


# The coordinator's side.


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The change is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Voted:
    """A process has checked the change; `why` it cannot, empty if it can."""

    process: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """All of a process's actors run the new version; `why` not, empty if they do."""

    process: str
    actors: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broke:
    """The new version has crashed on probation."""

    process: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A process has kept the new version, or taken it back, as it was told."""

    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLost:
    """A process has ended, or cannot be reached. Everything that it had said came before."""

    process: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """The time is up that was set last."""


Event: TypeAlias = Begin | Voted | Changed | Broke | Settled | ProcessLost | TimerFired


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """An order to a process."""

    process: str
    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Fire once at `at_ns`, in place of any timer that was set before."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTimer:
    """Do not fire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The change is over. actors: how many run the new version; silent: who has not said that it is done."""

    fate: Fate
    reason: str
    actors: int
    silent: tuple[str, ...]


Action: TypeAlias = Tell | SetTimer | CancelTimer | Finished


# The side of each process.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """Whoever leads says what to do; `leader` is the name of its process, empty for the coordinator."""

    leader: str
    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalChecked:
    """The answer to `Check`; `why` it cannot be done."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalChanged:
    """The answer to `ChangeActors`."""

    actors: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBroke:
    """The new version has crashed here. That actor runs the old one again and has lost nothing."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettled:
    """The answer to `KeepNew` and `TakeBack`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderLost:
    """The coordinator (empty) or a process has gone. Everything that it had said came before."""

    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FateAsked:
    """A process that leads now wants to know what has been decided."""

    leader: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FateTold:
    """The answer of another process."""

    process: str
    fate: Fate


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerSettled:
    """To one that leads: that process is done."""

    process: str


LocalEvent: TypeAlias = (
    Ordered
    | LocalChecked
    | LocalChanged
    | LocalBroke
    | LocalSettled
    | LeaderLost
    | FateAsked
    | FateTold
    | FollowerSettled
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """See whether the change can be done here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeActors:
    """Let every actor run the new version, and those that are spawned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepNew:
    """The new version stays, also where it has crashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBack:
    """Let every actor run the old version again; nothing if none has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaySettled:
    """Tell the process that leads that this one is done."""

    leader: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskFate:
    """Ask a process what has been decided."""

    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellFate:
    """Answer one that leads now."""

    leader: str
    fate: Fate


@dataclass(frozen=True, slots=True, kw_only=True)
class TellOther:
    """An order of this process, which leads now, to another."""

    process: str
    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Nothing is left to do here."""


ToCoordinator: TypeAlias = Voted | Changed | Broke | Settled
"""Told to the coordinator, which takes it as it is."""
LocalAction: TypeAlias = (
    Check
    | ChangeActors
    | KeepNew
    | TakeBack
    | ToCoordinator
    | SaySettled
    | AskFate
    | TellFate
    | TellOther
    | End
)
