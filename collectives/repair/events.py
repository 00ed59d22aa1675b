"""Events and actions of the repair machine (`zbmd.collectives.repair.machine`), and what members report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from zbmd.collectives.commit.events import MemberId


class OnLoss(Enum):
    """What an operation does when a member dies in it."""

    SURVIVORS = "survivors"
    """Those who live finish it."""
    WAIT_FOR_REPLACEMENT = "wait_for_replacement"
    """It is run again once every rank of it is back."""
    ABORT = "abort"
    """It fails on all, unless all who live hold its result already."""


class Inputs(Enum):
    """What becomes of an operation's inputs."""

    RECOMPUTE = "recompute"
    """In place: an operation that has moved data cannot be run again."""
    PRESERVE = "preserve"
    """Out of place: they stay until the operation is over on all."""
    ADOPT = "adopt"
    """As `PRESERVE`, in shared memory: what a dead rank has published counts."""


class Phase(Enum):
    """How far a member is in its current operation."""

    IDLE = "idle"
    """It has not called it."""
    PENDING = "pending"
    """Called; there is no result, and the inputs are intact."""
    SPOILED = "spoiled"
    """Called; there is no result, and the inputs are overwritten."""
    HELD = "held"
    """The result is there, kept from the caller until all have it."""


class Failure(Enum):
    """Why an operation failed, on all members alike."""

    LOST = "lost"
    SPOILED = "spoiled"
    NO_REPLACEMENT = "no_replacement"
    DESYNCHRONISED = "desynchronised"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The operation with this number has failed. `ranks`: those that were lost in it."""

    sequence: int
    failure: Failure
    reason: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operation as its caller asked for it. `text` tells it, and must be the same on all members.

    `needs`: the rank without which it means nothing, that of a root; -1: there is none. `own`: each member's
    result is another, so who holds one has nothing to copy to those who do not; the inputs must stay then.
    """

    text: str
    on_loss: OnLoss
    inputs: Inputs
    needs: int = -1
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where a member stands, told at the start of an epoch.

    `born`: the epoch in which its group was founded; 0: it has not been told yet. `sequence`: the number of
    its current operation, or of the next. `attempted`: who took part when it was run last. `contributors`:
    whose inputs the result holds. `readable`: the dead whose contribution to it this member can still read.
    `failed`: the last operation that failed.
    """

    born: int
    sequence: int
    phase: Phase
    call: Call | None = None
    attempted: tuple[MemberId, ...] = ()
    contributors: tuple[MemberId, ...] = ()
    readable: tuple[MemberId, ...] = ()
    failed: Failed | None = None


# ---- events


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEntered:
    """A new view. `members` in rank order, this rank included; `gone`: ranks that will not come back.

    `readable` as in `Report`.
    """

    epoch: int
    members: tuple[MemberId, ...]
    gone: tuple[int, ...] = ()
    readable: tuple[MemberId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """The caller asks for the next operation."""

    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowAsked:
    """Between operations: enter the next view, which is there or on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """The reports of all members of the epoch, in their order."""

    epoch: int
    reports: tuple[Report, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCut:
    """The exchange of reports was cut short: a member is lost, or another view has come."""

    epoch: int


class Outcome(Enum):
    """How a run, or a repair, ended on this rank."""

    COMMITTED = "committed"
    """The result is here, and so it is on every member of the epoch that takes part."""
    HELD = "held"
    """The result is here; whether others have it is not known."""
    INTACT = "intact"
    SPOILED = "spoiled"
    BROKEN = "broken"
    """It failed by itself, as a deadline or a bad call does: nothing of this group can be repaired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The run or repair in flight is over, and drained."""

    epoch: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class NoView:
    """No view came in time."""


RepairEvent: TypeAlias = EpochEntered | Called | FollowAsked | Exchanged | ExchangeCut | Ended | NoView


# ---- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Give `report` to all members and get theirs; answer with `Exchanged` or `ExchangeCut`."""

    epoch: int
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitView:
    """Enter the first view after `after`; answer with `EpochEntered` or `NoView`."""

    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run the current operation over all members, then commit it; answer with `Ended`."""

    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """`carrier` brings in what the dead `member` had published."""

    member: MemberId
    carrier: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Run it among `runners` with their inputs and what is adopted, then commit with all members."""

    epoch: int
    sequence: int
    runners: tuple[int, ...]
    adopted: tuple[Adoption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """Copy the result from rank `source` to the ranks `to`, then commit with all members."""

    epoch: int
    sequence: int
    source: int
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """Take part in the commit of an operation that others run or copy; answer with `Ended`."""

    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """The operation is complete on all; its result holds the inputs of `contributors`."""

    sequence: int
    contributors: tuple[MemberId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise:
    """The operation failed, on all who live."""

    failed: Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """This member is in line with the others; `sequence` is its next operation."""

    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """The group is of no use any more; what was asked for last fails by its own error, or for want of a
    view."""

    sequence: int


RepairAction: TypeAlias = (
    Exchange | AwaitView | Run | Rerun | CopyResult | Confirm | Return | Raise | Settled | GaveUp
)
