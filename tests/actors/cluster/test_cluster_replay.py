"""The events of a cluster's machines are recorded, and replayed to the same actions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.machines.state_followers import follow_all

from zbmd.actors.cluster import messages
from zbmd.actors.cluster.heartbeats import detector
from zbmd.actors.cluster.heartbeats.detector import DETECTOR
from zbmd.actors.cluster.jobs import node_events as local_events
from zbmd.actors.cluster.jobs.node_machine import LOCAL_JOBS, LocalJobs
from zbmd.actors.cluster.membership.capture_kind import CLUSTER, cluster_config
from zbmd.actors.cluster.membership.machine import ClusterMachine
from zbmd.actors.cluster.state.node_id import Node
from zbmd.actors.simulated import jobs_scenario, membership_scenario
from zbmd.actors.simulated.jobs_scenario import JobsScenario
from zbmd.transport import capture, sim
from zbmd.transport.clock.deadlines import Deadlines
from zbmd.transport.clock.hlc import HybridClock


class Recording:
    """The file in which the machines of a run record their events."""

    log: ClassVar[capture.LogRecorder]


class RecordedCluster(ClusterMachine):
    """A machine that is recorded."""

    def __init__(self, me: Node, deadlines: Deadlines, *, witnessed: bool = False) -> None:
        super().__init__(me, deadlines, witnessed=witnessed)
        config = cluster_config(me, deadlines.recovery_budget_ns, witnessed=witnessed)
        self._stream = Recording.log.declare_machine(CLUSTER, str(me.key), config)

    def handle(self, event: messages.Event, *, now_ns: int) -> list[messages.Action]:
        Recording.log.event(self._stream, CLUSTER.events, event, now_ns)
        actions = super().handle(event, now_ns=now_ns)
        Recording.log.acted(self._stream, CLUSTER.actions, actions, now_ns)
        return actions


class RecordedDetector(detector.Detector):
    """A machine that is recorded."""

    def __init__(self, deadlines: Deadlines) -> None:
        super().__init__(deadlines)
        config = {"recovery_budget_ns": deadlines.recovery_budget_ns}
        self._stream = Recording.log.declare_machine(DETECTOR, "detector", config)

    def handle(self, event: detector.Event, *, now_ns: int) -> list[detector.Action]:
        Recording.log.event(self._stream, DETECTOR.events, event, now_ns)
        actions = super().handle(event, now_ns=now_ns)
        Recording.log.acted(self._stream, DETECTOR.actions, actions, now_ns)
        return actions


class RecordedJobs(LocalJobs):
    """A machine that is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = Recording.log.declare_machine(LOCAL_JOBS, "jobs", {})

    def handle(self, event: local_events.Event, *, now_ns: int) -> list[local_events.Action]:
        Recording.log.event(self._stream, LOCAL_JOBS.events, event, now_ns)
        actions = super().handle(event, now_ns=now_ns)
        Recording.log.acted(self._stream, LOCAL_JOBS.actions, actions, now_ns)
        return actions


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_cluster_with_jobs_and_faults_replays_identical(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = capture.Origin(process="node0", incarnation=1)
    Recording.log = capture.LogRecorder(tmp_path / "log", origin, capture.Clocks(hybrid=HybridClock()))
    monkeypatch.setattr(membership_scenario, "ClusterMachine", RecordedCluster)
    monkeypatch.setattr(membership_scenario, "Detector", RecordedDetector)
    monkeypatch.setattr(jobs_scenario, "LocalJobs", RecordedJobs)
    scenario, options = JobsScenario(), sim.Options(ranks=4, length=2, faults=4)
    report = sim.run_scenario(scenario, seed, options, scenario.draw_plan(seed, options), tell=None)
    assert report.outcome is sim.RunOutcome.OK, report
    Recording.log.close("the end")
    verdicts: list[Any] = list(capture.replay_log(tmp_path / "log"))
    assert len(verdicts) >= 12 and all(isinstance(v, capture.Identical) for v in verdicts), verdicts
    assert sum(verdict.events for verdict in verdicts) > 300
    (log,) = capture.open_log(tmp_path / "log").processes
    assert follow_all(log, random.Random(seed)) == {"cluster", "detector", "jobs"}
