"""Messages between nodes about membership, and the events and actions of the membership machine.

The messages are contracts: drivers send them unchanged.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, TypeAlias

from zbmd.actors.cluster.state.job_table import Command, Order
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView, ViewChange
from zbmd.actors.contracts import Contract
from zbmd.transport.machine import SetTimer, TimerFired


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """Orders the attempts to agree on one view. Number 0 is the lowest member's; it needs no prepare."""

    number: int
    node_id: int


# --- messages -------------------------------------------------------------------------------------------


class Join(Contract, id="zbmd.cluster.join"):
    """A node asks any member to be admitted."""

    node: Node


class MemberReport(Contract, id="zbmd.cluster.report"):
    """A member's knowledge of others, in the view of `epoch`; replaces what it reported before.

    down: members that it observes and that are silent; proven: members whose end is certain; joins: nodes
    that ask to be let in; leaves: it wants to leave itself; commands: its own orders that the view lacks.
    """

    captured_as: ClassVar[str] = "Report"
    epoch: int
    down: tuple[NodeKey, ...] = ()
    proven: tuple[NodeKey, ...] = ()
    joins: tuple[Node, ...] = ()
    leaves: bool = False
    commands: tuple[Command, ...] = ()

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for what the report asks for."""
        return self.leaves or bool(self.commands)


class RoundPhase(Enum):
    """The question of a round."""

    captured_as = enum.nonmember("Phase")
    PREPARE = "prepare"
    """Promise to take no older ballot, and report what was accepted."""
    ACCEPT = "accept"
    """Accept this change."""
    LEARN = "learn"
    """This change is decided: confirm that it is known."""
    ENTER = "enter"
    """All members know it: act on it. Needs no answer."""


class RoundRequest(Contract, id="zbmd.cluster.cast"):
    """A round's question, handed down the tree. Names the tree: root, who is left out, and its view.

    epoch: of the view that the members are to be in when they answer, which for `PREPARE` and `ACCEPT` is
    the one to be followed by another.
    """

    captured_as: ClassVar[str] = "Cast"
    phase: RoundPhase
    epoch: int
    ballot: Ballot
    root: NodeKey
    excluded: tuple[int, ...]
    change: ViewChange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The newest change that a member has accepted."""

    ballot: Ballot
    change: ViewChange


class RoundReply(Contract, id="zbmd.cluster.echo"):
    """The merged answers of a node and all below it in the tree.

    missing: ids of those below who did not answer in time or not in kind; refused: the highest ballot that
    stands against this one.
    """

    captured_as: ClassVar[str] = "Echo"
    phase: RoundPhase
    epoch: int
    ballot: Ballot
    missing: tuple[int, ...] = ()
    accepted: Accepted | None = None
    refused: Ballot | None = None


class Behind(Contract, id="zbmd.cluster.behind"):
    """The sender knows no view newer than `epoch` and needs a newer one to answer."""

    epoch: int


class Learn(Contract, id="zbmd.cluster.learn"):
    """A view that was decided."""

    view: ClusterView


class Excluded(Contract, id="zbmd.cluster.excluded"):
    """The receiver is not in the view of `epoch`, and will not be in this incarnation."""

    epoch: int
    reason: str


class Beat(Contract, id="zbmd.cluster.beat"):
    """A heartbeat. known: the newest view decided that the sender knows; entered: the one it acts on."""

    known: int
    entered: int


AmongMembers: TypeAlias = Beat | MemberReport | RoundRequest | RoundReply
"""Messages between members of a view."""
Message: TypeAlias = Join | AmongMembers | Behind | Learn | Excluded


# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCluster:
    """Start as the only member of a new cluster."""

    captured_as: ClassVar[str] = "Found"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCluster:
    """Start by asking the members at these addresses, one after the other, to be admitted."""

    captured_as: ClassVar[str] = "Enter"
    doors: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message of another node's incarnation; its sender is proven by the link."""

    sender: Node
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspected:
    """The detector has not heard a member that we observe for too long."""

    key: NodeKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """A suspected member was heard again."""

    key: NodeKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """An incarnation is proven dead: by a kernel, or by its next incarnation."""

    key: NodeKey


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequested:
    """Leave the cluster once a view without this node is agreed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """Have the members agree on an order: it becomes this incarnation's next command."""

    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessGave:
    """Answer to `AskWitness`: half of a view may agree on `epoch` if it holds `holder`."""

    epoch: int
    holder: NodeKey | None
    reason: str


Event: TypeAlias = (
    FoundCluster
    | JoinCluster
    | Received
    | Suspected
    | Trusted
    | Proven
    | LeaveRequested
    | Ordered
    | WitnessGave
    | TimerFired
)


# --- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message to exactly this incarnation of a node."""

    to: Node
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchMembers:
    """Observe `subjects`, and send heartbeats to `observers`; replaces what was watched before."""

    captured_as: ClassVar[str] = "Watch"
    subjects: tuple[Node, ...]
    observers: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Act on this view: every member of it knows it."""

    view: ClusterView
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskWitness:
    """Half of the view wants to agree on `epoch`: ask the witness; answered by `WitnessGave`."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """This incarnation is over. The last action."""

    reason: str


Action: TypeAlias = Send | SetTimer | WatchMembers | Installed | AskWitness | Stopped
