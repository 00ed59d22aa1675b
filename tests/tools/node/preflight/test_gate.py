"""The host gate: in any history of hosts that come, go and fail, ranks start on hosts that were found fit."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from zbmd.actors.cluster.state import job_rules
from zbmd.actors.cluster.state.job_rules import after_change
from zbmd.actors.cluster.state.job_table import (
    NO_JOBS,
    Command,
    HostsChecked,
    Job,
    JobPhase,
    JobSpec,
    Order,
    RankDown,
    RankUp,
    SlotState,
    Submit,
    problem_of,
)
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.tools.node.preflight import gate as g
from zbmd.tools.node.preflight.survey import HostSpeed, LinkSpeed
from zbmd.transport.machine import SetTimer, TimerFired

JOB, SECOND_NS = 7, 10**9
SPEED = HostSpeed(flops_per_s=1e11, memory_per_s=1e10)
LINK = LinkSpeed(bytes_per_s=1e9, trip_ns=100_000)
FAULTS = ("itself", "silent", "refuses")
SEEDS = 40


@dataclass(slots=True)
class Host:
    node: Node
    gate: g.HostGate
    fault: str = ""
    timer: int = 0
    measured_ns: int = -1
    """When it last measured itself, and was found good."""
    came_ns: int = 0


class World:
    """Hosts of one job on one clock. Measurements and orders take their time, which the seed chooses."""

    def __init__(self, seed: int, gate: Callable[[int], g.HostGate] = g.HostGate) -> None:
        self.random, self.make = random.Random(seed), gate
        self.now_ns, self.events = 0, list[tuple[int, int, Callable[[], None]]]()
        self.hosts: dict[NodeKey, Host] = {}
        self.view = ClusterView(epoch=1, nodes=(), jobs=NO_JOBS)
        self.since_ns = self.stopped_ns = self.count = 0
        self.began_ns: dict[tuple[NodeKey, int], int] = {}
        self.reports: list[str] = []
        self.longest_ns = 0

    def later(self, least_s: float, most_s: float, call: Callable[[], None]) -> None:
        self.count += 1
        at_ns = self.now_ns + round(self.random.uniform(least_s, most_s) * SECOND_NS)
        heapq.heappush(self.events, (at_ns, self.count, call))

    def run(self, seconds: float) -> None:
        end_ns = self.now_ns + round(seconds * SECOND_NS)
        while self.events and self.events[0][0] <= end_ns:
            self.now_ns, _, call = heapq.heappop(self.events)
            call()
        self.now_ns = end_ns

    # ---- the cluster

    def change(
        self,
        *orders: tuple[NodeKey, Order],
        added: tuple[Node, ...] = (),
        removed: frozenset[NodeKey] = frozenset(),
    ) -> None:
        before = self.view.jobs.job(JOB)
        nodes = [node for node in self.view.nodes if node.key not in removed]
        nodes = sorted([*nodes, *added], key=lambda node: node.key)
        numbers: dict[NodeKey, int] = {}
        commands: list[Command] = []
        for origin, order in orders:
            assert not problem_of(order)
            numbers[origin] = numbers.get(origin, self.view.jobs.applied(origin)) + 1
            commands.append(Command(origin=origin, number=numbers[origin], order=order))
        jobs = after_change(
            self.view.jobs,
            epoch=self.view.epoch + 1,
            members=[node.key for node in nodes],
            removed=removed,
            commands=commands,
            elapsed_ns=self.now_ns - self.since_ns,
        )
        self.since_ns = self.now_ns
        self.view = ClusterView(epoch=self.view.epoch + 1, nodes=tuple(nodes), jobs=jobs)
        self.judge(before, jobs.job(JOB))
        for key in list(self.hosts):
            if key in removed:
                del self.hosts[key]
            else:
                self.put(key, g.Seen(me=key, view=self.view))

    def judge(self, before: Job | None, now: Job | None) -> None:
        """Check what must hold of each change of the table."""
        if before is None or now is None:
            return
        if now.phase is JobPhase.WAITING and before.phase is JobPhase.RUNNING:
            self.stopped_ns = self.now_ns
        for was, entry in zip(before.ranks, now.ranks, strict=True):
            if entry.state is not SlotState.STARTING or entry.incarnation == was.incarnation:
                continue
            assert entry.node is not None
            if was.lives and was.node == entry.node:
                continue  # restarted where it ran: that waits for no check
            host = self.hosts[entry.node]
            assert host.measured_ns >= max(self.stopped_ns, host.came_ns), (
                f"{entry} starts at {self.now_ns} on a host that was measured at {host.measured_ns}"
            )
        for entry in now.ranks:
            if entry.state is SlotState.STARTING and entry.node is not None:
                self.later(0.05, 0.5, lambda rank=entry.rank, i=entry.incarnation: self.up(rank, i))

    def up(self, rank: int, incarnation: int) -> None:
        job = self.view.jobs.job(JOB)
        entry = None if job is None else job.ranks[rank]
        if entry is None or entry.incarnation != incarnation or entry.state is not SlotState.STARTING:
            return
        assert entry.node is not None
        self.change((entry.node, RankUp(job=JOB, rank=rank, incarnation=incarnation, address=f"a{rank}")))

    def come(self, number: int, incarnation: int, fault: str = "") -> None:
        node = Node(NodeKey(number, incarnation), name=f"host{number}")
        gate = self.make(JOB)
        self.hosts[node.key] = Host(node=node, gate=gate, fault=fault, came_ns=self.now_ns)
        self.change(added=(node,))

    # ---- a host

    def put(self, key: NodeKey, event: g.Event) -> None:
        host = self.hosts.get(key)
        if host is None:
            return
        actions = host.gate.handle(event, now_ns=self.now_ns)
        host.gate.check_invariants()
        for action in actions:
            self.perform(host, action)

    def perform(self, host: Host, action: g.Action) -> None:
        key = host.node.key
        match action:
            case g.MeasureHosts(number=number, hosts=hosts, kept=kept):
                self.began_ns[key, number] = self.now_ns
                runs = self.job().nodes()
                assert not runs & set(hosts), "a host that runs ranks is measured"
                for other in (*hosts, *kept):
                    self.later(0.01, 3.0, lambda o=other: self.measure(key, number, o, fresh=o in hosts))
            case g.MeasureLinks(number=number, pairs=pairs):
                for one, other in pairs:
                    self.later(0.1, 2.0, lambda a=one, b=other: self.link(key, number, a, b))
            case g.Judge(hosts=hosts, stops=stops):
                took_ns = self.now_ns - self.began_ns[key, host.gate._number]
                self.longest_ns = max(self.longest_ns, took_ns)
                order = HostsChecked(job=JOB, hosts=hosts, stops=stops)
                self.later(0.01, 0.3, lambda: self.change((key, order)) if key in self.hosts else None)
            case g.Report(text=text):
                self.reports.append(text)
            case SetTimer(at_ns=at_ns):
                host.timer += 1
                self.count += 1
                mine = host.timer
                fired = lambda: self.put(key, TimerFired()) if host.timer == mine else None  # noqa: E731
                heapq.heappush(self.events, (max(at_ns, self.now_ns), self.count, fired))

    def measure(self, asker: NodeKey, number: int, key: NodeKey, *, fresh: bool) -> None:
        host = self.hosts.get(key)
        if host is None or host.fault == "silent":
            return
        problem = "its memory is slow" if fresh and host.fault == "itself" else ""
        if fresh and not host.fault:
            host.measured_ns = self.now_ns
        self.put(asker, g.HostMeasured(number=number, node=key, problem=problem, speed=SPEED))

    def link(self, asker: NodeKey, number: int, one: NodeKey, other: NodeKey) -> None:
        ends = [self.hosts.get(one), self.hosts.get(other)]
        if any(host is None or host.fault == "silent" for host in ends):
            return
        bad = any(host is not None and host.fault == "refuses" for host in ends)
        found = "refused" if bad else LINK
        self.put(asker, g.LinkMeasured(number=number, one=one, other=other, found=found))

    def job(self) -> Job:
        job = self.view.jobs.job(JOB)
        assert job is not None
        return job


def history(seed: int, gate: Callable[[int], g.HostGate] = g.HostGate) -> World:
    """Run a random history; at its end there are good hosts enough, and the job runs on them."""
    world = World(seed, gate)
    chance = world.random
    most = chance.randint(2, 4)
    spec = JobSpec(job=JOB, target="t", nodes_min=chance.randint(2, most), nodes_max=most)
    for number in range(most):
        world.come(number, 1)
    world.change((world.view.nodes[0].key, Submit(spec=spec, preflight=True)))
    incarnations = dict.fromkeys(range(most + 2), 1)
    for _ in range(chance.randint(4, 14)):
        world.run(chance.uniform(0.1, 25.0))
        here = {node.key.id: node.key for node in world.view.nodes}
        number = chance.randrange(most + 2)
        match chance.choice(["go", "go", "come", "come", "fault", "rank"]):
            case "go" if number in here and len(here) > 1:
                world.change(removed=frozenset([here[number]]))
            case "come" if number not in here:
                incarnations[number] += 1
                world.come(number, incarnations[number], chance.choice(["", "", *FAULTS]))
            case "fault" if number in here:
                world.hosts[here[number]].fault = chance.choice(FAULTS)
            case "rank" if world.job().ranks[0].state is SlotState.UP:
                entry = world.job().ranks[0]
                assert entry.node is not None
                down = RankDown(job=JOB, rank=0, incarnation=entry.incarnation, code=-9, reason="killed")
                world.change((entry.node, down))
            case _:
                pass
    for number in range(100, 104):
        world.come(number, 1)
    world.run(200.0)
    return world


@pytest.mark.parametrize("seed", range(SEEDS))
def test_ranks_start_on_hosts_that_were_found_fit_and_a_check_ends_in_time(seed: int) -> None:
    world = history(seed)
    assert world.longest_ns <= g.LIMIT_NS
    job = world.job()
    if job.phase is JobPhase.ENDED or job.phase is JobPhase.STOPPING:
        assert "restarts" in job.reason, "no progress over so many restarts ends the job as ever"
        return
    assert job.phase is JobPhase.RUNNING and job.view() is not None, job
    assert all(world.hosts[node].measured_ns >= 0 for node in job.nodes())


class IgnoresLinks(g.HostGate):
    """Ignores what was found of links."""

    def _take(self, found: g.s.Surveyed) -> None:
        pass


class AsksOnce(g.HostGate):
    """Waits for hosts without a bound."""

    def _set_timer(self, at_ns: int) -> None:
        if self.state is not g.GateState.HOSTS:
            super()._set_timer(at_ns)


class IgnoresProblems(g.HostGate):
    """Ignores what a host says of itself."""

    def _host_measured(self, event: g.HostMeasured) -> None:
        self._waits.discard(event.node)


@pytest.mark.parametrize("planted", [IgnoresLinks, AsksOnce, IgnoresProblems])
def test_planted_bugs_are_found(planted: type[g.HostGate]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(SEEDS):
            history(seed, planted)


def test_a_table_that_keeps_checks_of_before_a_restart_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    drops = job_rules._waiting  # type: ignore[attr-defined]

    def keeps(job: Job, reason: str) -> Job:
        waiting = drops(job, reason)
        return waiting if waiting is job else job_rules.dataclasses.replace(waiting, checks=job.checks)

    monkeypatch.setattr(job_rules, "_waiting", keeps)
    with pytest.raises(AssertionError, match="that was measured at"):
        for seed in range(SEEDS):
            history(seed)


class CountsOldChecks(g.HostGate):
    """A check that began before the ranks were stopped counts as one of after that."""

    def _is_outdated(self) -> bool:
        job = self._wanted()
        self._stops = self._stops if job is None else job.stops
        return False


def stopped_during_a_check(seed: int, gate: Callable[[int], g.HostGate] = g.HostGate) -> World:
    """Lose a host while a spare one is being checked: all ranks stop, and the spare one takes its place."""
    world = World(seed, gate)
    for number in range(3):
        world.come(number, 1)
    spec = JobSpec(job=JOB, target="t", nodes_min=3, nodes_max=3)
    world.change((world.view.nodes[0].key, Submit(spec=spec, preflight=True)))
    world.run(30.0)
    world.come(3, 1)
    while world.hosts[NodeKey(3, 1)].measured_ns < 0:
        world.run(0.01)
    world.change(removed=frozenset([NodeKey(2, 1)]))
    assert world.job().phase is JobPhase.WAITING
    world.run(30.0)
    return world


def test_a_check_that_began_before_all_ranks_were_stopped_does_not_count_after_that() -> None:
    for seed in range(SEEDS):
        world = stopped_during_a_check(seed)
        assert world.job().view() is not None and NodeKey(3, 1) in world.job().nodes()
    with pytest.raises(AssertionError, match="that was measured at"):
        for seed in range(SEEDS):
            stopped_during_a_check(seed, CountsOldChecks)


def test_a_rank_that_is_restarted_where_it_ran_waits_for_no_check() -> None:
    world = World(0)
    for number in range(2):
        world.come(number, 1)
    spec = JobSpec(job=JOB, target="t", nodes_min=2, nodes_max=2)
    world.change((world.view.nodes[0].key, Submit(spec=spec, preflight=True)))
    world.run(30.0)
    assert world.job().view() is not None and len(world.began_ns) == 1
    entry = world.job().ranks[1]
    assert entry.node is not None
    down = RankDown(job=JOB, rank=1, incarnation=entry.incarnation, code=-9, reason="killed")
    world.change((entry.node, down))
    assert world.job().ranks[1].state is SlotState.STARTING and world.job().ranks[1].node == entry.node
    world.run(30.0)
    assert world.job().view() is not None and len(world.began_ns) == 1


def test_a_host_that_comes_back_slow_is_quarantined_with_the_reason_and_the_job_goes_on_without_it() -> None:
    world = World(1)
    for number in range(3):
        world.come(number, 1)
    spec = JobSpec(job=JOB, target="t", nodes_min=2, nodes_max=3)
    world.change((world.view.nodes[0].key, Submit(spec=spec, preflight=True)))
    world.run(30.0)
    world.change(removed=frozenset([NodeKey(2, 1)]))
    world.come(2, 2, "refuses")
    world.run(60.0)
    check = world.job().check_of(NodeKey(2, 2))
    assert check is not None and check.problem.startswith("its link to host")
    assert world.job().nodes() == {NodeKey(0, 1), NodeKey(1, 1)}
    assert any(
        re_start.startswith("preflight: before ranks start again: 0 of 1") for re_start in world.reports
    )
    assert world.reports[-1].endswith("(all hosts: 2 of 3)")
    world.change(removed=frozenset([NodeKey(2, 2)]))
    world.come(2, 3)
    world.run(60.0)
    assert world.reports[-1].endswith("(all hosts: 3 of 3)")
    assert NodeKey(2, 3) in world.job().nodes() and world.job().check_of(NodeKey(2, 2)) is None


def test_how_much_a_host_measures() -> None:
    def depth(whole_s: int | None, last_s: int | None, *, ran: bool) -> g.Depth:
        times = [None if ago is None else 10**13 - ago * SECOND_NS for ago in (whole_s, last_s)]
        return g.depth_of(whole_ns=times[0], last_ns=times[1], ran_since=ran, now_ns=10**13)

    assert depth(5, 5, ran=False) is g.Depth.KEPT
    assert depth(5, 5, ran=True) is g.Depth.QUICK
    assert depth(500, 70, ran=False) is g.Depth.QUICK
    assert depth(700, 70, ran=False) is g.Depth.WHOLE
    assert depth(None, None, ran=False) is g.Depth.WHOLE


@pytest.mark.parametrize("field", ["flops_per_s", "memory_per_s"])
def test_a_host_that_has_become_slow_is_named_beside_its_own_past(field: str) -> None:
    speeds = {"flops_per_s": SPEED.flops_per_s, "memory_per_s": SPEED.memory_per_s}
    assert not g.slower_than_before(SPEED, HostSpeed(**{**speeds, field: speeds[field] * 0.6}))
    why = g.slower_than_before(SPEED, HostSpeed(**{**speeds, field: speeds[field] * 0.4}))
    assert why.startswith("its ") and "where" in why
