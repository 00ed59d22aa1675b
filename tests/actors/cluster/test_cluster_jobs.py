"""The job table: how jobs are placed, started again, paused and ended, whatever comes in whatever batches."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machines.job_tables import Table, ordered_up

from zbmd.actors.cluster.state.job_rules import after_change
from zbmd.actors.cluster.state.job_table import (
    CHECK_HOLDS_NS,
    COMMAND_BYTES_MAX,
    JOBS_MAX,
    MEMORY_CAUSE,
    TABLE_BYTES_MAX,
    Command,
    HostsChecked,
    JobPhase,
    JobSpec,
    JobTable,
    Order,
    RankCause,
    RankDown,
    RankUp,
    SlotState,
    Stop,
    Submit,
    problem_of,
)
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.view import OnLoss, Outcome

SECOND_NS = 10**9


def test_seats_are_spread_over_the_nodes_in_the_order_of_their_ids() -> None:
    t = Table(1, 4, 7)
    t.submit(nodes_min=2, nodes_max=3, ranks_per_node=2)
    assert (t.states(), t.places()) == ("ssssss", [1, 1, 4, 4, 7, 7])
    assert t.job().view() is None
    t.up(0, 1, 2, 3, 4)
    assert t.job().view() is None
    t.up(5)
    view = t.job().view()
    assert view is not None and view.epoch == t.epoch and view.ranks == (0, 1, 2, 3, 4, 5)
    assert {member.host for member in view.members} == {"h1", "h4", "h7"}


def test_the_next_job_goes_where_least_runs() -> None:
    t = Table(1, 2, 3)
    t.submit(job=1, nodes_max=2)
    t.submit(job=2, nodes_max=1)
    t.submit(job=3, nodes_max=3)
    t.submit(job=4, nodes_max=1)
    assert [t.places(job_id) for job_id in (1, 2, 3, 4)] == [[1, 2], [3], [1, 2, 3], [1]]


def test_a_lost_nodes_ranks_go_to_a_spare_one_and_the_others_stay() -> None:
    t = Table(1, 2, 3)
    t.submit(nodes_min=1, nodes_max=2, ranks_per_node=2)
    t.up()
    before = t.job().view()
    t.change(removed=[1])
    assert (t.states(), t.places()) == ("ssuu", [3, 3, 2, 2])
    assert [entry.incarnation for entry in t.job().ranks] == [2, 2, 1, 1]
    t.up()
    view = t.job().view()
    assert before is not None and view is not None and view.epoch > before.epoch
    assert t.job().restarts_total == 0, "that a node went is no failure of its ranks"


def test_without_a_spare_node_the_job_shrinks_until_one_comes() -> None:
    t = Table(1, 2)
    t.submit(nodes_min=1, nodes_max=2)
    t.up()
    t.change(removed=[2])
    view = t.job().view()
    assert t.states() == "uv" and view is not None and view.ranks == (0,) and view.epoch == t.epoch
    t.change(added=[NodeKey(9, 3)])
    assert (t.states(), t.places()) == ("us", [1, 9])
    assert t.job().view() == view, "until the newcomer is up"
    t.up()
    grown = t.job().view()
    assert grown is not None and grown.ranks == (0, 1) and grown.members[1].incarnation == 2


def test_fewer_nodes_than_the_fewest_and_the_job_waits() -> None:
    t = Table(1)
    t.submit(nodes_min=2, nodes_max=3)
    assert (t.states(), t.job().phase) == ("vvv", JobPhase.WAITING)
    assert t.job().reason == "2 nodes are needed, 1 are here"
    t.change(added=[NodeKey(2, 1)])
    assert (t.states(), t.job().phase) == ("ssv", JobPhase.RUNNING)
    t.up()
    t.change(removed=[1])
    assert (t.states(), t.job().phase) == ("vvv", JobPhase.WAITING)
    assert t.job().view() is None
    t.change(added=[NodeKey(1, 2)])
    assert t.states() == "ssv" and [entry.incarnation for entry in t.job().ranks] == [2, 2, 0]


def test_under_shrink_a_job_with_too_few_nodes_waits_for_them_and_begins_again() -> None:
    t = Table(1, 2, 3)
    t.submit(nodes_max=3, nodes_min=2, on_loss=OnLoss.SHRINK)
    t.up()
    t.change(removed=[3])
    assert (t.states(), t.job().phase) == ("uul", JobPhase.RUNNING)
    t.change(removed=[2])
    assert (t.states(), t.job().phase) == ("vvl", JobPhase.WAITING)
    assert t.job().reason == "2 nodes are needed, 1 are here"
    t.change(added=[NodeKey(2, 2)])
    assert (t.states(), t.job().phase) == ("ssl", JobPhase.RUNNING)


def test_under_shrink_ranks_that_failed_do_not_come_back() -> None:
    t = Table(1, 2)
    t.submit(nodes_max=2, nodes_min=2, on_loss=OnLoss.SHRINK)
    t.up()
    t.down(1, 1)
    assert t.job().phase is JobPhase.STOPPING
    assert t.job().reason == "2 nodes are needed; all but 1 slots are lost for good"


def test_a_rank_that_fails_starts_again_where_it_was_until_that_happens_too_often() -> None:
    t = Table(1, 2)
    t.submit(nodes_max=2, nodes_min=2, max_restarts=2, restart_window_ns=10 * SECOND_NS)
    t.up()
    for restart in range(1, 4):
        t.down(1, -9, elapsed_ns=6 * SECOND_NS)
        assert (t.states(), t.places(), t.job().restarts_total) == ("us", [1, 2], restart)
        t.up()
    t.down(1, -9)
    assert (t.job().phase, t.job().outcome) == (JobPhase.STOPPING, Outcome.FAILED)
    assert t.job().reason == "more than 2 restarts within 10 s; the last: rank1 failed: code -9"
    t.down(0, 0)
    assert t.job().phase is JobPhase.ENDED


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (2, "rank0 failed with a usage error: code 2"),
        (1, "rank0 failed before it joined: code 1"),
    ],
)
def test_what_another_start_would_not_help_ends_the_job(code: int, reason: str) -> None:
    t = Table(1)
    t.submit()
    t.down(0, code)
    job = t.job()
    assert (job.phase, job.outcome, job.reason) == (JobPhase.ENDED, Outcome.FAILED, reason)


def test_a_job_ends_well_when_all_of_its_ranks_have() -> None:
    t = Table(1, 2)
    t.submit(nodes_max=2, nodes_min=2)
    t.up()
    t.down(0, 0)
    view = t.job().view()
    assert view is not None and (view.ranks, view.finished) == ((1,), (0,))
    t.down(1, 0)
    job = t.job()
    assert (job.phase, job.outcome, job.reason) == (JobPhase.ENDED, Outcome.SUCCEEDED, "every rank finished")


@pytest.mark.parametrize(
    ("nodes", "on_loss", "fewest"),
    [
        ((1, 1), OnLoss.REPLACE, 0),
        ((1, 3), OnLoss.REPLACE, 2),
        ((2, 3), OnLoss.STOP, 4),
        ((1, 1), OnLoss.SHRINK, 1),
        ((2, 3), OnLoss.SHRINK, 2),
    ],
)
def test_a_job_says_how_few_ranks_it_goes_on_with(
    nodes: tuple[int, int], on_loss: OnLoss, fewest: int
) -> None:
    """Under shrink one rank of each node may be left."""
    spec = JobSpec(
        job=1, target="job.py", nodes_min=nodes[0], nodes_max=nodes[1], ranks_per_node=2, on_loss=on_loss
    )
    assert spec.ranks_min == fewest


def test_shrinking_goes_on_without_the_lost_for_good() -> None:
    t = Table(1, 2, 3, 4)
    t.submit(nodes_max=3, on_loss=OnLoss.SHRINK)
    t.up()
    t.change(removed=[2])
    assert t.states() == "ulu", "no spare node takes it"
    t.down(0, -9)
    view = t.job().view()
    assert view is not None and (view.ranks, view.lost) == ((2,), (0, 1))
    t.down(2, 0)
    assert t.job().outcome is Outcome.SUCCEEDED and t.job().reason == "finished without rank0, rank1"


def test_shrinking_to_nobody_ends_the_job() -> None:
    t = Table(1)
    t.submit(ranks_per_node=2, on_loss=OnLoss.SHRINK)
    t.up()
    t.down(0, -9)
    t.down(1, -9)
    job = t.job()
    assert (job.phase, job.outcome) == (JobPhase.ENDED, Outcome.FAILED)
    assert job.reason == "every rank was lost; the last reason: rank1: code -9"


def test_shrinking_below_the_fewest_nodes_ends_the_job() -> None:
    t = Table(1, 2, 3)
    t.submit(nodes_min=2, nodes_max=2, on_loss=OnLoss.SHRINK)
    t.up()
    t.down(0, -9)
    assert (t.job().outcome, t.job().reason) == (
        Outcome.FAILED,
        "2 nodes are needed; all but 1 slots are lost for good",
    )


def test_on_loss_stop_ends_the_job_with_a_rank_or_a_node() -> None:
    t = Table(1, 2)
    t.submit(job=1, nodes_max=2, on_loss=OnLoss.STOP)
    t.submit(job=2, nodes_max=2, on_loss=OnLoss.STOP)
    t.up(job_id=1)
    t.up(job_id=2)
    t.down(1, -11)
    assert t.job().reason == "rank1 failed: code -11; on-loss is stop"
    t.change(removed=[2])
    assert t.job(2).reason == "node2#1 went, and with it rank1; on-loss is stop"
    assert t.job(1).phase is t.job(2).phase is JobPhase.STOPPING


def test_a_job_is_stopped_by_command() -> None:
    t = Table(1)
    t.submit()
    t.up()
    node = t.nodes[0]
    t.change((node, Stop(job=1, reason="enough")))
    t.change((node, Stop(job=1, reason="more than enough", kill=True)))
    job = t.job()
    assert (job.phase, job.reason, job.kill) == (JobPhase.STOPPING, "enough", True)
    t.down(0, -9)
    assert (t.job().phase, t.job().outcome) == (JobPhase.ENDED, Outcome.STOPPED)
    t.change((node, Stop(job=1, reason="again")), (node, Stop(job=5, reason="again")))
    number = t.table.applied(node)
    assert t.table.refusal(node, number - 1) == "job 1 has ended: enough"
    assert t.table.refusal(node, number) == "there is no job 5"
    assert t.table.refusal(node, 1) is None


def test_a_command_can_end_a_job_as_failed() -> None:
    t = Table(1)
    t.submit()
    t.up()
    t.change((t.nodes[0], Stop(job=1, reason="it hangs", failed=True)))
    t.down(0, -15)
    assert (t.job().phase, t.job().outcome) == (JobPhase.ENDED, Outcome.FAILED)
    assert t.job().reason == "it hangs"


def test_a_command_is_applied_once() -> None:
    t = Table(1, 2)
    t.submit()
    again = Command(origin=t.nodes[0], number=1, order=Stop(job=1, reason="an old number"))
    later = Command(origin=t.nodes[0], number=3, order=Stop(job=1, reason="a number too far"))
    stranger = Command(origin=NodeKey(1, 7), number=1, order=Stop(job=1, reason="no member"))
    after = after_change(t.table, epoch=9, members=t.nodes, commands=(again, later, stranger))
    assert after == t.table


def test_what_only_another_node_may_say_changes_nothing() -> None:
    t = Table(1, 2)
    t.submit(nodes_max=2)
    up = RankUp(job=1, rank=0, incarnation=1, address="here")
    t.change((t.nodes[1], up))
    t.change((t.nodes[0], msgspec.structs.replace(up, incarnation=2)))
    t.change((t.nodes[0], msgspec.structs.replace(up, rank=77)))
    assert t.states() == "ss"


def test_a_table_is_bounded() -> None:
    t = Table(1)
    for job_id in range(1, JOBS_MAX + 1):
        t.submit(job=job_id)
    node = t.nodes[0]
    t.submit(job=1000)
    assert t.table.job(1000) is None
    refusal = t.table.refusal(node, t.table.applied(node))
    assert refusal is not None and refusal.startswith(f"the cluster has {JOBS_MAX} jobs, and with this one")
    t.down(0, 0, job_id=3)
    t.submit(job=1000)
    assert t.table.job(1000) is not None and t.table.job(3) is None, "what has ended is forgotten"

    t = Table(1)
    large = ("x" * (COMMAND_BYTES_MAX - 1000),)
    for job_id in range(1, 2 * TABLE_BYTES_MAX // COMMAND_BYTES_MAX):
        t.submit(job=job_id, arguments=large)
    assert (
        TABLE_BYTES_MAX // COMMAND_BYTES_MAX <= len(t.table.jobs) <= TABLE_BYTES_MAX // COMMAND_BYTES_MAX + 1
    )


def test_orders_that_no_cluster_takes() -> None:
    def problem(**options: object) -> str:
        return problem_of(Submit(spec=JobSpec(**({"job": 1, "target": "t"} | options))))  # type: ignore[arg-type]

    assert problem() == ""
    assert problem(target="") == "no script or module is given"
    assert problem(nodes_min=3, nodes_max=2) == "the most nodes must be 3 to 1022, not 2"
    assert problem(nodes_max=33, ranks_per_node=31) == "the ranks of a job must be 1 to 1022, not 1023"
    assert problem(job=0).startswith("a job's id must be 1 to")
    assert "bytes, more than 65536" in problem(arguments=("x" * COMMAND_BYTES_MAX,))
    assert problem_of(Stop(job=1, reason="x" * 501)) == "its reason has 501 characters, more than 500"
    t = Table(1)
    t.submit(target="")
    assert t.table.refusal(t.nodes[0], 1) == "no script or module is given"


# --- any order of things ---------------------------------------------------------------------------------


@st.composite
def specs(draw: st.DrawFn, job_id: int) -> JobSpec:
    nodes_max = draw(st.integers(1, 4))
    return JobSpec(
        job=job_id,
        target="job.py",
        ranks_per_node=draw(st.integers(1, 3)),
        nodes_min=draw(st.integers(1, nodes_max)),
        nodes_max=nodes_max,
        on_loss=draw(st.sampled_from(list(OnLoss))),
        max_restarts=draw(st.integers(0, 3)),
    )


class Play:
    """A random history of a table: changes of members, and orders that a well-behaved node may give."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.t = Table(*range(1, 1 + self.draw(st.integers(1, 4))))
        self.incarnations = {key.id: 1 for key in self.t.nodes}
        self.jobs = 0
        self.highest: dict[tuple[int, int], int] = {}

    def step(self) -> None:
        before = self.t.table
        members = set(self.t.nodes)
        kind = self.draw(
            st.sampled_from(["submit", "up", "up", "up", "down", "down", "stop", "lose", "join", "check"])
        )
        if kind == "submit":
            self.jobs += 1
            order = Submit(spec=self.draw(specs(self.jobs)), preflight=self.draw(st.booleans()))
            self.t.change((self.draw(st.sampled_from(self.t.nodes)), order))
        elif kind == "lose" and len(self.t.nodes) > 1:
            self.t.change(removed=[self.draw(st.sampled_from(self.t.nodes)).id])
        elif kind == "join":
            node_id = self.draw(st.integers(1, 6))
            if node_id not in {key.id for key in self.t.nodes}:
                self.incarnations[node_id] = self.incarnations.get(node_id, 0) + 1
                self.t.change(added=[NodeKey(node_id, self.incarnations[node_id])])
        else:
            self._orders(kind)
        self._compare(before, members & set(self.t.nodes))

    def _orders(self, kind: str) -> None:
        orders: list[tuple[NodeKey, Order]] = []
        for job in self.t.table.jobs:
            for entry in job.ranks:
                if not entry.lives or entry.node is None or not self.draw(st.booleans()):
                    continue
                if kind == "up":
                    orders.append(ordered_up(job, entry.rank))
                elif kind == "down":
                    code = self.draw(st.sampled_from([0, 1, 2, -9, None]))
                    down = RankDown(
                        job=job.id, rank=entry.rank, incarnation=entry.incarnation, code=code, reason="x"
                    )
                    if cause := self.draw(st.sampled_from(["", "an error|1", MEMORY_CAUSE])):
                        told = RankCause(
                            job=job.id, rank=entry.rank, incarnation=entry.incarnation, cause=cause
                        )
                        orders.append((entry.node, told))
                    orders.append((entry.node, down))
            if kind == "check":
                problem = self.draw(st.sampled_from(["", "", "slow"]))
                node = self.draw(st.sampled_from(self.t.nodes))
                order = HostsChecked(job=job.id, hosts=((node, problem),), stops=job.stops)
                orders.append((self.t.nodes[0], order))
            if kind == "stop" and self.draw(st.booleans()):
                orders.append((self.t.nodes[0], Stop(job=job.id, reason="stop")))
        elapsed_ns = self.draw(st.integers(0, 100)) * SECOND_NS
        whole, batches = self.t, Table(*[])
        batches.nodes, batches.table, batches.epoch = list(whole.nodes), whole.table, whole.epoch
        whole.change(*orders, elapsed_ns=elapsed_ns)
        batches.change(elapsed_ns=elapsed_ns)
        while orders:
            cut = self.draw(st.integers(1, len(orders)))
            batches.change(*orders[:cut])
            orders = orders[cut:]
        assert without_epochs(batches.table) == without_epochs(whole.table), "batches make a difference"

    def _compare(self, before: JobTable, stayed: set[NodeKey]) -> None:
        """The invariants from one table to the next."""
        for job in self.t.table.jobs:
            old = before.job(job.id)
            if old is None:
                continue
            assert job.epoch >= old.epoch
            if old.view() != job.view() and job.view() is not None:
                assert job.epoch == self.t.epoch > old.epoch, "a view that differs has an epoch of its own"
            for was, entry in zip(old.ranks, job.ranks, strict=True):
                assert entry.incarnation >= was.incarnation
                if was.lives and entry.lives and was.node in stayed and was.incarnation == entry.incarnation:
                    assert entry.node == was.node, "what runs on a living node is never moved"
                if entry.state is SlotState.STARTING and was.state is not SlotState.STARTING:
                    assert entry.incarnation > was.incarnation
                if job.preflight and entry.lives and entry.node != was.node:
                    check = job.check_of(entry.node) if entry.node is not None else None
                    assert check is not None and not check.problem, "it moves to fit hosts only"
                if was.state in (SlotState.FINISHED, SlotState.LOST):
                    assert entry.state is was.state


def checked(t: Table, *hosts: tuple[int, str], stops: int | None = None) -> None:
    keys = {key.id: key for key in t.nodes}
    found = tuple((keys[node], problem) for node, problem in hosts)
    order = HostsChecked(job=1, hosts=found, stops=t.job().stops if stops is None else stops)
    t.change((t.nodes[0], order))


def test_with_preflight_hosts_get_ranks_once_they_were_found_fit_and_again_before_a_restart() -> None:
    t = Table(1, 2, 3)
    submit = Submit(spec=JobSpec(job=1, target="t", nodes_min=2, nodes_max=2), preflight=True)
    t.change((t.nodes[0], submit))
    assert t.job().phase is JobPhase.WAITING and "being checked" in t.job().reason
    checked(t, (1, ""), (2, "its memory is slow"))
    assert t.job().phase is JobPhase.WAITING, "one fit host is too few"
    checked(t, (3, ""))
    assert t.places() == [1, 3]
    t.up()
    t.down(0, -9)
    assert t.places() == [1, 3] and t.states() == "su", "where it ran it starts again at once"
    t.up()
    checked(t, (1, "slow"))
    assert t.job().check_of(NodeKey(1, 1)).problem == "", "a host that runs ranks is not judged"  # type: ignore[union-attr]
    t.change(removed=[3])
    assert t.job().phase is JobPhase.WAITING and "1 is quarantined" in t.job().reason
    t.change(added=[NodeKey(3, 2)])
    assert t.job().phase is JobPhase.WAITING, "one that comes back is a host that nobody has checked"
    checked(t, (3, ""))
    checked(t, (1, ""), stops=0)
    assert t.job().phase is JobPhase.WAITING, "no check that began before the restart counts any more"
    checked(t, (1, ""))
    assert t.places() == [1, 3] and t.job().phase is JobPhase.RUNNING


def test_a_check_holds_for_a_time() -> None:
    t = Table(1, 2, 3)
    submit = Submit(spec=JobSpec(job=1, target="t", nodes_min=1, nodes_max=2), preflight=True)
    t.change((t.nodes[0], submit))
    checked(t, (1, ""), (2, ""), (3, ""))
    t.up()
    t.change(elapsed_ns=CHECK_HOLDS_NS + 1)
    t.change(removed=[2])
    assert t.states() == "uv" and t.job().phase is JobPhase.RUNNING
    checked(t, (3, ""))
    assert t.places() == [1, 3]
    assert problem_of(HostsChecked(job=1, hosts=((NodeKey(1, 1), "x" * 501),), stops=0))


def test_a_host_that_runs_another_job_is_checked_too_before_it_gets_ranks() -> None:
    t = Table(1)
    t.change((t.nodes[0], Submit(spec=JobSpec(job=1, target="t"), preflight=True)))
    t.submit(job=2)
    t.change()
    assert t.places(job_id=2) == [1] and t.job().phase is JobPhase.WAITING
    checked(t, (1, ""))
    assert t.places() == [1]


def test_a_slot_that_has_finished_in_part_is_not_counted_as_two_nodes() -> None:
    t = Table(1, 2)
    t.submit(nodes_min=2, nodes_max=2, ranks_per_node=2)
    t.up()
    t.down(1, 0)
    t.change(removed=[2])
    waiting = t.table
    assert t.job().phase is JobPhase.WAITING and t.states() == "vfvv"
    for _ in range(3):
        t.change()
        assert without_epochs(t.table) == without_epochs(waiting), (
            "it does not start and stop again and again"
        )
    t.change(added=[NodeKey(3, 1)])
    assert t.job().phase is JobPhase.RUNNING and t.states() == "sfss"


def without_epochs(table: JobTable) -> JobTable:
    jobs = tuple(dataclasses.replace(job, epoch=0, unsettled=False) for job in table.jobs)
    return dataclasses.replace(table, jobs=jobs)


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_any_history(data: st.DataObject) -> None:
    play = Play(data)
    for _ in range(data.draw(st.integers(1, 25))):
        play.step()
    revive(play.t)


def revive(t: Table) -> None:
    """With nodes enough, whatever is not over comes up."""
    t.change(added=[NodeKey(node_id, 1) for node_id in range(100, 105)])
    fit = tuple((node, "") for node in t.nodes)
    t.change(*((t.nodes[0], HostsChecked(job=job.id, hosts=fit, stops=job.stops)) for job in t.table.jobs))
    for _ in range(20):
        for job in t.table.jobs:
            if job.phase is JobPhase.STOPPING:
                for entry in job.ranks:
                    if entry.lives:
                        t.down(entry.rank, -9, job_id=job.id)
            elif any(entry.state is SlotState.STARTING for entry in job.ranks):
                t.up(job_id=job.id)
    for job in t.table.jobs:
        assert job.phase is JobPhase.ENDED or job.view() is not None, job
