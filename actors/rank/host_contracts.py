"""Contracts between a rank and its host, and between tools and a host."""

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
KEPT_STATE = "kept_state"
"""The `kind` of a report that this rank keeps state in memory which is to outlive its launcher."""

DEVICE_LOST = "device_lost"
"""The `kind` of a report that a device of this host failed: `device`, its index among those visible here."""
DEVICES_MAX = 1024
"""Of a host."""


class Join(Contract, id="zbmd.host.join"):
    """A rank is listening and asks to be in the next view. See `zbmd.actors.view.Member` for the fields."""

    rank: int
    incarnation: int
    address: str
    host: str = ""
    tcp_address: str = ""


class ViewInstalled(Contract, id="zbmd.host.view"):
    """The host to each member: the new view."""

    view: View


class Linked(Contract, id="zbmd.host.linked"):
    """A rank to the host: all links of the view are up, and the job waits to enter it."""

    rank: int
    incarnation: int
    epoch: int


class LinkLost(Contract, id="zbmd.host.link_lost"):
    """A rank to its host: its link to a member on another host ended, in the view of `epoch`.

    Either the member or its host died, which other reports will show, or the network failed.
    """

    rank: int
    incarnation: int
    epoch: int
    peer: int


class EnterView(Contract, id="zbmd.host.enter"):
    """The host to each member: all are linked, the view may be entered."""

    epoch: int


class MemberDown(Contract, id="zbmd.host.down"):
    """The host to each member: this incarnation died. Its memory may be reused once `confirmed`."""

    rank: int
    incarnation: int
    reason: str
    confirmed: bool


class Report(Contract, id="zbmd.host.report"):
    """Telemetry of a rank for the host's owner. `payload`: MessagePack, at most `REPORT_BYTES_MAX`."""

    rank: int
    incarnation: int
    payload: bytes


class ReportsAsk(Contract, id="zbmd.host.reports_ask"):
    """A rank asks whether its reports have arrived; links keep order, so the answer confirms them."""


class ReportsTaken(Contract, id="zbmd.host.reports_taken"):
    """All reports that the rank sent before its question have arrived."""


def read_report(payload: bytes) -> dict[str, Any]:
    """Decode a report into plain data. Raises `RemoteProtocolError`."""
    if len(payload) > REPORT_BYTES_MAX:
        raise RemoteProtocolError(f"a report must take at most {REPORT_BYTES_MAX} bytes, not {len(payload)}")
    try:
        return msgspec.msgpack.decode(payload, type=dict[str, Any])
    except (ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
        raise RemoteProtocolError(f"not a report: {error}") from error


class ActorsRequest(Contract, id="zbmd.host.actors_request"):
    """The host asks a rank for the names of its actors."""


class ActorsReply(Contract, id="zbmd.host.actors"):
    """The names of a rank's actors, at most `ACTORS_NAMED_MAX`."""

    names: tuple[str, ...]


class StatusRequest(Contract, id="zbmd.host.status_request"):
    """A tool asks a host for its status."""


class RankStatus(Contract, id="zbmd.host.rank_status"):
    """The status of a rank. `memory_bytes`: resident. `actors`: None if the rank did not answer in time."""

    rank: int
    pid: int
    incarnation: int
    state: str
    restarts: int
    memory_bytes: int
    actors: tuple[str, ...] | None


class SpareStatus(Contract, id="zbmd.host.spare_status"):
    """The status of a process that waits for a rank. `memory_bytes`: resident."""

    pid: int
    state: str
    memory_bytes: int


class NodeStatus(Contract, id="zbmd.host.status", version=3, compatible_from=1):
    """The status of a host. `uptime_s`: since the run began. `hangs`: descriptions of ongoing hangs."""

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
    spares: tuple[SpareStatus, ...] = ()


ACTORS_NAMED_MAX = 256
