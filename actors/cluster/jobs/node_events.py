"""Events and actions of the machine of a node's jobs (`node_machine`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from zbmd.actors.cluster.contracts import HostLinked
from zbmd.actors.cluster.state.job_table import JobSpec, Order
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.view import View, rank_name
from zbmd.transport.machine import SetTimer, TimerFired


@dataclass(frozen=True, slots=True, order=True)
class RankKey:
    """One process of a job."""

    job: int
    rank: int
    incarnation: int

    def __str__(self) -> str:
        return f"{rank_name(self.rank)}#{self.incarnation} of job {self.job:x}"


# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationBegan:
    """The node begins an incarnation in the cluster."""

    captured_as: ClassVar[str] = "LifeBegan"
    me: NodeKey


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationEnded:
    """That incarnation is over: the others go on without it, or will."""

    captured_as: ClassVar[str] = "LifeEnded"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAsked:
    """The node is to leave the cluster, once its ranks have had the time to save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewActedOn:
    """The node acts on a view of the cluster."""

    view: ClusterView


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReported:
    """Another node's incarnation says how far its members of a job's view are."""

    captured_as: ClassVar[str] = "HostSaid"
    sender: NodeKey
    word: HostLinked


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """The process exists."""

    key: RankKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkFailed:
    """The process could not be made."""

    key: RankKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The process listens, and waits for a view."""

    key: RankKey
    address: str
    host: str = ""
    tcp_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """The process has a link to every other member of the view of `epoch`, and waits to enter it."""

    key: RankKey
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost:
    """The process has lost its link to a member on another host, in the view of `epoch`."""

    key: RankKey
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossProven:
    """The kernel says that the process died without a goodbye; its exit status is not known yet.

    reason, cause (as in `RankCause` of the job table): what is known of it, empty if nothing is.
    """

    key: RankKey
    reason: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The process is gone.

    code: its exit code, or minus the signal that ended it; cause: as in `LossProven`.
    """

    key: RankKey
    code: int
    reason: str
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """A rank of this node has committed a step that none of them had reported before."""

    job: int


Event: TypeAlias = (
    IncarnationBegan
    | IncarnationEnded
    | LeaveAsked
    | ViewActedOn
    | HostReported
    | Forked
    | ForkFailed
    | Joined
    | Linked
    | LinkLost
    | LossProven
    | Exited
    | StepCommitted
    | TimerFired
)


# --- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Make what a job's ranks on this node need; its first process follows."""

    spec: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Give back what the job needed: none of its processes is left, and it is out of this node's hands."""

    job: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Make the process; answered by `Forked` or `ForkFailed`."""

    key: RankKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallView:
    """Send the view to those of its members that run here."""

    job: int
    view: View
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterView:
    """Tell the members that run here that all members, on all hosts, are linked."""

    job: int
    epoch: int
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceDown:
    """Tell the ranks in `to` that this process is dead; confirmed: it can touch no memory here any more."""

    key: RankKey
    reason: str
    confirmed: bool
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Ask the process to end (SIGTERM)."""

    key: RankKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End the process (SIGKILL)."""

    key: RankKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeOrder:
    """Have the cluster agree on an order."""

    captured_as: ClassVar[str] = "Ask"
    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToHost:
    """Tell another node's incarnation."""

    captured_as: ClassVar[str] = "Tell"
    to: NodeKey
    word: HostLinked


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveCluster:
    """Leave the cluster in order; answered by `IncarnationEnded`."""


Action: TypeAlias = (
    Open
    | Close
    | Fork
    | InstallView
    | EnterView
    | AnnounceDown
    | Terminate
    | Kill
    | ProposeOrder
    | SendToHost
    | LeaveCluster
    | SetTimer
)
