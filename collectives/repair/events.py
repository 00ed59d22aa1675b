"""Events and actions of the repair machine (`zbmd.collectives.repair.machine`), and the members' report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from zbmd.actors.view import MemberId


class OnLoss(Enum):
    """The mode of an operation in which a member dies."""

    SURVIVORS = "survivors"
    """The survivors finish it."""
    WAIT_FOR_REPLACEMENT = "wait_for_replacement"
    """It is repeated once all of its ranks are back."""
    ABORT = "abort"
    """It fails on all members, unless all survivors already hold its result."""


class Inputs(Enum):
    """The mode of an operation's inputs."""

    RECOMPUTE = "recompute"
    """In place: an operation that has moved data cannot be repeated."""
    PRESERVE = "preserve"
    """Out of place: inputs are unchanged until the operation has ended on all members."""
    ADOPT = "adopt"
    """Like `PRESERVE`, in shared memory: the published input of a dead member still counts."""


class Phase(Enum):
    """The state of a member in its current operation."""

    IDLE = "idle"
    """The member has not called it."""
    PENDING = "pending"
    """Called; there is no result, and the inputs are intact."""
    SPOILED = "spoiled"
    """Called; there is no result, and the inputs are overwritten."""
    HELD = "held"
    """The result is there, withheld from the caller until all members have it."""


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
    """An operation as its caller requested it. `text` describes it, and must be equal on all members.

    `needs`: the rank without which it is meaningless, that of a root; -1: none. `own`: each member has a
    different result, so a holder has nothing to copy to others; the inputs must be preserved then.
    """

    text: str
    on_loss: OnLoss
    inputs: Inputs
    needs: int = -1
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The state of a member, sent at the start of an epoch.

    `born`: the epoch in which its group was founded; 0: not known yet. `sequence`: the number of its current
    or next operation. `attempted`: the members of its last run. `contributors`: the members whose inputs the
    result contains. `readable`: dead members whose input this member can still read. `failed`: the last
    operation that failed.
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
    """The caller requests the next operation."""

    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowAsked:
    """Between operations: enter the next view, which exists or is about to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """The reports of all members of the epoch, in member order."""

    epoch: int
    reports: tuple[Report, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCut:
    """The exchange of reports failed: a member was lost, or another view is there."""

    epoch: int


class Outcome(Enum):
    """The end of a run, or of a repair, on this rank."""

    COMMITTED = "committed"
    """The result is here, and on every other participating member of the epoch."""
    HELD = "held"
    """The result is here; whether others have it is unknown."""
    INTACT = "intact"
    SPOILED = "spoiled"
    BROKEN = "broken"
    """It failed for a local reason, such as a deadline or a bad call; the group cannot be repaired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The current run or repair has ended and is drained."""

    epoch: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class NoView:
    """No view was installed in time."""


RepairEvent: TypeAlias = EpochEntered | Called | FollowAsked | Exchanged | ExchangeCut | Ended | NoView


# ---- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Exchange `report` with all members; answer with `Exchanged` or `ExchangeCut`."""

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
    """`carrier` contributes the published input of the dead `member`."""

    member: MemberId
    carrier: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Repeat it among `runners` with their inputs and the adopted ones, then commit with all members."""

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
    """Take part in the commit of an operation that other members run or copy; answer with `Ended`."""

    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """The operation is complete on all members; its result contains the inputs of `contributors`."""

    sequence: int
    contributors: tuple[MemberId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise:
    """The operation failed, on all survivors."""

    failed: Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """This member agrees with the others; `sequence` is its next operation."""

    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """The group is unusable; the last call fails by its own error, or for lack of a view."""

    sequence: int


RepairAction: TypeAlias = (
    Exchange | AwaitView | Run | Rerun | CopyResult | Confirm | Return | Raise | Settled | GaveUp
)
