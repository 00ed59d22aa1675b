"""The job that a cluster was made for: given once, whoever dies; ended on all nodes with one exit code."""

from __future__ import annotations

import signal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zbmd.actors.cluster.jobs import single_job as o
from zbmd.actors.cluster.state.job_table import (
    Command,
    JobPhase,
    JobSpec,
    Order,
    RankDown,
    SlotState,
    Stop,
    Submit,
)
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView, ViewChange
from zbmd.actors.process.exit import REQUEUE_EXIT_CODE, USAGE_EXIT_CODE, describe_exit
from zbmd.actors.view import OnLoss
from zbmd.transport.machine import SetTimer, TimerFired

JOB = 9
PATIENCE_NS = 60 * 10**9
LEAVE_NS = 10**9


class World:
    """A cluster that decides when the test says so, and the machines of its nodes."""

    def __init__(
        self,
        nodes_min: int = 2,
        nodes_max: int = 3,
        *,
        last_call_ns: int = 0,
        on_loss: OnLoss = OnLoss.REPLACE,
    ) -> None:
        self.last_call_ns = last_call_ns
        self.spec = JobSpec(job=JOB, target="t", nodes_min=nodes_min, nodes_max=nodes_max, on_loss=on_loss)
        self.machines: dict[NodeKey, o.SingleJob] = {}
        self.view = ClusterView(epoch=1, nodes=())
        self.now_ns = 1
        self.orders: list[tuple[NodeKey, Order]] = []
        self.joining: list[NodeKey] = []
        self.going: set[NodeKey] = set()
        self.codes: dict[NodeKey, int] = {}
        self.said: list[str] = []

    def start(self, *node_ids: int) -> list[NodeKey]:
        keys = [NodeKey(node_id, 1) for node_id in node_ids]
        for key in keys:
            self.machines[key] = o.SingleJob(
                JOB,
                nodes_min=self.spec.nodes_min,
                nodes_max=self.spec.nodes_max,
                patience_ns=PATIENCE_NS,
                leave_ns=LEAVE_NS,
                last_call_ns=self.last_call_ns,
            )
            self.put(key, o.IncarnationBegan(me=key))
            self.joining.append(key)
        return keys

    def put(self, key: NodeKey, event: o.Event) -> list[o.Action]:
        machine = self.machines[key]
        actions = machine.handle(event, now_ns=self.now_ns)
        machine.check_invariants()
        for action in actions:
            match action:
                case o.GiveJob():
                    self.orders.append((key, Submit(spec=self.spec)))
                case o.StopJob(reason=reason):
                    self.orders.append((key, Stop(job=JOB, reason=reason)))
                case o.LeaveCluster():
                    self.going.add(key)
                case o.NotifyUser(text=text):
                    self.said.append(text)
                case o.End(exit_code=exit_code):
                    self.codes[key] = exit_code
                case SetTimer():
                    pass
        return actions

    def kill(self, key: NodeKey) -> None:
        """It dies, and what it has ordered may be lost with it."""
        self.machines.pop(key, None)
        self.going.add(key)

    def change(self, *orders: tuple[NodeKey, Order]) -> None:
        """Decide the next view: who came, who went, and what was ordered."""
        ordered, self.orders = [*self.orders, *orders], []
        numbers: dict[NodeKey, int] = {}
        commands: list[Command] = []
        for origin, order in ordered:
            if origin in self.going or not (self.view.holds(origin) or origin in self.joining):
                continue
            numbers[origin] = numbers.get(origin, self.view.jobs.applied(origin)) + 1
            commands.append(Command(origin=origin, number=numbers[origin], order=order))
        removed = tuple(sorted(key for key in self.going if self.view.holds(key)))
        added = tuple(Node(key) for key in sorted(self.joining) if key not in self.going)
        self.joining, self.going = [], set()
        change = ViewChange(epoch=self.view.epoch + 1, removed=removed, added=added, commands=tuple(commands))
        self.view = self.view.after(change)
        for key in removed:
            if key in self.machines:
                self.put(key, o.IncarnationEnded(reason="it left"))

    def act(self, *keys: NodeKey) -> None:
        """Have them act on the view, or all of its members."""
        for key in keys or [node.key for node in self.view.nodes]:
            if key in self.machines and self.view.holds(key):
                self.put(key, o.ViewActedOn(view=self.view))

    def settle(self) -> None:
        """Decide until nothing is left to be decided."""
        for _ in range(8):
            self.change()
            self.act()

    def end_ranks(self, code: int) -> None:
        """All ranks that live end so."""
        job = self.view.jobs.jobs[0]
        for entry in job.ranks:
            if entry.lives and entry.node is not None:
                reason, (rank, incarnation) = describe_exit(code), (entry.rank, entry.incarnation)
                down = RankDown(job=JOB, rank=rank, incarnation=incarnation, code=code, reason=reason)
                self.orders.append((entry.node, down))

    @property
    def phase(self) -> JobPhase:
        return self.view.jobs.jobs[0].phase


def test_the_lowest_gives_the_job_once_enough_are_there_and_all_end_with_it() -> None:
    w = World()
    first = w.start(5)[0]
    w.settle()
    assert not w.view.jobs.jobs
    assert w.said == ["1 of 2 to 3 nodes are here, and 2 are needed to begin; waiting for at most 1min"]
    second = w.start(3)[0]
    w.change()
    w.act()
    assert [origin for origin, _ in w.orders] == [second], "the lowest, not the first"
    w.settle()
    assert w.phase is JobPhase.RUNNING
    late = w.start(4)[0]
    w.settle()
    w.end_ranks(0)
    w.settle()
    assert w.codes == {first: 0, second: 0, late: 0}
    assert not any(key in w.machines and w.view.holds(key) for key in (first, second, late))


def test_the_next_gives_it_if_the_first_dies_before_it_is_decided() -> None:
    w = World(nodes_max=4)
    one, two, three = w.start(1, 2, 3)
    w.change()
    w.act(one)
    assert w.orders
    w.kill(one)
    w.change()
    assert not w.view.jobs.jobs
    w.act(three, two)
    w.settle()
    assert len(w.view.jobs.jobs) == 1 and w.view.jobs.jobs[0].submitter == two


def test_of_two_orders_the_second_is_refused_and_harms_nobody() -> None:
    w = World()
    one, two = w.start(2, 3)
    w.change()
    w.act(one)
    lower = w.start(1)[0]
    ordered, w.orders = w.orders, []
    w.change()
    w.act(lower)
    w.orders = [*w.orders, *ordered]
    w.settle()
    assert len(w.view.jobs.jobs) == 1
    w.end_ranks(0)
    w.settle()
    assert w.codes == {one: 0, two: 0, lower: 0}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (USAGE_EXIT_CODE, USAGE_EXIT_CODE),
        (3, 1),
        (-signal.SIGKILL, REQUEUE_EXIT_CODE),
        (-signal.SIGSEGV, 1),
    ],
)
def test_a_users_own_mistake_is_code_2_a_kill_is_75_and_another_failure_is_1(
    code: int, expected: int
) -> None:
    w = World(on_loss=OnLoss.STOP)
    keys = w.start(1, 2)
    w.settle()
    w.end_ranks(code)
    w.settle()
    w.end_ranks(-15)
    w.settle()
    assert w.codes == dict.fromkeys(keys, expected)


def test_who_is_asked_to_end_stops_the_job_on_all_nodes() -> None:
    w = World()
    one, two = w.start(1, 2)
    w.settle()
    w.put(two, o.EndAsked(reason="SIGINT received on two", exit_code=130, leave=False))
    w.settle()
    assert w.phase is JobPhase.STOPPING and w.view.jobs.jobs[0].reason == "SIGINT received on two"
    w.end_ranks(-15)
    w.settle()
    assert w.codes == {one: 1, two: 130}


def test_who_is_asked_to_leave_goes_alone_and_is_gone_at_once_when_asked_again() -> None:
    w = World(nodes_min=1)
    one, two, three = w.start(1, 2, 3)
    w.settle()
    w.put(three, o.EndAsked(reason="SIGTERM", exit_code=143, leave=True))
    w.settle()
    assert w.codes == {three: 143} and w.phase is JobPhase.RUNNING
    again = o.EndAsked(reason="SIGTERM", exit_code=143, leave=True)
    w.put(two, again)
    w.put(two, again)
    assert w.codes == {three: 143, two: 143}
    assert one not in w.codes


def test_a_node_that_waits_moves_to_where_the_run_has_begun_again() -> None:
    w = World()
    one, two = w.start(1, 2)
    w.settle()
    again = o.OtherPartFound(node=Node(NodeKey(0, 1), name="n0"), lowest=0 + 1)
    assert w.put(two, again) == [], "it misses no node"
    w.kill(one)
    w.settle()
    assert w.view.jobs.jobs[0].phase is JobPhase.WAITING
    higher = o.OtherPartFound(node=Node(NodeKey(9, 1)), lowest=3)
    assert w.put(two, higher) == [], "the part with the lower id stays"
    own = o.OtherPartFound(node=w.view.nodes[0], lowest=1)
    assert w.put(two, own) == [], "its own part"
    w.put(two, again)
    assert w.said[-1] == "the run has begun again at n0: this node joins it there"
    w.settle()
    assert w.codes == {two: o.MOVES}


def test_enough_nodes_wait_for_more_of_them_until_the_last_call_is_over() -> None:
    w = World(last_call_ns=LEAVE_NS)
    one, _ = w.start(1, 2)
    w.settle()
    assert not w.view.jobs.jobs
    w.now_ns += LEAVE_NS - 1
    w.put(one, TimerFired())
    w.settle()
    assert not w.view.jobs.jobs, "it is not over"
    w.now_ns += 1
    w.put(one, TimerFired())
    w.settle()
    assert w.phase is JobPhase.RUNNING
    whole = World(last_call_ns=LEAVE_NS)
    whole.start(1, 2, 3)
    whole.settle()
    assert whole.phase is JobPhase.RUNNING, "there are no more to wait for"


def test_a_founder_that_is_back_moves_to_where_the_run_is_under_way() -> None:
    w = World(nodes_min=1, last_call_ns=LEAVE_NS)
    one = w.start(1)[0]
    w.settle()
    elsewhere = o.RunningPartFound(node=Node(NodeKey(7, 1), address="a:1", name="n7"), age_ns=5)
    w.put(one, o.RunningPartFound(node=w.view.nodes[0], age_ns=5))
    assert not w.said, "its own part"
    w.put(one, elsewhere)
    assert w.said[-1] == "the run is under way at n7: this node joins it there"
    assert w.machines[one].moves_to == elsewhere.node
    w.settle()
    assert w.codes == {one: o.MOVES}


@pytest.mark.parametrize(("age_ns", "codes"), [(1 << 62, [o.MOVES]), (0, [])])
def test_of_two_parts_in_which_the_job_runs_the_younger_one_moves(age_ns: int, codes: list[int]) -> None:
    w = World(nodes_min=1)
    one = w.start(1)[0]
    w.settle()
    assert w.phase is JobPhase.RUNNING
    w.put(one, o.RunningPartFound(node=Node(NodeKey(7, 1), name="n7"), age_ns=age_ns))
    w.settle()
    assert list(w.codes.values()) == codes


def test_the_lowest_node_of_a_job_that_misses_one_looks_for_a_founder_that_is_back() -> None:
    w = World()
    one, two, three = w.start(1, 2, 3)
    w.settle()
    looking = [key for key, machine in w.machines.items() if machine.age_to_tell_ns is not None]
    assert looking == [], "no node is missing"
    w.kill(one)
    w.settle()
    assert w.phase is JobPhase.RUNNING
    assert [key for key, machine in w.machines.items() if machine.age_to_tell_ns is not None] == [two]
    assert three in w.machines


def test_nobody_waits_for_ever() -> None:
    w = World()
    one = w.start(1)[0]
    w.settle()
    w.now_ns += PATIENCE_NS
    w.put(one, TimerFired())
    assert "given up after 1min: 1 of 2 to 3 nodes are here" in w.said[-1]
    assert not w.codes, "it leaves in order"
    w.now_ns += LEAVE_NS
    w.put(one, TimerFired())
    assert w.codes == {one: 1}


def test_who_was_cut_off_tries_to_come_back_for_so_long() -> None:
    w = World()
    one, _ = w.start(1, 2)
    w.settle()
    w.put(one, o.IncarnationEnded(reason="the others went on without it"))
    assert not w.codes
    w.now_ns += PATIENCE_NS - 1
    w.put(one, TimerFired())
    assert not w.codes
    w.now_ns += 1
    w.put(one, TimerFired())
    assert w.codes == {one: 1}
    assert "the others went on without it" in w.said[-1]


def test_who_is_asked_before_it_is_in_a_cluster_ends_at_once() -> None:
    w = World()
    one = w.start(1)[0]
    w.put(one, o.EndAsked(reason="SIGTERM", exit_code=143, leave=True))
    assert w.codes == {one: 143}
    assert w.put(one, TimerFired()) == []


@example([("s", 0), ("s", 1), ("c", 0), ("a", 0), ("c", 0), ("k", 0), ("k", 0)], 1)
@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from("skcao"), st.integers(0, 9)), max_size=40), st.integers(1, 3))
def test_whatever_comes_and_goes_one_job_is_given_and_it_begins(
    steps: list[tuple[str, int]], nodes_min: int
) -> None:
    """s: start a node; k: kill one; c: decide a view; a: one acts on it; o: all do."""
    w = World(nodes_min=nodes_min, nodes_max=4)
    started: set[int] = set()
    for what, n in steps:
        alive = sorted(w.machines)
        match what:
            case "s":
                if n not in started:  # who comes back has another id
                    started.add(n)
                    w.start(n)
            case "k" if alive:
                w.kill(alive[n % len(alive)])
            case "c":
                w.change()
            case "a" if alive:
                w.act(alive[n % len(alive)])
            case _:
                w.act()
        assert len(w.view.jobs.jobs) <= 1
    w.settle()
    w.start(*range(20, 20 + nodes_min))
    w.settle()
    assert len(w.view.jobs.jobs) == 1
    job = w.view.jobs.jobs[0]
    assert job.phase is JobPhase.RUNNING and any(e.state is SlotState.STARTING for e in job.ranks)
    for _ in range(w.spec.nodes_max):  # a rank without a node starts on one whose rank has finished
        w.end_ranks(0)
        w.settle()
    assert set(w.codes) == set(w.machines) and set(w.codes.values()) == {0}
