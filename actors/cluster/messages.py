"""What nodes say to each other about membership, what the machine hears, and what it asks for.

The messages are contracts: a driver sends them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from zbmd.actors.cluster.jobs.table import Command, Order
from zbmd.actors.cluster.node_id import Node, NodeKey
from zbmd.actors.cluster.view import Change, ClusterView
from zbmd.actors.contracts import Contract


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """Orders the attempts to agree on one view. Number 0 is the lowest member's, who need not prepare it."""

    number: int
    node_id: int


# --- messages -------------------------------------------------------------------------------------------


class Join(Contract, id="zbmd.cluster.join"):
    """A node asks to be let in. To any member."""

    node: Node


class Report(Contract, id="zbmd.cluster.report"):
    """What one member knows of others, in the view of `epoch`; replaces what it reported before.

    down: members that it observes and that are silent; proven: members whose end is certain; joins: nodes
    that ask to be let in; leaves: it wants to leave itself; commands: its own orders that the view lacks.
    """

    epoch: int
    down: tuple[NodeKey, ...] = ()
    proven: tuple[NodeKey, ...] = ()
    joins: tuple[Node, ...] = ()
    leaves: bool = False
    commands: tuple[Command, ...] = ()

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for what it asks for."""
        return self.leaves or bool(self.commands)


class Phase(Enum):
    """What a round asks."""

    PREPARE = "prepare"
    """Will you take no older ballot than this, and what have you accepted?"""
    ACCEPT = "accept"
    """Do you accept this change?"""
    LEARN = "learn"
    """This change is decided: do you know it?"""
    ENTER = "enter"
    """All members know it: act on it. Asks for nothing."""


class Cast(Contract, id="zbmd.cluster.cast"):
    """A round's question, handed down the tree. Names the tree: root, who is left out, and its view.

    epoch: of the view that the members are to be in when they answer, which for `PREPARE` and `ACCEPT` is
    the one to be followed by another.
    """

    phase: Phase
    epoch: int
    ballot: Ballot
    root: NodeKey
    excluded: tuple[int, ...]
    change: Change | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The newest change that somebody has accepted."""

    ballot: Ballot
    change: Change


class Echo(Contract, id="zbmd.cluster.echo"):
    """The merged answers of a node and all below it in the tree.

    missing: ids of those below who did not answer in time or not in kind; refused: the highest ballot that
    stands against this one.
    """

    phase: Phase
    epoch: int
    ballot: Ballot
    missing: tuple[int, ...] = ()
    accepted: Accepted | None = None
    refused: Ballot | None = None


class Behind(Contract, id="zbmd.cluster.behind"):
    """The sender knows no view newer than `epoch`, and needs one to answer."""

    epoch: int


class Learn(Contract, id="zbmd.cluster.learn"):
    """A view that was decided."""

    view: ClusterView


class Excluded(Contract, id="zbmd.cluster.excluded"):
    """The receiver is no member of the view of `epoch`, nor will be in this life."""

    epoch: int
    reason: str


class Beat(Contract, id="zbmd.cluster.beat"):
    """A heartbeat. known: the newest view decided that the sender knows; entered: the one it acts on."""

    known: int
    entered: int


Message: TypeAlias = Join | Report | Cast | Echo | Behind | Learn | Excluded | Beat


# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Begin as the only member of a new cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter:
    """Begin by asking to be let in, at one of these doors after the other."""

    doors: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message of another node's life; its sender is proven by the link."""

    sender: Node
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspected:
    """The detector has not heard of a member that we observe for too long."""

    key: NodeKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """A suspected member was heard again."""

    key: NodeKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """The end of a life is certain: a kernel said so, or its next life spoke."""

    key: NodeKey


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequested:
    """Leave the cluster, as soon as a view without us is agreed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """Have the members agree on an order: it becomes this life's next command."""

    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessGave:
    """What the witness says to `AskWitness`: half of a view may agree on `epoch` if it holds `holder`."""

    epoch: int
    holder: NodeKey | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """The time asked for by the last `SetTimer` has come."""


Event: TypeAlias = (
    Found
    | Enter
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
    """Send a message to one life of a node; to no other one."""

    to: Node
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Deliver `TimerFired` at `at_ns`; replaces the timer before it."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Observe `subjects`, and let `observers` hear heartbeats: replaces what was watched before."""

    subjects: tuple[Node, ...]
    observers: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Act on this view: every member of it knows it."""

    view: ClusterView
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskWitness:
    """Half of the view is here and wants to agree on `epoch`: ask who may; answered by `WitnessGave`."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """This life is over: act on nothing any more. The last action."""

    reason: str


Action: TypeAlias = Send | SetTimer | Watch | Installed | AskWitness | Stopped
