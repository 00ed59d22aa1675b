"""What a node's desk is asked, by commands and by nodes that are about to join."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from zbmd.actors.cluster.contracts import NAME_CHARS_MAX, TEXT_CHARS_MAX
from zbmd.actors.cluster.jobs.table import Stop, Submit
from zbmd.actors.cluster.node_id import Node, NodeKey
from zbmd.actors.contracts import Contract

DESK: Final = "desk"
MEMBERS_SHOWN_MAX: Final = 4096
ADDRESSES_MAX: Final = 8

_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class DoorRequest(Contract, id="zbmd.node.door_request"):
    """May I join as I am? See `admission.Wish`."""

    node_id: _Natural
    name: _Name
    host: Annotated[str, msgspec.Meta(max_length=64)]
    recovery_budget_ns: _Natural
    witnessed: bool = False


class DoorReply(Contract, id="zbmd.node.door"):
    """Who answers, and what stands against it. member: whether it can let anybody in now."""

    node: Node
    member: bool
    recovery_budget_ns: _Natural
    refused: _Text = ""
    passes: bool = False


class MembersRequest(Contract, id="zbmd.node.members_request"):
    """How do you see the cluster?"""


class MemberInfo(Contract, id="zbmd.node.member"):
    """One member, as the node that answers sees it.

    state: `this node`, `heard`, `silent`, `not observed` or `not linked`; heard_ms: since its last frame, and
    limit_ms, the silence that would be suspect: -1 if it is not observed; skew_ms: its wall clock against
    ours, when the link was made; proven_by_kernel: whether its end would be.
    """

    node: Node
    state: _Name
    heard_ms: int
    limit_ms: int
    links_dialed: int
    links_accepted: int
    skew_ms: int
    release: _Name
    proven_by_kernel: bool
    why: _Text


class MembersReply(Contract, id="zbmd.node.members"):
    """A node's view of its cluster. known, entered: the newest view decided, and that which is acted on."""

    answered_by: Node
    state: _Name
    known: int
    entered: int
    recovery_budget_ns: int
    heartbeat_ns: int
    members: tuple[MemberInfo, ...]
    quorum: _Text
    story: tuple[str, ...]
    dropped: int


class OrderRequest(Contract, id="zbmd.node.order_request"):
    """Have the cluster agree on an order: a job to run, or to stop."""

    order: Submit | Stop


class OrderReply(Contract, id="zbmd.node.order"):
    """It was taken on as that command of `origin`; or nobody would take it, for this reason."""

    origin: NodeKey
    number: int
    refused: _Text = ""


class JobsRequest(Contract, id="zbmd.node.jobs_request"):
    """Which jobs are there? job: that one alone, 0 for all; number: what became of that command of ours?"""

    job: int = 0
    number: int = 0


class RankInfo(Contract, id="zbmd.node.rank"):
    """One rank of a job. node: what people call it; address: of that node; empty if none runs it."""

    rank: int
    state: _Name
    incarnation: int
    node: _Text
    address: _Text


class JobInfo(Contract, id="zbmd.node.job"):
    """One job, as the newest view has it."""

    job: int
    target: _Text
    phase: _Name
    reason: _Text
    outcome: _Name
    submitter: _Text
    epoch: int
    restarts: int
    nodes_min: int
    nodes_max: int
    ranks: tuple[RankInfo, ...]


class JobsReply(Contract, id="zbmd.node.jobs"):
    """Jobs, in the order of submission. applied: whether the command asked for is; refused: why not."""

    view: int
    jobs: tuple[JobInfo, ...]
    applied: bool
    refused: _Text = ""


class OutputRequest(Contract, id="zbmd.node.output_request"):
    """What have the ranks of a job printed on your host, from that line on?"""

    job: int
    number: _Natural


class PrintedLine(Contract, id="zbmd.node.printed"):
    """A line of a rank."""

    rank: int
    is_error: bool
    text: bytes


class OutputReply(Contract, id="zbmd.node.output"):
    """Lines that have come since, and the number of the first: those before it are lost."""

    first: int
    lines: tuple[PrintedLine, ...]


class ActorsDoorRequest(Contract, id="zbmd.node.actors_door_request"):
    """Where do your actors listen?"""


class ActorsDoorReply(Contract, id="zbmd.node.actors_door"):
    """There, as this process; an empty address: nowhere at the moment."""

    process: _Name
    incarnation: _Natural
    address: _Text


class ClockRequest(Contract, id="zbmd.node.clock_request"):
    """What time is it where you are?"""


class ClockReply(Contract, id="zbmd.node.clock"):
    """The wall clock of the answering node's host, ns since 1970: only to be told to people."""

    node: Node
    wall_ns: _Natural


class LeaveRequest(Contract, id="zbmd.node.leave_request"):
    """Leave the cluster in order, and end."""


class Leaving(Contract, id="zbmd.node.leaving"):
    """It will. pid: of the node's process."""

    node: Node
    pid: int


class TokenRequest(Contract, id="zbmd.node.token_request"):
    """What must another host know to join?"""


class TokenReply(Contract, id="zbmd.node.token"):
    """Addresses of members, the answering one first."""

    addresses: Annotated[tuple[str, ...], msgspec.Meta(max_length=ADDRESSES_MAX)]
    recovery_budget_ns: int
