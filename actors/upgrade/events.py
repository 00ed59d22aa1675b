"""Events, orders and actions of a change of the code of a class of actors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, TypeAlias

from zbmd.transport.machine import SetTimer, TimerFired


class Fate(Enum):
    """The fate of the new version in one process."""

    OPEN = "open"
    KEPT = "kept"
    TAKEN_BACK = "taken back"


class Order(Enum):
    """An order of the leader of a change to a process."""

    PREPARE = "prepare"  # check that it can be done
    CHANGE = "change"  # every actor at its next message boundary, on probation
    KEEP = "keep"  # the probation is over
    TAKE_BACK = "take back"  # every actor at its next message boundary
    DISMISS = "dismiss"  # everybody is done


# The coordinator's side.


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The change is requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Voted:
    """A process has checked the change; `why`: the reason against it, empty if there is none."""

    process: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A process has changed its actors; `why`: the reason against it, empty if all run the new version."""

    process: str
    actors: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broke:
    """The new version has crashed while on probation."""

    process: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A process has kept the new version or taken it back, as ordered."""

    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLost:
    """A process has ended or cannot be reached. All its messages arrived before."""

    process: str
    why: str


Event: TypeAlias = Begin | Voted | Changed | Broke | Settled | ProcessLost | TimerFired


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOrder:
    """An order to a process."""

    captured_as: ClassVar[str] = "Tell"
    process: str
    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTimer:
    """Do not fire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The change is over. actors: how many run the new version; silent: processes without a report."""

    fate: Fate
    reason: str
    actors: int
    silent: tuple[str, ...]


Action: TypeAlias = SendOrder | SetTimer | CancelTimer | Finished


# The side of each process.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """The leader sends an order; `leader` names its process, empty for the coordinator."""

    leader: str
    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalChecked:
    """The reply to `Check`; `why`: the reason against it, empty if there is none."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalChanged:
    """The reply to `ChangeActors`."""

    actors: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBroke:
    """The new version has crashed here. The actor runs the old version again and has lost nothing."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettled:
    """The reply to `KeepNew` and `TakeBack`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderLost:
    """The coordinator (empty) or a process has ended. All its messages arrived before."""

    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FateAsked:
    """A process that leads now asks for the decision."""

    leader: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FateReported:
    """The reply of another process."""

    captured_as: ClassVar[str] = "FateTold"
    process: str
    fate: Fate


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerSettled:
    """To a leader: this process is done."""

    process: str


LocalEvent: TypeAlias = (
    Ordered
    | LocalChecked
    | LocalChanged
    | LocalBroke
    | LocalSettled
    | LeaderLost
    | FateAsked
    | FateReported
    | FollowerSettled
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Check whether the change can be made in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeActors:
    """Change every actor to the new version, and those that are spawned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepNew:
    """Keep the new version, also where it has crashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBack:
    """Return every actor to the old version; nothing to do if none has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaySettled:
    """Report to the leader that this process is done."""

    leader: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskFate:
    """Ask a process for the decision."""

    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellFate:
    """Reply to the new leader."""

    leader: str
    fate: Fate


@dataclass(frozen=True, slots=True, kw_only=True)
class TellOther:
    """An order from this process, which leads now, to another."""

    process: str
    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """No work is left in this process."""


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
