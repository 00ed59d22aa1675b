"""A job on one node, its table and its machine: views under joins, deaths in any order, and the run's end."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.cluster.jobs import node_events as v
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.cluster.state.job_table import (
    STOP_GRACE_NS_DEFAULT,
    Job,
    JobPhase,
    JobSpec,
    SlotState,
    Stop,
)
from zbmd.actors.simulated.one_node import OneNode
from zbmd.actors.view import Member, OnLoss, Outcome, View
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

MS = 1_000_000
JOB = 5


def key(rank: int, incarnation: int = 1) -> RankKey:
    return RankKey(JOB, rank, incarnation)


@dataclass
class Host:
    """Performs the machine's actions on imaginary processes; each process' events keep their order."""

    node: OneNode
    rng: random.Random
    now_ns: int = 0
    queues: dict[RankKey, deque[v.Event]] = field(default_factory=dict)
    alive: set[RankKey] = field(default_factory=set)
    views: list[View] = field(default_factory=list)
    seen: dict[RankKey, list[int]] = field(default_factory=dict)
    downs: list[v.AnnounceDown] = field(default_factory=list)
    timer_ns: int | None = None
    entered: list[int] = field(default_factory=list[int])
    lazy: bool = False  # members do not ask to enter
    closed: bool = False

    @property
    def ended(self) -> Job | None:
        """The job, once it is over."""
        return self.node.job if self.node.job.phase is JobPhase.ENDED else None

    def end(self) -> tuple[Outcome | None, str]:
        assert self.ended is not None
        return self.ended.outcome, self.ended.reason

    def put(self, event: v.Event) -> None:
        self.perform(self.node.handle(event, now_ns=self.now_ns))

    def stop(self, reason: str, *, kill: bool = False) -> None:
        self.perform(self.node.order(Stop(job=JOB, reason=reason, kill=kill), now_ns=self.now_ns))

    def perform(self, actions: list[v.Action]) -> None:
        self.node.check_invariants()
        for action in actions:
            assert not self.closed, "an action after the last"
            self.perform_one(action)

    def perform_one(self, action: v.Action) -> None:
        match action:
            case v.Fork(key=k):
                assert k not in self.queues, "an incarnation is used once"
                assert k.incarnation == 1 or key(k.rank, k.incarnation - 1) in self.queues
                self.alive.add(k)
                joined = v.Joined(key=k, address=f"a{k.rank}.{k.incarnation}")
                self.queues[k] = deque([v.Forked(key=k), joined])
            case v.InstallView(view=view, to=to):
                assert to == view.ranks
                self.views.append(view)
                for m in view.members:
                    k = key(m.rank, m.incarnation)
                    self.seen.setdefault(k, []).append(view.epoch)
                    if not self.lazy:
                        self.queues[k].append(v.Linked(key=k, epoch=view.epoch))
            case v.EnterView(epoch=epoch, to=to):
                assert epoch == self.views[-1].epoch and to == self.views[-1].ranks
                self.entered.append(epoch)
            case v.AnnounceDown():
                self.downs.append(action)
            case v.Terminate(key=k):
                if self.rng.random() < 0.7:  # the others ignore it
                    self.die(k.rank, k.incarnation)
            case v.Kill(key=k):
                self.die(k.rank, k.incarnation)
            case SetTimer(at_ns=at_ns):
                self.timer_ns = at_ns
            case v.Open():
                assert not self.queues, "before its first process"
            case v.Close():
                assert self.ended is not None
                self.closed = True
            case v.ProposeOrder() | v.SendToHost() | v.LeaveCluster():
                pytest.fail(f"{action} is for no driver of a host alone")

    def die(self, rank: int, incarnation: int, *, normal: bool = False, early_notice: bool = False) -> None:
        k = key(rank, incarnation)
        if k not in self.alive:
            return
        self.alive.discard(k)
        queue = self.queues[k]
        while len(queue) > 1 and self.rng.random() < 0.5:
            queue.pop()  # died before it could join
        if early_notice:
            queue.append(v.LossProven(key=k))
        reason = "exit code 0" if normal else "SIGKILL"
        queue.append(v.Exited(key=k, code=0 if normal else -9, reason=reason))

    def step(self) -> bool:
        """Deliver one event of one process; False if there is none."""
        ready = sorted(k for k, q in self.queues.items() if q)
        if not ready:
            return False
        self.now_ns += self.rng.randrange(1, 50 * MS)
        self.put(self.queues[self.rng.choice(ready)].popleft())
        return True

    def drain(self) -> None:
        while self.step():
            pass

    def wait(self) -> None:
        """Let the time pass until the machine's timer, and deliver what follows."""
        assert self.timer_ns is not None
        self.now_ns = max(self.now_ns, self.timer_ns)
        self.put(TimerFired())
        self.drain()

    def entry(self, rank: int) -> tuple[SlotState, int]:
        found = self.node.job.ranks[rank]
        return found.state, found.incarnation


def make(n: int, seed: int = 0, **options: object) -> Host:
    spec = JobSpec(**({"job": JOB, "target": "job.py", "ranks_per_node": n} | options))  # type: ignore[arg-type]
    host = Host(OneNode(spec), random.Random(seed))
    host.perform(host.node.begin(now_ns=0))
    return host


def test_the_first_view_waits_for_every_rank() -> None:
    host = make(3)
    host.drain()
    (view,) = host.views
    assert view.epoch == 1
    assert view.ranks == (0, 1, 2)
    assert [m.incarnation for m in view.members] == [1, 1, 1]
    assert view.member(2) == Member(rank=2, incarnation=1, address="a2.1")


def test_two_deaths_together_cost_one_view() -> None:
    host = make(4)
    host.drain()
    host.die(1, 1)
    host.die(3, 1, early_notice=True)
    host.drain()
    assert [x.epoch for x in host.views] == [1, 2]
    assert [(m.rank, m.incarnation) for m in host.views[1].members] == [(0, 1), (1, 2), (2, 1), (3, 2)]
    assert {d.key for d in host.downs} == {key(1), key(3)}
    assert host.downs[-1].to == (0, 2)
    assert host.node.job.restarts_total == 2


def test_a_replacement_that_dies_before_joining_is_replaced_again() -> None:
    host = make(2)
    host.drain()
    host.put(v.LossProven(key=key(0)))
    host.queues[key(0, 2)].pop()
    host.queues[key(0, 2)].append(v.Exited(key=key(0, 2), code=-9, reason="SIGKILL"))
    host.queues[key(0)].append(v.Exited(key=key(0), code=-9, reason="SIGKILL"))
    host.drain()
    assert [m.incarnation for m in host.views[-1].members] == [3, 1]
    assert host.views[-1].epoch == 2


def test_shrink_goes_on_without_the_lost_rank_and_succeeds() -> None:
    host = make(3, on_loss=OnLoss.SHRINK)
    host.drain()
    host.die(1, 1)
    host.drain()
    assert host.views[-1].ranks == (0, 2)
    assert host.views[-1].lost == (1,)
    for rank in (0, 2):
        host.die(rank, 1, normal=True)
    host.drain()
    assert host.end() == (Outcome.SUCCEEDED, "finished without rank1")


def test_shrink_to_nobody_fails() -> None:
    host = make(2, on_loss=OnLoss.SHRINK)
    host.drain()
    for rank in (0, 1):
        host.die(rank, 1)
    host.drain()
    outcome, reason = host.end()
    assert outcome is Outcome.FAILED
    assert "every rank was lost" in reason


def test_stop_policy_ends_the_run_at_the_first_loss() -> None:
    host = make(3, on_loss=OnLoss.STOP)
    host.drain()
    host.die(2, 1)
    host.drain()
    host.wait()
    assert host.end() == (Outcome.FAILED, "rank2 failed: SIGKILL; on-loss is stop")
    assert not host.alive


def test_what_cannot_succeed_is_not_started_again() -> None:
    host = make(2)
    host.drain()
    host.put(v.Exited(key=key(1), code=2, reason="exit code 2"))
    host.wait()
    assert host.end() == (Outcome.FAILED, "rank1 failed with a usage error: exit code 2")
    assert host.node.job.restarts_total == 0


def test_what_fails_before_its_first_join_is_not_started_again() -> None:
    host = make(2)
    host.put(v.Forked(key=key(0)))
    host.put(v.Exited(key=key(0), code=1, reason="exit code 1"))
    assert host.node.job.phase is JobPhase.STOPPING
    assert host.node.job.restarts_total == 0


def test_what_is_killed_before_its_first_join_is_started_again() -> None:
    host = make(2)
    host.put(v.Forked(key=key(0)))
    host.put(v.Exited(key=key(0), code=-9, reason="killed (SIGKILL)"))
    assert host.entry(0) == (SlotState.STARTING, 2)


def test_more_restarts_than_allowed_end_the_run_with_the_last_cause() -> None:
    host = make(2, max_restarts=2)
    host.drain()
    for incarnation in (1, 2, 3):
        host.die(1, incarnation)
        host.drain()
    host.wait()
    outcome, reason = host.end()
    assert outcome is Outcome.FAILED
    assert reason.startswith("more than 2 restarts within 60 s; the last: rank1 failed: SIGKILL")


def test_restarts_far_apart_are_not_counted_together() -> None:
    host = make(2, max_restarts=1, restart_window_ns=1_000 * MS)
    for incarnation in (1, 2, 3, 4):
        host.drain()
        host.now_ns += 2_000 * MS
        host.die(1, incarnation)
    host.drain()
    assert host.ended is None
    assert host.views[-1].epoch == 5


def test_a_rank_that_finished_is_named_to_a_later_replacement() -> None:
    host = make(3)
    host.drain()
    host.die(0, 1, normal=True)
    host.drain()
    assert host.views[-1].ranks == (1, 2), "others may wait for it in the view that it left"
    host.die(1, 1)
    host.drain()
    assert host.views[-1].ranks == (1, 2)
    assert host.views[-1].finished == (0,)


def test_a_view_is_entered_once_every_member_is_linked() -> None:
    host = make(2)
    host.lazy = True
    host.drain()
    host.put(v.Linked(key=key(0), epoch=1))
    host.put(v.Linked(key=key(0), epoch=1))
    assert host.entered == []
    host.put(v.Linked(key=key(1), epoch=1))
    assert host.entered == [1]


def test_a_rank_that_leaves_before_the_view_is_entered_costs_another_view() -> None:
    host = make(3)
    host.lazy = True
    host.drain()
    host.put(v.Linked(key=key(1), epoch=1))
    host.die(0, 1, normal=True)
    host.lazy = False
    host.drain()
    assert [view.ranks for view in host.views] == [(0, 1, 2), (1, 2)]
    assert host.entered == [2]


def test_a_process_that_outlives_sigkill_is_named_and_not_waited_for() -> None:
    host = make(1)
    host.drain()
    host.alive.clear()  # nothing we do ends it
    host.stop("asked", kill=True)
    host.wait()
    assert host.end() == (Outcome.STOPPED, "asked; still running after SIGKILL: rank0")


def test_a_fork_that_crosses_the_stop_is_ended_too() -> None:
    host = make(1)
    host.stop("asked")
    actions = host.node.handle(v.Forked(key=key(0)), now_ns=1)
    assert actions == [v.Terminate(key=key(0)), SetTimer(at_ns=1 + STOP_GRACE_NS_DEFAULT)]


def test_an_exit_of_nobody_is_our_own_bug() -> None:
    host = make(1)
    with pytest.raises(LocalProtocolError, match="does not run"):
        host.put(v.Exited(key=key(0, 9), code=0, reason="?"))


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 6),
    on_loss=st.sampled_from(OnLoss),
    deaths=st.integers(0, 12),
)
def test_any_history(seed: int, n: int, on_loss: OnLoss, deaths: int) -> None:
    """Safety while processes die at random moments, then an end once they stop dying."""
    host = make(n, seed, on_loss=on_loss, max_restarts=4)
    rng = host.rng
    for _ in range(deaths):
        for _ in range(rng.randrange(8)):
            host.step()
        if host.alive and host.ended is None:
            k = rng.choice(sorted(host.alive))
            host.die(k.rank, k.incarnation, normal=rng.random() < 0.2, early_notice=rng.random() < 0.5)
    host.drain()
    # Healed: whoever lives is in the last view, unless the run is over.
    if host.node.job.phase is JobPhase.RUNNING:
        assert {key(m.rank, m.incarnation) for m in host.node.view.members} >= host.alive
        if host.views:
            assert host.entered[-1:] == [host.views[-1].epoch] or not host.alive
        host.stop("end of test")
        host.drain()
    for _ in range(2):
        if host.ended is None:
            host.wait()
    assert host.ended is not None
    assert not host.alive
    assert not any(host.queues.values())
    assert host.entered == sorted(set(host.entered)), "a view is entered once, in order"
    epochs = [x.epoch for x in host.views]
    assert epochs == list(range(1, len(epochs) + 1))
    for seen in host.seen.values():
        assert seen == sorted(set(seen)), "each member gets the views in order"
    dead_before: set[RankKey] = set()
    for view in host.views:
        members = {key(m.rank, m.incarnation) for m in view.members}
        assert not members & dead_before, "no incarnation comes back"
        for m in view.members:
            dead_before |= {key(m.rank, i) for i in range(1, m.incarnation)}


def lose_link(host: Host, rank: int, epoch: int) -> list[v.Action]:
    lost = v.LinkLost(key=key(rank, host.entry(rank)[1]), epoch=epoch)
    return host.node.handle(lost, now_ns=host.now_ns)


def test_live_ranks_that_lost_a_link_get_another_view_of_the_same_members() -> None:
    host = make(2)
    host.drain()
    (timer,) = lose_link(host, 0, 1)
    assert isinstance(timer, SetTimer) and timer.at_ns == host.now_ns + derive().agreement_ns
    assert not lose_link(host, 1, 1), "one view mends all links"
    (early,) = host.node.handle(TimerFired(), now_ns=timer.at_ns - 1)
    assert early == timer
    (install,) = host.node.handle(TimerFired(), now_ns=timer.at_ns)
    assert isinstance(install, v.InstallView)
    assert install.view.epoch == 2 and install.view.members == host.views[0].members
    assert not lose_link(host, 0, 1), "that view is over"
    assert not lose_link(host, 0, 2), "this one is not entered yet, and links are still being made"


def test_a_link_that_a_death_took_asks_for_no_view_of_its_own() -> None:
    host = make(2)
    host.drain()
    (timer,) = lose_link(host, 0, 1)
    assert isinstance(timer, SetTimer)
    host.die(1, 1)
    host.drain()
    assert [x.epoch for x in host.views] == [1, 2]
    assert not host.node.handle(TimerFired(), now_ns=timer.at_ns)


def test_a_lost_link_does_not_hasten_the_end_of_a_stop() -> None:
    host = make(2)
    host.drain()
    (timer,) = lose_link(host, 0, 1)
    assert isinstance(timer, SetTimer)
    asked = Stop(job=JOB, reason="enough")
    stopping = host.node.order(asked, now_ns=host.now_ns)
    assert stopping == [v.Terminate(key=key(0)), v.Terminate(key=key(1))]
    (later,) = host.node.handle(TimerFired(), now_ns=timer.at_ns)
    assert later == SetTimer(at_ns=host.now_ns + STOP_GRACE_NS_DEFAULT)
