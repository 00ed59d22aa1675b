"""Contracts between nodes beside `messages`, and the validation of every message that a node receives.

Rules that a schema cannot express are checked here, so that no impossible message reaches a machine.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeAlias

import msgspec

from zbmd.actors.cluster import messages as m
from zbmd.actors.cluster.state.job_table import Command, problem_of
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import EPOCH_MAX, ClusterView, ViewChange
from zbmd.actors.contracts import Contract, ContractDecoder
from zbmd.actors.errors import InvalidMessage
from zbmd.actors.hangs.wire import Standing, Text
from zbmd.actors.view import RANKS_MAX
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.rdma.setup import QueuePairAt
from zbmd.transport.secure.protection import SESSION_ID_BYTES

ID_MAX: Final = (1 << 63) - 1
TEXT_CHARS_MAX: Final = 4096
ADDRESS_CHARS_MAX: Final = 300
NAME_CHARS_MAX: Final = 64
PROTOCOL_VERSION: Final = 2
"""Version of the protocol beyond the contracts' schemas, which are compared in the handshake."""

_Short = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]*")


class Hail(Contract, id="zbmd.cluster.hail"):
    """The first frame of either end of a link between nodes.

    wall_ns: since 1970, only shown to people; boot_id, pid_space, pid, started: name the process on its
    host, so that another process there can ask the kernel for its end.
    """

    node: Node
    protocol: int
    release: _Short
    wall_ns: Annotated[int, msgspec.Meta(ge=0)]
    boot_id: _Short
    pid_space: _Short
    pid: Annotated[int, msgspec.Meta(ge=0)]
    started: Annotated[int, msgspec.Meta(ge=0)]


class NotUnderstood(Contract, id="zbmd.cluster.not_understood"):
    """Answer to a contract that the receiver does not know."""

    text: Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]


def _no_hook(wanted: type, _: object) -> object:
    raise NotImplementedError(f"{wanted.__name__} is not part of the cluster's protocol")


_decoder = ContractDecoder(_no_hook)


def decode(payload: bytes | memoryview) -> Contract:
    """Decode and validate the contract in a frame of a node.

    Raises `RemoteProtocolError`, and `UnknownContract` if this process has none of its id and version.
    """
    try:
        contract = _decoder.decode(payload)
        check(contract)
    except InvalidMessage as error:
        raise RemoteProtocolError(f"invalid message from a node: {error}") from error
    return contract


def check(contract: Contract) -> None:
    """Raise `RemoteProtocolError` for a message that fits its schema but is invalid."""
    match contract:
        case Hail(node=node) | m.Join(node=node):
            _node(node)
        case m.MemberReport():
            _report(contract)
        case m.RoundRequest():
            _cast(contract)
        case m.RoundReply():
            _epoch(contract.epoch)
            _ids(contract.missing)
            if contract.accepted is not None:
                _change(contract.accepted.change, contract.epoch + 1)
        case m.Behind(epoch=epoch):
            _epoch(epoch)
        case m.Excluded(epoch=epoch, reason=reason):
            _epoch(epoch)
            _require(len(reason) <= TEXT_CHARS_MAX, "the reason is too long")
        case m.Learn(view=view):
            _view(view)
        case m.Beat(known=known, entered=entered):
            _epoch(known)
            _require(0 <= entered <= known, f"it acts on view {entered} but knows only {known}")
        case _:
            pass


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RemoteProtocolError(f"invalid message from a node: {what}")


def _epoch(epoch: int) -> None:
    _require(0 <= epoch < EPOCH_MAX, f"epoch {epoch}")


def _key(key: NodeKey) -> None:
    _require(0 <= key.id <= ID_MAX and 1 <= key.incarnation <= ID_MAX, f"the key {key}")


def _keys(keys: tuple[NodeKey, ...]) -> None:
    for key in keys:
        _key(key)
    _require(list(keys) == sorted(set(keys)), "keys are not sorted")


def _ids(ids: tuple[int, ...]) -> None:
    _require(list(ids) == sorted(set(ids)), "ids are not sorted")
    _require(not ids or (ids[0] >= 0 and ids[-1] <= ID_MAX), "ids out of range")


def _node(node: Node) -> None:
    _key(node.key)
    fits = len(node.address) <= ADDRESS_CHARS_MAX and node.address.isprintable()
    _require(fits, f"the address {node.address[:80]!r}")
    _require(not node.name or is_name(node.name), f"the name {node.name[:80]!r}")
    _require(not node.domain or is_name(node.domain), f"the failure domain {node.domain[:80]!r}")


def _report(report: m.MemberReport) -> None:
    _epoch(report.epoch)
    _keys(report.down)
    _keys(report.proven)
    for node in report.joins:
        _node(node)
    _commands(report.commands)


def _commands(commands: tuple[Command, ...]) -> None:
    for command in commands:
        _key(command.origin)
        _require(1 <= command.number <= ID_MAX, f"command {command.number}")
        _require(not (problem := problem_of(command.order)), f"invalid order: {problem}")


def _view(view: ClusterView) -> None:
    _epoch(view.epoch)
    for node in view.nodes:
        _node(node)


def _change(change: ViewChange, epoch: int) -> None:
    _require(change.epoch == epoch, f"a change to view {change.epoch} where {epoch} is next")
    _keys(change.removed)
    for node in change.added:
        _node(node)
    _commands(change.commands)
    _require(change.elapsed_ns >= 0, "a negative duration of a view")
    ids = [node.id for node in change.added]
    _require(ids == sorted(set(ids)), "added nodes are not sorted")


def _cast(cast: m.RoundRequest) -> None:
    _epoch(cast.epoch)
    _key(cast.root)
    _ids(cast.excluded)
    _require(cast.root.id not in cast.excluded, "a round without its root")
    if cast.phase is m.RoundPhase.ACCEPT:
        _require(cast.change is not None, "a round without a change to accept")
    if cast.change is not None:
        _change(cast.change, cast.epoch + (1 if cast.phase is m.RoundPhase.ACCEPT else 0))


def is_name(text: str) -> bool:
    """Whether this is a valid node name: 1 to 64 letters, digits or `_.@-`, a letter or digit first."""
    return len(text) <= NAME_CHARS_MAX and _NAME.fullmatch(text) is not None


# --- an RDMA route for heartbeats beside the TCP connection -----------------------------------------------


WHY_MAX: Final = 400
"""Length of a reason."""

StripeId: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]
"""The session id of a heartbeat connection (stripe)."""
_Why = Annotated[str, msgspec.Meta(max_length=WHY_MAX)]


class BeatsAt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The endpoint where a node receives heartbeats over RDMA: its queue pair, and the memory written to."""

    at: QueuePairAt
    address: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    key: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BeatsOffer(Contract, id="zbmd.cluster.beats_offer"):
    """Heartbeats may be written to `at`; None declines, with the reason in `why`."""

    lane: StripeId
    at: BeatsAt | None = None
    why: _Why = ""


class BeatsAnswer(Contract, id="zbmd.cluster.beats_answer"):
    """The other side's answer. It receives at once, and sends its own once the first side is ready."""

    lane: StripeId
    at: BeatsAt | None = None
    why: _Why = ""


class BeatsReady(Contract, id="zbmd.cluster.beats_ready"):
    """The offering side receives heartbeats now; a non-empty `why` declines after all."""

    lane: StripeId
    why: _Why = ""


BeatsSaid: TypeAlias = BeatsOffer | BeatsAnswer | BeatsReady


# --- one job: view entry, and hang detection over hosts -------------------------------------------------


class HostLinked(Contract, id="zbmd.job.linked"):
    """To the other hosts of a job's view, the one of `epoch`.

    linked: all of its members that the sender runs are linked, and wait to enter it; else the sender has gone
    on to a later view and never will say so. ask: the sender waits for the receiver's own word.
    """

    job: int
    epoch: int
    linked: bool
    ask: bool = False


# --- hangs: each host's watchdogs are brought before one of the job's hosts, the judge (`hang_relay`) -----


class HangBeats(Contract, id="zbmd.job.hang_beats"):
    """To the judge, once a look: the watchdogs of these ranks and incarnations of ours run."""

    job: int
    ranks: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=2 * RANKS_MAX)]


class HangStanding(Contract, id="zbmd.job.hang_standing"):
    """To the judge: where a rank of ours stands."""

    job: int
    rank: int
    incarnation: int
    standing: Standing


class HangSeen(Contract, id="zbmd.job.hang_seen"):
    """To the judge: how the process of a rank of ours looks from outside; `gone`: it has ended."""

    job: int
    rank: int
    incarnation: int
    words: Text
    gone: bool = False


class HangDebugged(Contract, id="zbmd.job.hang_debugged"):
    """To the judge, at each look: a rank of ours is in a debugger."""

    job: int
    rank: int
    incarnation: int


class HangExtend(Contract, id="zbmd.job.hang_extend"):
    """From the judge, at each look: have a rank of yours extend its time-outs, since one is in a debugger."""

    job: int
    rank: int
    incarnation: int


class HangAsk(Contract, id="zbmd.job.hang_ask"):
    """From the judge: where does a rank of yours stand? outside: how does its process look?"""

    job: int
    rank: int
    incarnation: int
    outside: bool = False


class HangEnd(Contract, id="zbmd.job.hang_end"):
    """From the judge: end this rank of yours, as if it had died."""

    job: int
    rank: int
    incarnation: int


HangReport: TypeAlias = HangBeats | HangStanding | HangSeen | HangDebugged
"""To the judge."""
HangOrder: TypeAlias = HangAsk | HangEnd | HangExtend
"""From the judge."""
HangMessage: TypeAlias = HangReport | HangOrder
