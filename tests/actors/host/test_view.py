"""The membership machine: views under joins, deaths in any order, policies and the end of a run."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.host import membership_events as v
from zbmd.actors.host.membership import MembershipMachine
from zbmd.actors.view import Member, OnLoss, Outcome, RankState, View
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

MS = 1_000_000


@dataclass
class Host:
    """Performs the machine's actions on imaginary processes; each process' events keep their order."""

    machine: MembershipMachine
    rng: random.Random
    now_ns: int = 0
    queues: dict[tuple[int, int], deque[v.Event]] = field(default_factory=dict)
    alive: set[tuple[int, int]] = field(default_factory=set)
    views: list[View] = field(default_factory=list)
    seen: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    downs: list[v.AnnounceDown] = field(default_factory=list)
    timer_ns: int | None = None
    ended: v.RunEnded | None = None
    entered: list[int] = field(default_factory=list[int])
    lazy: bool = False  # members do not ask to enter

    def put(self, event: v.Event) -> None:
        actions = self.machine.handle(event, now_ns=self.now_ns)
        self.machine.check_invariants()
        for action in actions:
            assert self.ended is None, "an action after the last"
            self.perform(action)

    def perform(self, action: v.Action) -> None:
        match action:
            case v.Fork(rank=r, incarnation=i):
                assert (r, i) not in self.queues, "an incarnation is used once"
                assert i == 1 or (r, i - 1) in self.queues
                self.alive.add((r, i))
                joined = v.Joined(rank=r, incarnation=i, address=f"a{r}.{i}")
                self.queues[r, i] = deque([v.Forked(rank=r, incarnation=i), joined])
            case v.InstallView(view=view):
                self.views.append(view)
                for m in view.members:
                    self.seen.setdefault((m.rank, m.incarnation), []).append(view.epoch)
                    if not self.lazy:
                        linked = v.Linked(rank=m.rank, incarnation=m.incarnation, epoch=view.epoch)
                        self.queues[m.rank, m.incarnation].append(linked)
            case v.EnterView(epoch=epoch, to=to):
                assert epoch == self.views[-1].epoch and to == self.views[-1].ranks
                self.entered.append(epoch)
            case v.AnnounceDown():
                self.downs.append(action)
            case v.Terminate(rank=r, incarnation=i):
                if self.rng.random() < 0.7:  # the others ignore it
                    self.die(r, i)
            case v.Kill(rank=r, incarnation=i):
                self.die(r, i)
            case SetTimer(at_ns=at_ns):
                self.timer_ns = at_ns
            case v.RunEnded():
                self.ended = action

    def die(self, rank: int, incarnation: int, *, normal: bool = False, early_notice: bool = False) -> None:
        if (rank, incarnation) not in self.alive:
            return
        self.alive.discard((rank, incarnation))
        queue = self.queues[rank, incarnation]
        while len(queue) > 1 and self.rng.random() < 0.5:
            queue.pop()  # died before it could join
        if early_notice:
            queue.append(v.LossProven(rank=rank, incarnation=incarnation))
        reason = "exit code 0" if normal else "SIGKILL"
        queue.append(v.Exited(rank=rank, incarnation=incarnation, code=0 if normal else -9, reason=reason))

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


def make(n: int, seed: int = 0, **options: object) -> Host:
    host = Host(MembershipMachine(n, **options), random.Random(seed))  # type: ignore[arg-type]
    host.put(v.StartRequested())
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
    assert {(d.rank, d.incarnation) for d in host.downs} == {(1, 1), (3, 1)}
    assert host.downs[-1].to == (0, 2)
    assert host.machine.restarts_total == 2


def test_a_replacement_that_dies_before_joining_is_replaced_again() -> None:
    host = make(2)
    host.drain()
    host.put(v.LossProven(rank=0, incarnation=1))
    host.queues[0, 2].pop()
    host.queues[0, 2].append(v.Exited(rank=0, incarnation=2, code=-9, reason="SIGKILL"))
    host.queues[0, 1].append(v.Exited(rank=0, incarnation=1, code=-9, reason="SIGKILL"))
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
    assert host.ended == v.RunEnded(outcome=Outcome.SUCCEEDED, reason="finished without rank1")


def test_shrink_to_nobody_fails() -> None:
    host = make(2, on_loss=OnLoss.SHRINK)
    host.drain()
    for rank in (0, 1):
        host.die(rank, 1)
    host.drain()
    assert host.ended is not None
    assert host.ended.outcome is Outcome.FAILED
    assert "every rank was lost" in host.ended.reason


def test_stop_policy_ends_the_run_at_the_first_loss() -> None:
    host = make(3, on_loss=OnLoss.STOP)
    host.drain()
    host.die(2, 1)
    host.drain()
    assert host.timer_ns is not None
    host.now_ns = host.timer_ns
    host.put(TimerFired())
    host.drain()
    assert host.ended is not None
    assert host.ended.outcome is Outcome.FAILED
    assert host.ended.reason == "rank2 failed: SIGKILL; on-loss is stop"
    assert not host.alive


def test_what_cannot_succeed_is_not_started_again() -> None:
    host = make(2)
    host.drain()
    host.put(v.Exited(rank=1, incarnation=1, code=2, reason="exit code 2"))
    host.put(TimerFired())
    host.drain()
    assert host.ended == v.RunEnded(
        outcome=Outcome.FAILED, reason="rank1 failed with a usage error: exit code 2"
    )
    assert host.machine.restarts_total == 0


def test_what_fails_before_its_first_join_is_not_started_again() -> None:
    host = make(2)
    host.put(v.Forked(rank=0, incarnation=1))
    host.put(v.Exited(rank=0, incarnation=1, code=1, reason="exit code 1"))
    assert host.machine.phase is v.RunPhase.STOPPING
    assert host.machine.restarts_total == 0


def test_what_is_killed_before_its_first_join_is_started_again() -> None:
    host = make(2)
    host.put(v.Forked(rank=0, incarnation=1))
    host.put(v.Exited(rank=0, incarnation=1, code=-9, reason="killed (SIGKILL)"))
    assert host.machine.state(0) == (RankState.STARTING, 2)


def test_more_restarts_than_allowed_end_the_run_with_the_last_cause() -> None:
    host = make(2, restarts_max=2)
    host.drain()
    for incarnation in (1, 2, 3):
        host.die(1, incarnation)
        host.drain()
    assert host.timer_ns is not None
    host.put(TimerFired())
    host.drain()
    assert host.ended is not None
    assert host.ended.outcome is Outcome.FAILED
    assert host.ended.reason.startswith("more than 2 restarts within 60 s; the last: rank1 failed: SIGKILL")


def test_restarts_far_apart_are_not_counted_together() -> None:
    host = make(2, restarts_max=1, period_ns=1_000 * MS)
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
    host.put(v.Linked(rank=0, incarnation=1, epoch=1))
    host.put(v.Linked(rank=0, incarnation=1, epoch=1))
    assert host.entered == []
    host.put(v.Linked(rank=1, incarnation=1, epoch=1))
    assert host.entered == [1]


def test_a_rank_that_leaves_before_the_view_is_entered_costs_another_view() -> None:
    host = make(3)
    host.lazy = True
    host.drain()
    host.put(v.Linked(rank=1, incarnation=1, epoch=1))
    host.die(0, 1, normal=True)
    host.lazy = False
    host.drain()
    assert [view.ranks for view in host.views] == [(0, 1, 2), (1, 2)]
    assert host.entered == [2]


def test_a_process_that_outlives_sigkill_is_named_and_not_waited_for() -> None:
    host = make(1)
    host.drain()
    host.alive.clear()  # nothing we do ends it
    host.put(v.StopRequested(reason="asked", kill=True))
    host.put(TimerFired())
    assert host.ended == v.RunEnded(
        outcome=Outcome.STOPPED, reason="asked; still running after SIGKILL: rank0"
    )


def test_a_fork_that_crosses_the_stop_is_ended_too() -> None:
    host = make(1)
    host.put(v.StopRequested(reason="asked"))
    actions = host.machine.handle(v.Forked(rank=0, incarnation=1), now_ns=1)
    assert actions == [v.Terminate(rank=0, incarnation=1)]


def test_an_exit_of_nobody_is_our_own_bug() -> None:
    host = make(1)
    with pytest.raises(LocalProtocolError, match="is not running"):
        host.put(v.Exited(rank=0, incarnation=9, code=0, reason="?"))


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 6),
    on_loss=st.sampled_from(OnLoss),
    deaths=st.integers(0, 12),
)
def test_any_history(seed: int, n: int, on_loss: OnLoss, deaths: int) -> None:
    """Safety while processes die at random moments, then an end once they stop dying."""
    host = make(n, seed, on_loss=on_loss, restarts_max=4)
    rng = host.rng
    for _ in range(deaths):
        for _ in range(rng.randrange(8)):
            host.step()
        if host.alive and host.ended is None:
            rank, incarnation = rng.choice(sorted(host.alive))
            host.die(rank, incarnation, normal=rng.random() < 0.2, early_notice=rng.random() < 0.5)
    host.drain()
    # Healed: whoever lives is in the last view, unless the run is over.
    if host.machine.phase is v.RunPhase.RUNNING:
        assert {(m.rank, m.incarnation) for m in host.machine.view.members} >= host.alive
        if host.views:
            assert host.entered[-1:] == [host.views[-1].epoch] or not host.alive
        host.put(v.StopRequested(reason="end of test"))
        host.drain()
    for _ in range(2):
        if host.ended is None:
            host.put(TimerFired())
            host.drain()
    assert host.ended is not None
    assert not host.alive
    assert not any(host.queues.values())
    assert host.entered == sorted(set(host.entered)), "a view is entered once, in order"
    epochs = [x.epoch for x in host.views]
    assert epochs == list(range(1, len(epochs) + 1))
    for seen in host.seen.values():
        assert seen == sorted(set(seen)), "each member gets the views in order"
    dead_before: set[tuple[int, int]] = set()
    for view in host.views:
        members = {(m.rank, m.incarnation) for m in view.members}
        assert not members & dead_before, "no incarnation comes back"
        for m in view.members:
            dead_before |= {(m.rank, i) for i in range(1, m.incarnation)}


def lose_link(host: Host, rank: int, epoch: int) -> list[v.Action]:
    lost = v.LinkLost(rank=rank, incarnation=host.machine.state(rank)[1], epoch=epoch)
    return host.machine.handle(lost, now_ns=host.now_ns)


def test_live_ranks_that_lost_a_link_get_another_view_of_the_same_members() -> None:
    host = make(2)
    host.drain()
    (timer,) = lose_link(host, 0, 1)
    assert isinstance(timer, SetTimer) and timer.at_ns == host.now_ns + host.machine.relink_ns
    assert not lose_link(host, 1, 1), "one view mends all links"
    (early,) = host.machine.handle(TimerFired(), now_ns=timer.at_ns - 1)
    assert early == timer
    (install,) = host.machine.handle(TimerFired(), now_ns=timer.at_ns)
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
    assert not host.machine.handle(TimerFired(), now_ns=timer.at_ns)


def test_a_lost_link_does_not_hasten_the_end_of_a_stop() -> None:
    host = make(2)
    host.drain()
    lose_link(host, 0, 1)
    stop = host.machine.handle(v.StopRequested(reason="enough"), now_ns=host.now_ns)
    timers = [action for action in stop if isinstance(action, SetTimer)]
    assert timers == [SetTimer(at_ns=host.now_ns + host.machine.grace_ns)]
