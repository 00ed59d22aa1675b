"""A simulated cluster that runs jobs: the nodes of `cluster.membership.scenario`, with the machine of their
jobs.

Node 0 submits a job when it founds the cluster, so the job grows as nodes join. Ranks are simulated: they
take time to start and to link up, some are killed at any moment, some never join, and some lose the link to
a rank on another node, which both live through. Nodes are killed, paused and cut off as in `membership`.
Checked:

- no rank has two incarnations in one epoch of its job;
- a view of a job is sent to ranks only when every node that hosts a member of it knows it;
- a view is entered only when all of its members are linked;
- a view is entered by none of its members if one of them went past it, but for a view of which a member died;
- ranks of a node that is no longer in the cluster's view are gone within `OUTLIVES_NS`, and within `TICK_NS`
  of the end of their node's life, not counting the time in which the node did not run.

Once the faults have ended, all ranks of the job must be up and in its one view, in which no two have lost
each other.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from zbmd.actors.cluster.contracts import HostLinked
from zbmd.actors.cluster.jobs import node_events as e
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.cluster.jobs.node_machine import LocalJobs
from zbmd.actors.cluster.messages import Action, Installed, Message, Ordered, Stopped
from zbmd.actors.cluster.state.job_table import RESTARTS_MAX, JobSpec, Submit
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.simulated.membership_scenario import (
    LIVENESS_NS,
    SECOND_NS,
    Cluster,
    MembershipScenario,
    Packet,
    SimulatedNode,
    in_one_view,
    name_of,
    populate,
    protected_of,
)
from zbmd.actors.view import RANKS_MAX, View
from zbmd.transport import sim
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_NS_DEFAULT, RECOVERY_BUDGET_NS_MIN
from zbmd.transport.machine import SetTimer, TimerFired

JOB = 7
RANKS_PER_NODE_MAX = 3
NODES_MAX = 6
LATE_NS_MAX = 400_000_000
FORK_NS = (500_000, 5_000_000)
JOIN_NS = (2_000_000, 60_000_000)
# A template that has to wait for a core reports a fork later than the process joins.
LATE_REPORT_SHARE = 0.1
LATE_REPORT_NS = (0, 100_000_000)
SLOW = sim.Conditions(jitter_ns=15_000_000)
"""Every other cluster's network: so that nodes act on one view at different times."""
LINK_NS = (100_000, 150_000_000)
"""Long enough for the next view to come before this one is entered."""
END_NS = (50_000, 3_000_000)
STUBBORN_NS = 5 * SECOND_NS
"""A rank that does not end when it is asked to."""
MUTE_SHARE = 0.1
"""Of the ranks that others wait for: they never join."""
PARTED_SHARE = 0.01
"""Of the ticks of ranks: one and another lose the link between them."""
START_TIMEOUT_NS = 6 * SECOND_NS
"""Of the jobs that have ranks that never join."""
JOBS_LIVENESS_NS = LIVENESS_NS + START_TIMEOUT_NS
TICK_NS = 50_000_000
PAUSED_NS_MIN = 2 * TICK_NS
"""A rank whose ticks are farther apart has not run in between."""
OUTLIVES_NS = 2 * SECOND_NS
"""Twice the recovery budget of the simulated cluster."""


@dataclass(slots=True)
class JobWorld:
    """The cluster's jobs as seen from outside of it."""

    cluster: Cluster
    spec: JobSpec
    rng: random.Random
    calm_ns: int
    """From this time on, no rank dies of itself."""
    submitted: bool = False
    removed_ns: dict[NodeKey, int] = field(default_factory=dict[NodeKey, int])
    """When somebody first acted on a view without this incarnation."""
    ended_ns: dict[NodeKey, int] = field(default_factory=dict[NodeKey, int])
    """When an incarnation stopped itself."""
    lives: set[NodeKey] = field(default_factory=set[NodeKey])
    acting: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict[int, dict[int, int]](dict))
    """By epoch and rank, the incarnation that was asked to act."""
    views: dict[int, View] = field(default_factory=dict[int, View])
    linked: dict[int, set[int]] = field(default_factory=lambda: defaultdict[int, set[int]](set))
    entered: dict[int, set[int]] = field(default_factory=lambda: defaultdict[int, set[int]](set))
    passed: dict[int, set[int]] = field(default_factory=lambda: defaultdict[int, set[int]](set))
    """By epoch, the ranks that went past it although no member of it was known to be dead."""
    parted: dict[int, set[RankKey]] = field(default_factory=lambda: defaultdict[int, set[RankKey]](set))
    """By epoch, the ranks that have lost a link in it to one that lives."""

    def acts_on(self, view: ClusterView, now_ns: int) -> None:
        """A node acts on a view of the cluster."""
        for key in self.lives - {node.key for node in view.nodes}:
            self.removed_ns.setdefault(key, now_ns)
        self.lives |= {node.key for node in view.nodes}

    def told(self, key: NodeKey, view: View, epoch: int, hosts: Sequence[NodeKey]) -> None:
        """A node tells its ranks of a view; `epoch` is that of the cluster's view that it acts on."""
        known = self.views.setdefault(view.epoch, view)
        assert known == view, f"two views of one epoch: {known} and {view}"
        assert view.epoch <= epoch, f"view {view.epoch} is sent at {epoch}"
        ignorant = [str(host) for host in hosts if self.cluster.knows.get(host, 0) < view.epoch]
        assert not ignorant, f"{key} acts on view {view.epoch}, of which {', '.join(ignorant)} know nothing"

    def enters(self, key: RankKey, epoch: int) -> None:
        """A rank acts in an epoch."""
        first = self.acting[epoch].setdefault(key.rank, key.incarnation)
        assert first == key.incarnation, f"{key} acts in epoch {epoch}, and so does #{first}"
        missing = set(self.views[epoch].ranks) - self.linked[epoch]
        assert not missing, f"{key} enters view {epoch}, and {missing} are not linked"
        self.entered[epoch].add(key.rank)
        self._check_together(epoch)

    def goes_past(self, key: RankKey, epoch: int, *, doomed: bool) -> None:
        """A rank receives a later view and has not entered this one."""
        if not doomed:
            self.passed[epoch].add(key.rank)
            self._check_together(epoch)

    def _check_together(self, epoch: int) -> None:
        entered, passed = self.entered[epoch], self.passed[epoch]
        assert not (entered and passed), f"epoch {epoch}: {entered} entered, {passed} went past it"


@dataclass(slots=True)
class SimRank:
    """One process of the job. view: the newest one that it received; entered: the epoch it acts in.

    mute: it never joins; parted: the newest epoch in which it has told its host of a lost link; known: its
    node knows of its fork.
    """

    key: RankKey
    node: NodeKey
    view: View | None = None
    entered: int = 0
    stubborn: bool = False
    mute: bool = False
    known: bool = False
    parted: int = 0
    tick_ns: int = 0
    ran_since_ns: int = 0


class JobsNode(SimulatedNode):
    """The driver of one node and of its ranks. Decides nothing."""

    def __init__(self, world: JobWorld, node_id: int, incarnation: int, *, founds: bool) -> None:
        self.world = world
        self.local = LocalJobs()
        self.ranks: dict[RankKey, SimRank] = {}
        self._local_events: deque[e.Event] = deque()
        self._busy = self._late = False
        super().__init__(world.cluster, node_id, incarnation, founds=founds)

    def check_invariants(self) -> None:
        """The machines' own."""
        super().check_invariants()
        self.local.check_invariants()

    def _new_life(self) -> None:
        super()._new_life()
        self._local_events.append(e.IncarnationBegan(me=self.me.key))

    def _start(self, now_ns: int) -> None:
        """Nodes begin one after the other, so that the job grows step by step."""
        if self._founds or self._late:
            super()._start(now_ns)
            return
        self._late = True
        at_ns = now_ns + self.world.rng.randint(0, LATE_NS_MAX)
        self._effects.append(sim.SetTimer(name="again", at_ns=at_ns))

    def deliver(self, stimulus: sim.Stimulus[Packet], *, now_ns: int) -> Sequence[sim.Effect[Packet]]:
        """As a node without jobs, and for the timers of ranks."""
        match stimulus:
            case sim.TimerFired(name="jobs"):
                self._effects = []
                self._local(TimerFired(), now_ns)
            case sim.TimerFired(name=name) if name.startswith("rank "):
                self._effects = []
                self._rank_timer(name, now_ns)
            case _:
                super().deliver(stimulus, now_ns=now_ns)
                self._drain(now_ns)
        return self._effects

    def _arrived(self, sender: Node, message: Message | HostLinked, now_ns: int) -> None:
        super()._arrived(sender, message, now_ns)
        if isinstance(message, HostLinked):
            self._local(e.HostReported(sender=sender.key, word=message), now_ns)

    def _perform(self, action: Action, now_ns: int) -> None:
        super()._perform(action, now_ns)
        match action:
            case Installed(view=view):
                self.world.acts_on(view, now_ns)
                self._local_events.append(e.ViewActedOn(view=view))
                if not self.world.submitted:
                    self.world.submitted = True
                    self._feed(Ordered(order=Submit(spec=self.world.spec)), now_ns)
            case Stopped(reason=reason):
                self.world.ended_ns[self.me.key] = now_ns
                self._local_events.append(e.IncarnationEnded(reason=reason))
            case _:
                pass

    # -- the machine of its jobs -------------------------------------------------------------------------

    def _local(self, event: e.Event, now_ns: int) -> None:
        self._local_events.append(event)
        self._drain(now_ns)

    def _drain(self, now_ns: int) -> None:
        """Events one after the other, also those that follow from an event's own actions."""
        if self._busy:
            return
        self._busy = True
        while self._local_events:
            for action in self.local.handle(self._local_events.popleft(), now_ns=now_ns):
                self._act(action, now_ns)
        self._busy = False

    def _act(self, action: e.Action, now_ns: int) -> None:
        match action:
            case e.Fork(key=key):
                rank = SimRank(key, self.me.key, stubborn=self.world.rng.random() < 0.1)
                rank.mute = self._is_waited_for(now_ns) and self.world.rng.random() < MUTE_SHARE
                self.ranks[key] = rank
                self._later(key, "forked", FORK_NS, now_ns)
            case e.InstallView(view=view, to=to):
                self._install(view, to, now_ns)
            case e.EnterView(epoch=epoch, to=to):
                for rank in self._of(to):
                    if rank.view is not None and rank.view.epoch == epoch:
                        rank.entered = epoch
                        self.world.enters(rank.key, epoch)
            case e.Terminate(key=key):
                rank = self.ranks[key]
                delay = (STUBBORN_NS, STUBBORN_NS) if rank.stubborn else END_NS
                self._later(key, "ended", delay, now_ns)
            case e.Kill(key=key):
                self._later(key, "killed", END_NS, now_ns)
            case e.ProposeOrder(order=order):
                self._feed(Ordered(order=order), now_ns)
            case e.SendToHost(to=to_node, word=word):
                self._send(Node(to_node, name_of(to_node.id)), word)
            case SetTimer(at_ns=at_ns):
                self._effects.append(sim.SetTimer(name="jobs", at_ns=at_ns))
            case e.Open() | e.Close() | e.AnnounceDown() | e.LeaveCluster():
                pass
            case _:
                assert_never(action)

    def _is_waited_for(self, now_ns: int) -> bool:
        """Whether a rank that is forked now, and never joins, is to be given up."""
        short = self.world.spec.recovery_budget_ns == RECOVERY_BUDGET_NS_MIN
        job = None if self.acts_on is None else self.acts_on.jobs.job(JOB)
        return short and now_ns < self.world.calm_ns and job is not None and job.epoch > 0

    def _install(self, view: View, to: tuple[int, ...], now_ns: int) -> None:
        assert self.acts_on is not None
        job = self.acts_on.jobs.job(JOB)
        assert job is not None
        hosts = [node for m in view.members if (node := job.ranks[m.rank].node) is not None]
        self.world.told(self.me.key, view, self.acts_on.epoch, hosts)
        for rank in self._of(to):
            before = rank.view
            if before is not None and rank.entered < before.epoch:
                now = {(m.rank, m.incarnation) for m in view.members}
                doomed = any((m.rank, m.incarnation) not in now for m in before.members)
                self.world.goes_past(rank.key, before.epoch, doomed=doomed)
            rank.view = view
            self._later(rank.key, f"linked {view.epoch}", LINK_NS, now_ns)

    def _of(self, ranks: tuple[int, ...]) -> list[SimRank]:
        """The newest process of each."""
        newest = {key.rank: rank for key, rank in sorted(self.ranks.items())}
        return [newest[rank] for rank in ranks if rank in newest]

    # -- its ranks ---------------------------------------------------------------------------------------

    def _later(self, key: RankKey, what: str, delay_ns: tuple[int, int], now_ns: int) -> None:
        name = f"rank {key.rank} {key.incarnation} {what}"
        self._effects.append(sim.SetTimer(name=name, at_ns=now_ns + self.world.rng.randint(*delay_ns)))

    def _rank_timer(self, name: str, now_ns: int) -> None:
        _, rank_text, incarnation_text, what, *more = name.split()
        key = RankKey(JOB, int(rank_text), int(incarnation_text))
        rank = self.ranks.get(key)
        if rank is None:
            return  # it has ended meanwhile
        match what:
            case "forked":
                rank.tick_ns = rank.ran_since_ns = now_ns
                if not rank.mute:
                    self._later(key, "joined", JOIN_NS, now_ns)
                self._later(key, "tick", (TICK_NS, TICK_NS), now_ns)
                if self.world.rng.random() < 0.2:
                    self._later(key, "dies", (0, SECOND_NS), now_ns)
                if self.world.rng.random() < LATE_REPORT_SHARE:
                    self._later(key, "known", LATE_REPORT_NS, now_ns)
                else:
                    self._report_fork(rank, now_ns)
            case "known":
                self._report_fork(rank, now_ns)
            case "joined":
                self._local(e.Joined(key=key, address=f"{key}"), now_ns)
            case "linked":
                self.world.linked[int(more[0])].add(key.rank)
                self._local(e.Linked(key=key, epoch=int(more[0])), now_ns)
            case "tick":
                self._tick(rank, now_ns)
            case "dies" if now_ns >= self.world.calm_ns:
                pass
            case "dies" | "killed" | "ended":
                self._ends(rank, what, now_ns)
            case _:
                raise AssertionError(name)

    def _report_fork(self, rank: SimRank, now_ns: int) -> None:
        if not rank.known:
            rank.known = True
            self._local(e.Forked(key=rank.key), now_ns)

    def _ends(self, rank: SimRank, how: str, now_ns: int) -> None:
        del self.ranks[rank.key]
        if how == "dies" and self.world.rng.random() < 0.5:
            self._local(e.LossProven(key=rank.key), now_ns)
        self._report_fork(rank, now_ns)
        code = {"dies": -11, "killed": -9, "ended": 0}[how]
        self._local(e.Exited(key=rank.key, code=code, reason=how), now_ns)

    def _tick(self, rank: SimRank, now_ns: int) -> None:
        if now_ns - rank.tick_ns > PAUSED_NS_MIN:
            rank.ran_since_ns = now_ns
        rank.tick_ns = now_ns
        self._part(rank, now_ns)
        for when_ns, most_ns in (
            (self.world.removed_ns.get(rank.node), OUTLIVES_NS),
            (self.world.ended_ns.get(rank.node), TICK_NS),
        ):
            if when_ns is not None:
                outlived_ns = now_ns - max(when_ns, rank.ran_since_ns)
                assert outlived_ns <= most_ns, f"{rank.key} outlives {rank.node} by {outlived_ns / 1e6} ms"
        self._later(rank.key, "tick", (TICK_NS, TICK_NS), now_ns)

    def _part(self, rank: SimRank, now_ns: int) -> None:
        """Now and then a link breaks; each of the two notices it at a tick of its own."""
        world, epoch = self.world, rank.entered
        if epoch == 0:
            return
        if now_ns < world.calm_ns and world.rng.random() < PARTED_SHARE:
            others = [
                other.key
                for node in world.cluster.nodes.values()
                if isinstance(node, JobsNode) and node is not self
                for other in node.ranks.values()
                if other.entered == epoch
            ]
            if others:
                world.parted[epoch] |= {rank.key, world.rng.choice(others)}
        if rank.key in world.parted[epoch] and rank.parted < epoch:
            rank.parted = epoch
            self._local(e.LinkLost(key=rank.key, epoch=epoch), now_ns)


def spec_of(rng: random.Random, size: int) -> JobSpec:
    """A job that all nodes of the cluster, and no fewer than a minority, can run."""
    nodes_max = max(rng.randint(1, min(size, NODES_MAX)) for _ in range(3))
    return JobSpec(
        job=JOB,
        target="job.py",
        ranks_per_node=rng.randint(1, min(RANKS_PER_NODE_MAX, RANKS_MAX // nodes_max)),
        nodes_min=min(rng.randint(1, nodes_max) for _ in range(3)),
        nodes_max=nodes_max,
        max_restarts=RESTARTS_MAX,
        recovery_budget_ns=rng.choice((RECOVERY_BUDGET_NS_MIN, RECOVERY_BUDGET_NS_DEFAULT)),
        start_timeout_ns=START_TIMEOUT_NS,
    )


def build_jobs(
    seed: int | str, size: int, calm_ns: int, node: type[JobsNode] = JobsNode
) -> tuple[sim.Simulation[Packet], JobWorld]:
    """A cluster and its job at their start. calm_ns: from then on no rank dies of itself; node: its class."""
    simulation = sim.Simulation[Packet](seed)
    if simulation.rng("weather").random() < 0.5:
        simulation.conditions = SLOW
    cluster = Cluster(size=size, protected=protected_of(simulation.rng("protected"), size))
    world = JobWorld(
        cluster=cluster,
        spec=spec_of(simulation.rng("job"), size),
        rng=simulation.rng("ranks"),
        calm_ns=calm_ns,
    )
    populate(simulation, size, partial(node, world))
    return simulation, world


def all_up(world: JobWorld) -> bool:
    """Whether all ranks of the job act in its one view."""
    view = next((n.acts_on for n in world.cluster.nodes.values() if n.acts_on is not None), None)
    job = None if view is None else view.jobs.job(JOB)
    job_view = None if job is None else job.view()
    if job_view is None or world.parted.get(job_view.epoch):
        return False
    if job_view.ranks != tuple(range(world.spec.world_size)):
        return False
    ranks = [r for n in world.cluster.nodes.values() if isinstance(n, JobsNode) for r in n.ranks.values()]
    entered = {(r.key.rank, r.key.incarnation) for r in ranks if r.entered == job_view.epoch}
    return entered == {(member.rank, member.incarnation) for member in job_view.members}


@dataclass(frozen=True)
class JobsScenario(MembershipScenario):
    """Jobs on a cluster. `length` counts seconds under faults."""

    name: str = "jobs"
    description: str = "a job over nodes that join, die and are cut off: each rank in one place, and up again"

    def build(self, seed: int | str, options: sim.Options) -> sim.ScenarioStage:
        """See `zbmd.transport.sim.Scenario`."""
        span_ns = options.length * SECOND_NS
        simulation, world = build_jobs(seed, options.ranks, sim.SIM_START_NS + span_ns)
        names = tuple(name_of(node_id) for node_id in range(options.ranks))
        everybody = frozenset(names)
        return sim.ScenarioStage(
            world=simulation,
            victims=names,
            converged=lambda core: in_one_view(world.cluster, everybody) and all_up(world),
            span_ns=span_ns,
            liveness_ns=JOBS_LIVENESS_NS,
        )
