"""Events and actions of the step-commit machine (`zbmd.collectives.commit.machine`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberId:
    """A rank in one of its lives: a replacement has a greater incarnation."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a member holds: its committed version and the slot that has it.

    `handle` says where the slots can be read; it is opaque here. `known`: the highest version that it knows
    the run to have committed; `fresh`: it has not come to hold the group's version in any epoch yet;
    `whole`: it enters straight behind a commit, as do all members of the epoch before.
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
    """A newer membership can be entered: all of `members` are linked, and some may be in it already."""

    epoch: int
    members: tuple[MemberId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUpReceived:
    """A member has left an epoch without its members' agreement: it votes in it no more."""

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

    ready: the newer epoch that it could enter behind this version, 0 if there is none.
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
    """Tell `to` what we hold."""

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
    """Tell `to` that we vote in `epoch` no more."""

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

    workers: those of `members` who compute; the others have just come, and take part in what is common.
    """

    epoch: int
    version: int
    slot: int
    members: tuple[int, ...]
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortWork:
    """End the step, pull or recall in flight now; it still answers with its ended event."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """`version`, prepared in `slot`, is committed. `parts` are the members' ledger shares in rank order.

    `parts` is empty when the commit was learnt from a report, not from the votes.
    """

    epoch: int
    version: int
    digest: bytes
    slot: int
    parts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """`version`, pulled from a peer or recalled into `slot`, is now our committed one."""

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
    """This rank cannot go on. `kind` is the machine-readable reason."""

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
