"""The capture kind of the view-change machine, and its configuration as it is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from zbmd.actors.cluster import messages
from zbmd.actors.cluster.membership.machine import ClusterMachine
from zbmd.actors.cluster.membership.reports import OwnReport, Reports
from zbmd.actors.cluster.membership.rounds import Acceptor, Agenda, Round, Waits
from zbmd.actors.cluster.membership.witness import TieBreak
from zbmd.actors.cluster.state.node_id import Node
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.clock.deadlines import derive


def cluster_config(me: Node, recovery_budget_ns: int, *, witnessed: bool) -> dict[str, Any]:
    """The configuration of a `ClusterMachine`, as it is recorded."""
    named = msgspec.to_builtins(me)
    return {"me": named, "recovery_budget_ns": recovery_budget_ns, "witnessed": witnessed}


def _build_cluster(config: Mapping[str, Any]) -> ClusterMachine:
    me, deadlines = msgspec.convert(config["me"], Node), derive(config["recovery_budget_ns"])
    return ClusterMachine(me, deadlines, witnessed=config["witnessed"])


CLUSTER: MachineKind[messages.Event, messages.Action] = register(
    "cluster",
    2,
    _build_cluster,
    events=messages.Event,
    actions=messages.Action,
    states=(ClusterMachine, Acceptor, Agenda, OwnReport, Reports, Round, TieBreak, Waits),
)
"""One incarnation of a node; its configuration: `cluster_config`."""
