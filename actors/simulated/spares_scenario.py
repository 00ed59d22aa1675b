"""A simulated cluster that runs a job with spare ranks: `jobs_scenario`, with their machine on each node.

Spares are killed at any moment: as they start, as they wait, and between the rank that they are sent and
their answer. Some never answer. Beside what `jobs_scenario` checks:

- no incarnation of a rank has two processes, whether it was forked or was a spare;
- a spare becomes a rank only while it lives.

Once the faults have ended, each node that runs ranks of the job holds all of its spares, or has given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from zbmd.actors.cluster.jobs import node_events as e
from zbmd.actors.cluster.jobs import spare_machine as m
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.cluster.state.job_table import JobPhase
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.simulated.jobs_scenario import (
    END_NS,
    FORK_NS,
    JOB,
    JOBS_LIVENESS_NS,
    JOIN_NS,
    TICK_NS,
    JobsNode,
    JobsScenario,
    JobWorld,
    SimRank,
    all_up,
    build_jobs,
)
from zbmd.actors.simulated.membership_scenario import SECOND_NS, Packet, in_one_view, name_of
from zbmd.transport import sim
from zbmd.transport.machine import SetTimer, TimerFired

SPARES_MAX = 2
ANSWER_NS = (50_000, 20_000_000)
ANSWER_NS_MAX = SECOND_NS
SETTLE_NS = SECOND_NS // 20
LOST_SHARE = 0.04
"""Of the ticks of ranks: the rank dies."""
SPARE_DIES_SHARE = 0.4
DIES_ASSIGNED_SHARE = 0.3
STUCK_SHARE = 0.1


class SparesNode(JobsNode):
    """A node with spares. Decides nothing."""

    def __init__(self, world: JobWorld, node_id: int, incarnation: int, *, founds: bool) -> None:
        self.pool: m.SparePool | None = None
        self._closing: list[m.SparePool] = []
        self._alive: set[int] = set()
        self._made: set[RankKey] = set()
        self._opened = 0
        super().__init__(world, node_id, incarnation, founds=founds)

    def check_invariants(self) -> None:
        """The machines' own."""
        super().check_invariants()
        for pool in [*self._closing, *([] if self.pool is None else [self.pool])]:
            pool.check_invariants()

    def deliver(self, stimulus: sim.Stimulus[Packet], *, now_ns: int) -> Sequence[sim.Effect[Packet]]:
        """As a node with jobs, and for the timers of spares."""
        match stimulus:
            case sim.TimerFired(name="spares"):
                self._effects = []
                if self.pool is not None:
                    self._put(self.pool, TimerFired(), now_ns)
            case sim.TimerFired(name=name) if name.startswith("spare "):
                self._effects = []
                self._spare_timer(name, now_ns)
            case _:
                super().deliver(stimulus, now_ns=now_ns)
        self._look(now_ns)
        return self._effects

    def _look(self, now_ns: int) -> None:
        """Have spares end with their job, as the driver has it after each view."""
        view: ClusterView | None = self.acts_on
        job = None if view is None else view.jobs.job(JOB)
        runs = job is not None and job.phase not in (JobPhase.STOPPING, JobPhase.ENDED)
        if self.pool is not None and not (runs and job is not None and self.me.key in job.nodes()):
            self._put(self.pool, m.EndAsked(), now_ns)

    def _act(self, action: e.Action, now_ns: int) -> None:
        match action:
            case e.Open(spec=spec):
                wanted = self.world.rng.randint(1, SPARES_MAX)
                self._opened += 1
                self.pool = m.SparePool(
                    wanted,
                    first=1 + self._opened * 10_000,
                    restarts_max=spec.max_restarts,
                    window_ns=spec.restart_window_ns,
                    answer_ns=ANSWER_NS_MAX,
                    settle_ns=SETTLE_NS,
                    start_ns=spec.start_timeout_ns,
                    grace_ns=SECOND_NS,
                )
            case e.Close() if self.pool is not None:
                closing, self.pool = self.pool, None
                self._closing.append(closing)
                self._put(closing, m.EndAsked(), now_ns)
            case e.Fork(key=key) if self.pool is not None:
                self._put(self.pool, m.RankWanted(key=key), now_ns)
            case e.EnterView() if self.pool is not None:
                super()._act(action, now_ns)
                self._put(self.pool, m.ViewEntered(), now_ns)
            case _:
                super()._act(action, now_ns)

    def _tick(self, rank: SimRank, now_ns: int) -> None:
        super()._tick(rank, now_ns)
        if now_ns < self.world.calm_ns and self.world.rng.random() < LOST_SHARE:
            self._ends(rank, "dies", now_ns)

    # -- the machine of its spares -----------------------------------------------------------------------

    def _put(self, pool: m.SparePool, event: m.Event, now_ns: int) -> None:
        for action in pool.handle(event, now_ns=now_ns):
            self._do(pool, action, now_ns)

    def _do(self, pool: m.SparePool, action: m.Action, now_ns: int) -> None:
        rng = self.world.rng
        match action:
            case m.ForkSpare(number=number):
                self._alive.add(number)
                self._soon(number, "forked", FORK_NS, now_ns)
            case m.AssignRank(number=number):
                assert number in self._alive, f"spare {number} is gone, and was sent a rank"
                if rng.random() < DIES_ASSIGNED_SHARE and now_ns < self.world.calm_ns:
                    self._soon(number, "dies", ANSWER_NS, now_ns)
                if rng.random() >= STUCK_SHARE or now_ns >= self.world.calm_ns:
                    self._soon(number, "accepts", ANSWER_NS, now_ns)
            case m.Proceed(number=number, key=key):
                assert number in self._alive, f"spare {number} is gone, and is to be {key}"
                self._alive.remove(number)
                self._make(key)
                self.ranks[key] = SimRank(key, self.me.key, tick_ns=now_ns, ran_since_ns=now_ns)
                self._later(key, "joined", JOIN_NS, now_ns)
                self._later(key, "tick", (TICK_NS, TICK_NS), now_ns)
                self._report_fork(self.ranks[key], now_ns)
            case m.ForkRank(key=key):
                self._make(key)
                super()._act(e.Fork(key=key, reason="no spare waits"), now_ns)
            case m.EndSpare(number=number):
                self._soon(number, "ends", END_NS, now_ns)
            case SetTimer(at_ns=at_ns):
                if pool is self.pool:
                    self._effects.append(sim.SetTimer(name="spares", at_ns=at_ns))
            case m.NotifyLost():
                pass
            case _:
                assert_never(action)

    def _make(self, key: RankKey) -> None:
        assert key not in self._made, f"{key} has two processes"
        self._made.add(key)

    def _soon(self, number: int, what: str, delay_ns: tuple[int, int], now_ns: int) -> None:
        at_ns = now_ns + self.world.rng.randint(*delay_ns)
        self._effects.append(sim.SetTimer(name=f"spare {number} {what}", at_ns=at_ns))

    def _spare_timer(self, name: str, now_ns: int) -> None:
        _, text, what = name.split()
        number, rng = int(text), self.world.rng
        every = [*self._closing, *([] if self.pool is None else [self.pool])]
        pool = next((one for one in every if number in one.spares), None)
        if number not in self._alive or pool is None:
            return  # it has ended meanwhile, or is a rank
        match what:
            case "forked":
                self._soon(number, "waits", JOIN_NS, now_ns)
                if rng.random() < SPARE_DIES_SHARE and now_ns < self.world.calm_ns:
                    self._soon(number, "dies", (0, SECOND_NS), now_ns)
                self._put(pool, m.SpareForked(number=number), now_ns)
            case "waits":
                self._put(pool, m.SpareWaits(number=number), now_ns)
            case "accepts":
                self._put(pool, m.RankAccepted(number=number), now_ns)
            case _:
                self._alive.remove(number)
                self._put(pool, m.SpareEnded(number=number, reason=what), now_ns)


def all_spares_wait(world: JobWorld) -> bool:
    """Whether each node that runs ranks holds its spares, or has given up."""
    for node in world.cluster.nodes.values():
        if isinstance(node, SparesNode) and node.ranks and node.pool is not None:
            pool = node.pool
            states = [spare.state for spare in pool.spares.values()]
            if not pool.given_up and states.count(m.SpareState.WAITING) < pool.wanted:
                return False
    return True


@dataclass(frozen=True)
class SparesScenario(JobsScenario):
    """Spare ranks on a cluster. `length` counts seconds under faults."""

    name: str = "spares"
    description: str = "spare ranks that are killed at any moment: each rank has one process, and is up again"

    def build(self, seed: int | str, options: sim.Options) -> sim.ScenarioStage:
        """See `zbmd.transport.sim.Scenario`."""
        span_ns = options.length * SECOND_NS
        calm_ns = sim.SIM_START_NS + span_ns
        simulation, world = build_jobs(seed, options.ranks, calm_ns, SparesNode)
        names = tuple(name_of(node_id) for node_id in range(options.ranks))
        everybody = frozenset(names)
        return sim.ScenarioStage(
            world=simulation,
            victims=names,
            converged=lambda core: (
                in_one_view(world.cluster, everybody) and all_up(world) and all_spares_wait(world)
            ),
            span_ns=span_ns,
            liveness_ns=JOBS_LIVENESS_NS,
        )
