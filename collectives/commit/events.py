"""Events and actions of the step-commit machine (`zbmd.collectives.commit.machine`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from zbmd.actors.view import MemberId


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A member's committed version and the slot that has it.

    `handle` says where the slots can be read; it is opaque here. `known`: the highest version that the member
    knows to be committed; `fresh`: it has not held the group's version in any epoch yet; `whole`: it enters
    directly after a commit, as do all members of the previous epoch.
    """

    version: int
    digest: bytes
    slot: int
    handle: bytes
    known: int
    fresh: bool
    whole: bool = False


# ---- events


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochInstalled:
    """A new membership: `members` are all of it, in rank order, this rank included."""

    epoch: int
    members: tuple[MemberId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReady:
    """A newer membership can be entered: all of `members` are linked, and some may have entered it."""

    epoch: int
    members: tuple[MemberId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUpReceived:
    """A member has left an epoch without agreement: it does not vote in it any more."""

    sender: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportReceived:
    """A member's report for an epoch."""

    sender: int
    epoch: int
    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteReceived:
    """A member's vote to commit `version`; `part` is its share of the ledger, opaque here.

    `ready`: the newer epoch that it could enter after this version, 0 if there is none.
    """

    sender: int
    epoch: int
    version: int
    digest: bytes
    part: bytes
    ready: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishReceived:
    """A member has committed the last version and asks to leave."""

    sender: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchEnded:
    """The pull ended: `digest` of what was read, or None with a `reason` if it was cut short."""

    epoch: int
    version: int
    digest: bytes | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallEnded:
    """The recall ended: `digest` of what was read, or None if that version has not been preserved."""

    epoch: int
    version: int
    digest: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """The step ended: `digest` of the prepared slot, or None with a `reason` if it was cut short.

    Cut short means by a lost peer or by our own abort; a step that fails by itself ends its rank.
    """

    epoch: int
    version: int
    digest: bytes | None
    part: bytes = b""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEnded:
    """A member process ended."""

    member: MemberId
    reason: str


CommitEvent: TypeAlias = (
    EpochInstalled
    | EpochReady
    | GaveUpReceived
    | ReportReceived
    | VoteReceived
    | FinishReceived
    | FetchEnded
    | RecallEnded
    | StepEnded
    | PeerEnded
)


# ---- actions


class FailureKind(Enum):
    """Why a rank stopped."""

    DIVERGED = auto()
    STATE_LOST = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """Send `to` what we hold."""

    to: int
    epoch: int
    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class SendVote:
    """Send our vote to `to`."""

    to: int
    epoch: int
    version: int
    digest: bytes
    part: bytes
    ready: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFinish:
    """Tell `to` that we have committed the last version."""

    to: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGaveUp:
    """Tell `to` that we do not vote in `epoch` any more."""

    to: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterEpoch:
    """Enter the membership that is ready; answer with `EpochInstalled`, or the next `EpochReady`."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Pull `version` from slot `source_slot` of `source` into our `slot`; answer with `FetchEnded`."""

    epoch: int
    source: int
    source_slot: int
    handle: bytes
    version: int
    digest: bytes
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Read `version`, the last one, back into our `slot` if it was preserved; answer with `RecallEnded`."""

    epoch: int
    version: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """Compute `version` from the committed one into `slot`; answer with `StepEnded`.

    `workers`: those of `members` that compute; the others are new, and only take part in collectives.
    """

    epoch: int
    version: int
    slot: int
    members: tuple[int, ...]
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortWork:
    """End the current step, pull or recall now; it still answers with its ended event."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """`version`, prepared in `slot`, is committed. `parts` are the members' ledger shares in rank order.

    `parts` is empty if the commit was learned from a report instead of votes.
    """

    epoch: int
    version: int
    digest: bytes
    slot: int
    parts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """`version`, pulled from a peer or recalled into `slot`, is now the committed one here."""

    epoch: int
    version: int
    digest: bytes
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preserve:
    """Make `version`, the last one, durable before any later action is performed."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Every member holds the last version; this rank may leave."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """This rank cannot continue. `kind` is the machine-readable reason."""

    kind: FailureKind
    reason: str


CommitAction: TypeAlias = (
    SendReport
    | SendGaveUp
    | EnterEpoch
    | SendVote
    | SendFinish
    | Fetch
    | Recall
    | RunStep
    | AbortWork
    | Commit
    | Adopted
    | Preserve
    | Finished
    | Failed
)
