"""What a host and its ranks say to each other."""

from __future__ import annotations

from typing import Any

import msgspec

from zbmd.actors.contracts import Contract
from zbmd.actors.view import View
from zbmd.transport.errors import RemoteProtocolError

HOST_ACTOR = "host"
MEMBER_ACTOR = "member"
NODE_NAME = "node"
REPORT_BYTES_MAX = 64 * 1024


class Join(Contract, id="zbmd.host.join"):
    """A rank listens and asks to be in the next view. See `zbmd.actors.view.Member` for the fields."""

    rank: int
    incarnation: int
    address: str
    host: str = ""
    tcp_address: str = ""


class ViewInstalled(Contract, id="zbmd.host.view"):
    """The host to each member: this view holds from now on."""

    view: View


class Linked(Contract, id="zbmd.host.linked"):
    """A rank to the host: all links of the view stand, and the job waits to enter it."""

    rank: int
    incarnation: int
    epoch: int


class LinkLost(Contract, id="zbmd.host.link_lost"):
    """A rank to its host: its link to a member on another host has ended, in the view of `epoch`.

    That is so when the member, or its host, is gone; if nobody tells of that, the network has done it.
    """

    rank: int
    incarnation: int
    epoch: int
    peer: int


class EnterView(Contract, id="zbmd.host.enter"):
    """The host to each member: all are linked, the view may be entered."""

    epoch: int


class MemberDown(Contract, id="zbmd.host.down"):
    """The host to each member: this incarnation is dead. Its memory may be reused once `confirmed`."""

    rank: int
    incarnation: int
    reason: str
    confirmed: bool


class Report(Contract, id="zbmd.host.report"):
    """Telemetry of a rank to whoever runs the host. `payload`: MessagePack, at most `REPORT_BYTES_MAX`."""

    rank: int
    incarnation: int
    payload: bytes


class ReportsAsk(Contract, id="zbmd.host.reports_ask"):
    """A rank asks whether what it has reported is there; links keep the order, so the answer says it is."""


class ReportsTaken(Contract, id="zbmd.host.reports_taken"):
    """All reports of the rank that were sent before its question are there."""


def read_report(payload: bytes) -> dict[str, Any]:
    """What a rank reports, plain data. Raises `RemoteProtocolError`."""
    if len(payload) > REPORT_BYTES_MAX:
        raise RemoteProtocolError(f"a report of {len(payload)} bytes; {REPORT_BYTES_MAX} is the bound")
    try:
        return msgspec.msgpack.decode(payload, type=dict[str, Any])
    except (ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
        raise RemoteProtocolError(f"not a report: {error}") from error


class ActorsRequest(Contract, id="zbmd.host.actors_request"):
    """The host asks a rank which actors it has."""


class ActorsReply(Contract, id="zbmd.host.actors"):
    """The names of a rank's actors, at most `ACTORS_NAMED_MAX`."""

    names: tuple[str, ...]


class StatusRequest(Contract, id="zbmd.host.status_request"):
    """A tool asks a host how it stands."""


class RankStatus(Contract, id="zbmd.host.rank_status"):
    """One rank. `memory_bytes`: resident. `actors` is None when the rank was too busy to say."""

    rank: int
    pid: int
    incarnation: int
    state: str
    restarts: int
    memory_bytes: int
    actors: tuple[str, ...] | None


class NodeStatus(Contract, id="zbmd.host.status", version=2, compatible_from=1):
    """One host. `uptime_s`: since the run began. `hangs`: those that are not over, each in words."""

    address: str
    pid: int
    template_pid: int
    target: str
    on_loss: str
    epoch: int
    restarts: int
    uptime_s: float
    ranks: tuple[RankStatus, ...]
    hangs: tuple[str, ...] = ()


ACTORS_NAMED_MAX = 256
