"""A failure that repeats ends a job after the second time; one with progress in between does not."""

from __future__ import annotations

import pytest

from zbmd.actors.cluster.jobs import node_events as e
from zbmd.actors.cluster.jobs.node_machine import LocalJobs
from zbmd.actors.cluster.state.job_rules import after_change
from zbmd.actors.cluster.state.job_table import (
    MEMORY_CAUSE,
    NO_JOBS,
    Command,
    Job,
    JobPhase,
    JobSpec,
    JobTable,
    Order,
    Progressed,
    RankCause,
    RankDown,
    RankUp,
    SlotState,
    Submit,
)
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView

JOB = 7
ME = NodeKey(1, 1)
SECOND_NS = 10**9
ERROR = "ValueError at train.py:12|0011"


class OneNode:
    """The table of a cluster of one node, with one job of three ranks."""

    def __init__(self) -> None:
        self.table: JobTable = NO_JOBS
        self.epoch = 1
        self.give(Submit(spec=JobSpec(job=JOB, target="t", ranks_per_node=3, max_restarts=9)))
        self.up()

    @property
    def job(self) -> Job:
        (job,) = self.table.jobs
        return job

    def give(self, *orders: Order, elapsed_ns: int = 0) -> None:
        first = self.table.applied(ME) + 1
        commands = [Command(origin=ME, number=first + k, order=order) for k, order in enumerate(orders)]
        self.epoch += 1
        self.table = after_change(
            self.table, epoch=self.epoch, members=[ME], commands=commands, elapsed_ns=elapsed_ns
        )

    def up(self) -> None:
        starting = [entry for entry in self.job.ranks if entry.state is SlotState.STARTING]
        self.give(*(RankUp(job=JOB, rank=x.rank, incarnation=x.incarnation, address="a") for x in starting))

    def down(self, rank: int, cause: str = ERROR, *, after_s: int = 0, code: int = 1) -> None:
        entry = self.job.ranks[rank]
        told = RankCause(job=JOB, rank=rank, incarnation=entry.incarnation, cause=cause)
        down = RankDown(job=JOB, rank=rank, incarnation=entry.incarnation, code=code, reason="exit code 1")
        self.give(*([told] if cause else []), down, elapsed_ns=after_s * SECOND_NS)

    def fails(self, rank: int, cause: str = ERROR, *, after_s: int = 0) -> bool:
        """Have a rank fail; return whether that ends the job. Its replacement comes up."""
        self.down(rank, cause, after_s=after_s)
        if self.job.phase is not JobPhase.RUNNING:
            return True
        self.up()
        return False


def test_an_error_that_comes_again_ends_the_job_with_it() -> None:
    node = OneNode()
    assert not node.fails(1)
    assert node.fails(1)
    assert node.job.reason == (
        "rank1 failed again as a rank did before, with no progress in between: ValueError at train.py:12 "
        "(exit code 1)"
    )


def test_the_same_error_of_another_rank_is_the_same() -> None:
    node = OneNode()
    assert not node.fails(0)
    assert node.fails(2)


@pytest.mark.parametrize("other", ["ValueError at train.py:13|0011", "ValueError at train.py:12|0012", ""])
def test_another_place_or_message_and_a_kill_are_not_the_same(other: str) -> None:
    node = OneNode()
    assert not node.fails(1)
    assert not node.fails(1, other)


def test_kills_without_a_cause_in_between_change_nothing() -> None:
    node = OneNode()
    assert not node.fails(1)
    assert not node.fails(0, "")
    assert not node.fails(2, "")
    assert node.fails(1)


def test_a_step_that_is_committed_in_between_is_progress() -> None:
    node = OneNode()
    assert not node.fails(1)
    node.give(Progressed(job=JOB))
    assert not node.fails(1)
    assert node.fails(1)


def test_a_view_that_lasted_for_the_restart_window_is_progress() -> None:
    node = OneNode()
    assert not node.fails(1)
    assert not node.fails(1, after_s=60)
    assert node.fails(1, after_s=59)


def test_what_follows_from_an_error_does_not_hide_that_its_view_lasted() -> None:
    node = OneNode()
    assert not node.fails(1)
    node.down(0, "", after_s=60)
    assert not node.fails(1)


def test_time_that_a_rank_takes_to_join_is_no_progress() -> None:
    node = OneNode()
    node.down(1)
    node.down(1, after_s=300)
    assert node.job.phase is JobPhase.STOPPING


def test_ranks_that_fail_together_do_not_count_as_a_repetition() -> None:
    node = OneNode()
    for rank in range(3):
        node.down(rank)
    assert node.job.phase is JobPhase.RUNNING
    node.up()
    assert node.fails(2)


def test_an_error_counts_though_those_that_follow_from_it_are_seen_first() -> None:
    node = OneNode()
    for _ in range(2):
        node.down(0, "")
        node.down(2, "")
        node.down(1)
        node.up() if node.job.phase is JobPhase.RUNNING else None
    assert node.job.phase is JobPhase.STOPPING


def test_an_error_after_a_kill_may_follow_from_it() -> None:
    node = OneNode()
    for _ in range(3):
        node.down(0, "", code=-9)
        node.down(1)
        node.up()
    assert node.job.phase is JobPhase.RUNNING


def test_a_cause_may_come_after_the_replacement_was_ordered() -> None:
    node = OneNode()
    for ends in (False, True):
        incarnation = node.job.ranks[1].incarnation
        node.down(1, "", code=-9)
        node.give(RankCause(job=JOB, rank=1, incarnation=incarnation, cause=ERROR))
        assert (node.job.phase is JobPhase.STOPPING) is ends
        if not ends:
            node.up()
    assert "rank1 failed again as a rank did before" in node.job.reason


def test_memory_counts_for_each_rank() -> None:
    node = OneNode()
    assert not node.fails(1, MEMORY_CAUSE)
    assert not node.fails(2, MEMORY_CAUSE)
    assert node.fails(1, MEMORY_CAUSE)
    assert "rank1 was lost twice, with no progress in between: exit code 1. Have the" in node.job.reason
    node = OneNode()
    node.down(1, MEMORY_CAUSE)
    node.down(2, MEMORY_CAUSE)
    assert node.job.phase is JobPhase.RUNNING


def test_a_node_reports_progress_once_after_a_failure_in_the_view_that_follows() -> None:
    table, machine = OneNode(), LocalJobs()
    machine.handle(e.IncarnationBegan(me=ME), now_ns=1)

    def act() -> list[e.Action]:
        view = ClusterView(epoch=table.epoch, nodes=(Node(ME),), jobs=table.table)
        actions = machine.handle(e.ViewActedOn(view=view), now_ns=1)
        for rank in (entry.rank for entry in table.job.ranks):
            key = e.RankKey(JOB, rank, table.job.ranks[rank].incarnation)
            machine.handle(e.Linked(key=key, epoch=table.job.epoch), now_ns=1)
        return actions

    def commit() -> list[Order]:
        actions = machine.handle(e.StepCommitted(job=JOB), now_ns=1)
        machine.check_invariants()
        return [action.order for action in actions if isinstance(action, e.ProposeOrder)]

    def start() -> None:
        for entry in table.job.ranks:
            key = e.RankKey(JOB, entry.rank, entry.incarnation)
            if (entry.rank, entry.incarnation) in machine.jobs[JOB].processes:
                continue
            raise AssertionError(f"{key} was not to be forked")

    table = OneNode.__new__(OneNode)
    table.table, table.epoch = NO_JOBS, 1
    table.give(Submit(spec=JobSpec(job=JOB, target="t", ranks_per_node=2, max_restarts=9)))

    def join() -> None:
        """Have what the table wants started come up."""
        act()
        start()
        for entry in table.job.ranks:
            if entry.state is SlotState.STARTING:
                key = e.RankKey(JOB, entry.rank, entry.incarnation)
                machine.handle(e.Forked(key=key), now_ns=1)
                machine.handle(e.Joined(key=key, address="a"), now_ns=1)
        table.up()
        act()

    join()
    assert commit() == [], "nothing has failed"
    machine.handle(e.Exited(key=e.RankKey(JOB, 1, 1), code=1, reason="x", cause=ERROR), now_ns=1)
    table.down(1)
    act()
    assert commit() == [], "it belongs to the view before"
    join()
    assert commit() == [Progressed(job=JOB)]
    assert commit() == [], "once"
