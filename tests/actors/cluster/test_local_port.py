"""A cluster of this host alone: what is ordered is agreed on at once, and heard by all in the same order."""

from __future__ import annotations

import pytest

from zbmd.actors.cluster.port import LocalPort
from zbmd.actors.cluster.state.job_table import (
    CommandRefused,
    JobPhase,
    JobSpec,
    RankDown,
    RankUp,
    Stop,
    Submit,
)
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract
from zbmd.actors.view import Outcome

JOB = 5
SUBMIT = Submit(spec=JobSpec(job=JOB, target="job.py"))
UP = RankUp(job=JOB, rank=0, incarnation=1, address="a0")


class Listener:
    """Keeps the phases that it hears of. stops: gives an order as it hears of a job that runs."""

    def __init__(self, port: LocalPort, *, stops: bool = False) -> None:
        self.phases: list[JobPhase] = []
        self._port = port
        self._stops = stops

    def began(self, me: Node) -> None:
        assert me == self._port.me

    def acts_on(self, view: ClusterView, reason: str) -> None:
        job = view.jobs.job(JOB)
        if job is None:
            return
        self.phases.append(job.phase)
        if self._stops and job.phase is JobPhase.RUNNING:
            self._port.command(Stop(job=JOB, reason="at once"))

    def received(self, sender: NodeKey, message: Contract) -> None:
        pytest.fail("nobody else is there")

    def stopped(self, reason: str) -> None:
        pytest.fail("a host alone is never cut off")


async def test_all_hear_of_every_view_in_order_whoever_orders_meanwhile() -> None:
    port = LocalPort()
    first, second = Listener(port, stops=True), Listener(port)
    port.listen(first)
    port.listen(second)
    port.command(SUBMIT)
    assert first.phases == second.phases == [JobPhase.RUNNING, JobPhase.STOPPING]
    end = port.end_of(JOB)
    assert not end.done()
    port.command(RankDown(job=JOB, rank=0, incarnation=1, code=-15, reason="killed (SIGTERM)"))
    assert second.phases[-1] is JobPhase.ENDED
    assert (await end).outcome is Outcome.STOPPED
    assert port.end_of(JOB).done(), "also for one who asks late"


async def test_whoever_listens_late_hears_of_the_job() -> None:
    port = LocalPort()
    port.command(SUBMIT)
    listener = Listener(port)
    port.listen(listener)
    assert listener.phases == [JobPhase.RUNNING]


async def test_the_epoch_counts_the_views_of_the_job() -> None:
    port = LocalPort()
    port.command(SUBMIT)
    assert port.view.epoch == 0
    port.command(UP)
    job = port.view.jobs.job(JOB)
    assert job is not None and (port.view.epoch, job.epoch) == (1, 1)
    port.command(Stop(job=JOB, reason="enough"))
    assert port.view.epoch == 1


async def test_an_order_that_cannot_be_is_refused() -> None:
    port = LocalPort()
    with pytest.raises(CommandRefused, match="the ranks of a node must be 1 to 1022, not 0"):
        port.command(Submit(spec=JobSpec(job=JOB, target="job.py", ranks_per_node=0)))
    number = port.command(Stop(job=JOB, reason="too early"))
    assert port.view.jobs.refusal(port.me.key, number) == "there is no job 5"
