"""The machines of a cluster's node as kinds that can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from zbmd.actors.cluster import messages
from zbmd.actors.cluster.heartbeats import detector
from zbmd.actors.cluster.heartbeats.detector import Detector
from zbmd.actors.cluster.jobs import node_events as local_events
from zbmd.actors.cluster.jobs import single_job as one_job
from zbmd.actors.cluster.jobs.node_machine import LocalJobs
from zbmd.actors.cluster.jobs.single_job import OneJob
from zbmd.actors.cluster.membership.agenda import Agenda
from zbmd.actors.cluster.membership.machine import ClusterMachine
from zbmd.actors.cluster.membership.member_report import OwnWord
from zbmd.actors.cluster.membership.paxos_acceptor import Acceptor
from zbmd.actors.cluster.membership.reports import Reports
from zbmd.actors.cluster.membership.rounds import Round
from zbmd.actors.cluster.membership.tie_break import TieBreak
from zbmd.actors.cluster.membership.timeouts import Waits
from zbmd.actors.cluster.node_id import Node
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
    1,
    _build_cluster,
    events=messages.Event,
    actions=messages.Action,
    states=(ClusterMachine, Acceptor, Agenda, OwnWord, Reports, Round, TieBreak, Waits),
)
"""One life of a node; its configuration: `cluster_config`."""


def _build_detector(config: Mapping[str, Any]) -> Detector:
    return Detector(derive(config["recovery_budget_ns"]))


DETECTOR: MachineKind[detector.Event, detector.Action] = register(
    "detector", 1, _build_detector, events=detector.Event, actions=detector.Action, states=(Detector,)
)
"""What a life makes of heartbeats; its configuration: `recovery_budget_ns`."""


def _build_jobs(config: Mapping[str, Any]) -> LocalJobs:
    return LocalJobs()


LOCAL_JOBS: MachineKind[local_events.Event, local_events.Action] = register(
    "jobs", 1, _build_jobs, events=local_events.Event, actions=local_events.Action, states=(LocalJobs,)
)
"""The jobs of a node; it has no configuration."""


def _build_one_job(config: Mapping[str, Any]) -> OneJob:
    return OneJob(
        config["job"],
        nodes_min=config["nodes_min"],
        nodes_max=config["nodes_max"],
        patience_ns=config["patience_ns"],
        leave_ns=config["leave_ns"],
    )


ONE_JOB: MachineKind[one_job.Event, one_job.Action] = register(
    "one_job", 1, _build_one_job, events=one_job.Event, actions=one_job.Action, states=(OneJob,)
)
"""A node that was started for one job; its configuration: the arguments of `OneJob`."""
