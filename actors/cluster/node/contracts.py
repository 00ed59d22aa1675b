"""Contracts of a node's admin actor: requests of commands and of nodes that are about to join."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from zbmd.actors.cluster.contracts import NAME_CHARS_MAX, TEXT_CHARS_MAX
from zbmd.actors.cluster.state.job_table import Stop, Submit
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.contracts import Contract

ADMIN_ACTOR: Final = "desk"
MEMBERS_SHOWN_MAX: Final = 4096
ADDRESSES_MAX: Final = 8
RECORDS_MAX: Final = 64
"""Records of jobs that a node keeps."""
RECORD_PAGE_BYTES: Final = 256 << 10

_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]


RUN_CHARACTERS_MAX = 200


class AdmissionRequest(Contract, id="zbmd.node.door_request", version=3, compatible_from=1):
    """Asks whether a node may join as it is. See `join.JoinApplication`.

    runs_at: the asker itself, a member of a cluster in which the job of this run runs, age_ns old.
    """

    node_id: _Natural
    name: _Name
    host: Annotated[str, msgspec.Meta(max_length=64)]
    recovery_budget_ns: _Natural
    witnessed: bool = False
    run: Annotated[str, msgspec.Meta(max_length=RUN_CHARACTERS_MAX)] = ""
    runs_at: Node | None = None
    age_ns: _Natural = 0


class AdmissionReply(Contract, id="zbmd.node.door", version=2, compatible_from=1):
    """The answering node, and why the node may not join.

    member: whether it can admit others now; lowest: the lowest id of its view, 0 if it is in none.
    """

    node: Node
    member: bool
    recovery_budget_ns: _Natural
    refused: _Text = ""
    passes: bool = False
    lowest: _Natural = 0


class MembersRequest(Contract, id="zbmd.node.members_request"):
    """Asks how the node sees the cluster."""


class MemberInfo(Contract, id="zbmd.node.member", version=2, compatible_from=1):
    """One member, as the node that answers sees it.

    state: `this node`, `heard`, `silent`, `not observed` or `not linked`; heard_ms: since its last frame, and
    limit_ms, the silence that would be suspect: -1 if it is not observed; skew_ms: its wall clock against
    ours, when the link was made; proven_by_kernel: whether its end would be;
    spares: spare ranks that jobs have it keep.
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
    spares: _Natural = 0


class MembersReply(Contract, id="zbmd.node.members", version=2, compatible_from=1):
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
    """Has the cluster agree on an order: run a job, or stop one."""

    order: Submit | Stop


class OrderReply(Contract, id="zbmd.node.order"):
    """The order became command `number` of `origin`, or was refused for this reason."""

    origin: NodeKey
    number: int
    refused: _Text = ""


class JobsRequest(Contract, id="zbmd.node.jobs_request"):
    """Asks for jobs. job: one id, 0 for all; number: also report what became of that command of the node."""

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
    """Asks what a job's ranks printed on the node's host, from line `number` on."""

    job: int
    number: _Natural


class PrintedLine(Contract, id="zbmd.node.printed"):
    """A line of a rank."""

    rank: int
    is_error: bool
    text: bytes


class OutputReply(Contract, id="zbmd.node.output"):
    """New lines, and the number of the first; earlier ones are lost."""

    first: int
    lines: tuple[PrintedLine, ...]


class RecordsRequest(Contract, id="zbmd.node.records_request"):
    """Asks which records of jobs the node has."""


class RecordInfo(Contract, id="zbmd.node.record"):
    """The record of what became of a job's ranks on the node's host.

    began_ns: when the record began, ns since 1970, which names it; words: the job's command; is_open: whether
    the node still adds to it.
    """

    job: _Natural
    began_ns: _Natural
    words: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=64)]
    is_open: bool


class RecordsReply(Contract, id="zbmd.node.records"):
    """The records, the oldest first. wall_ns: the clock of the node's host; boot_id: of its kernel."""

    wall_ns: _Natural
    boot_id: Annotated[str, msgspec.Meta(max_length=64)]
    records: Annotated[tuple[RecordInfo, ...], msgspec.Meta(max_length=RECORDS_MAX)]


class RecordRequest(Contract, id="zbmd.node.record_request"):
    """Asks for the bytes of a record from `offset` on."""

    began_ns: _Natural
    offset: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class RecordReply(Contract, id="zbmd.node.record_page"):
    """The next bytes; none at the end, or if the record is gone."""

    data: Annotated[bytes, msgspec.Meta(max_length=RECORD_PAGE_BYTES)]


class ActorsAddressRequest(Contract, id="zbmd.node.actors_door_request"):
    """Asks where the node's actors listen."""


class ActorsAddressReply(Contract, id="zbmd.node.actors_door"):
    """The process and address of the node's actors; the address is empty while they do not listen."""

    process: _Name
    incarnation: _Natural
    address: _Text


class ClockRequest(Contract, id="zbmd.node.clock_request"):
    """Asks for the wall clock of the node's host."""


class ClockReply(Contract, id="zbmd.node.clock"):
    """The wall clock of the answering node's host, ns since 1970; only shown to people."""

    node: Node
    wall_ns: _Natural


class LeaveRequest(Contract, id="zbmd.node.leave_request"):
    """Asks the node to leave the cluster in order, and to end."""


class Leaving(Contract, id="zbmd.node.leaving"):
    """The node will leave. pid: of its process."""

    node: Node
    pid: int


class TokenRequest(Contract, id="zbmd.node.token_request"):
    """Asks what another host needs to join."""


class TokenReply(Contract, id="zbmd.node.token"):
    """Addresses of members, the answering one first."""

    addresses: Annotated[tuple[str, ...], msgspec.Meta(max_length=ADDRESSES_MAX)]
    recovery_budget_ns: int
