"""The membership machine of one host (sans-I/O): which ranks run, and who is in which view.

The kernel proves every death on one host, so no quorum is needed. Restarts are decisions of the supervision
machine (one_for_one over the ranks); this machine adds epochs: a view is installed only when every rank has
either joined or is gone for good, so that deaths that come together cost one view. Epochs strictly grow.

A TCP link between two live ranks can break. A rank that lost one waits for a view. If no death has
explained the loss in time, another view of the same members is installed, in which they link again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, assert_never

from zbmd.actors.host.membership_events import (
    Action,
    AnnounceDown,
    EnterView,
    Event,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    InstallView,
    Joined,
    Kill,
    Linked,
    LinkLost,
    LossProven,
    RunEnded,
    RunPhase,
    StartRequested,
    StopRequested,
    Terminate,
)
from zbmd.actors.process.exit import USAGE_EXIT_CODE
from zbmd.actors.supervision import events as supervision
from zbmd.actors.supervision.events import ChildPolicy, Restart, Strategy
from zbmd.actors.supervision.machine import SupervisionMachine
from zbmd.actors.view import (
    EPOCH_MAX,
    RANKS_MAX,
    Member,
    OnLoss,
    Outcome,
    RankState,
    View,
    rank_name,
)
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

STORY_EVENTS_MAX: Final = 16
_DEADLINES: Final = derive()


@dataclass(slots=True)
class _Rank:
    rank: int
    state: RankState = RankState.WAITING
    incarnation: int = 0
    forked: bool = False
    member: Member | None = None  # as it has joined
    reason: str = ""
    # Incarnations proven dead whose exit status is still owed; at most `restarts_max` + 1 of them.
    unreaped: set[int] = field(default_factory=set[int])


class MembershipMachine:
    """Decides over `world_size` ranks of one host.

    `restarts_max` restarts are allowed in any window of `period_ns`. A stop asks every process to end,
    kills what is left after `grace_ns`, and reports the end `kill_ns` later even if a process remains.
    relink_ns: from a lost link to another view, if no death explains it.
    """

    def __init__(
        self,
        world_size: int,
        *,
        on_loss: OnLoss = OnLoss.REPLACE,
        restarts_max: int = 3,
        period_ns: int = 60_000_000_000,
        grace_ns: int = _DEADLINES.stop_grace_ns,
        kill_ns: int = _DEADLINES.stop_kill_ns,
        relink_ns: int = _DEADLINES.agreement_ns,
    ) -> None:
        if not 1 <= world_size <= RANKS_MAX:
            raise LocalProtocolError(f"{world_size} ranks: one host takes 1 to {RANKS_MAX}")
        restart = Restart.TEMPORARY if on_loss is OnLoss.SHRINK else Restart.TRANSIENT
        policies = [ChildPolicy(child=rank_name(r), restart=restart) for r in range(world_size)]
        intensity = 0 if on_loss is OnLoss.STOP else restarts_max
        self._supervision = SupervisionMachine(
            policies, strategy=Strategy.ONE_FOR_ONE, intensity=intensity, period_ns=period_ns
        )
        self._ranks = [_Rank(rank=r) for r in range(world_size)]
        self._on_loss = on_loss
        self.grace_ns = grace_ns
        self.kill_ns = kill_ns
        self.relink_ns = relink_ns
        self._relink_at_ns: int | None = None
        """When another view is due, since a member lost a link in the entered one."""
        self._phase = RunPhase.NEW
        self._outcome = Outcome.SUCCEEDED
        self._end_reason = ""
        self._view = View(epoch=0, members=())
        self._view_wanted = False
        self._unlinked: set[int] = set()  # members of the view that have yet to link up
        self._restarts_total = 0
        self._story: deque[str] = deque(maxlen=STORY_EVENTS_MAX)

    @property
    def phase(self) -> RunPhase:
        """The phase of the run."""
        return self._phase

    @property
    def view(self) -> View:
        """The view installed last; epoch 0 and empty before the first."""
        return self._view

    @property
    def ranks(self) -> range:
        """All ranks, in any state."""
        return range(len(self._ranks))

    @property
    def unlinked(self) -> frozenset[int]:
        """The members of the view that are not linked yet."""
        return frozenset(self._unlinked)

    @property
    def restarts_total(self) -> int:
        """The number of replacements started."""
        return self._restarts_total

    def state(self, rank: int) -> tuple[RankState, int]:
        """Return a rank's state and current incarnation."""
        found = self._ranks[rank]
        return found.state, found.incarnation

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take one event, return the actions to perform in order. Raises `LocalProtocolError` on misuse."""
        actions: list[Action] = []
        if self._phase is RunPhase.ENDED:
            return actions
        match event:
            case StartRequested():
                if self._phase is not RunPhase.NEW:
                    raise self._misuse(event, f"the run is {self._phase.value}")
                self._phase = RunPhase.RUNNING
                self._supervise(supervision.StartRequested(), now_ns, actions)
            case Forked():
                self._on_forked(event, now_ns, actions)
            case ForkFailed():
                self._on_end(event, event.reason, now_ns, actions, fork_failed=True)
            case Joined():
                self._on_joined(event, now_ns, actions)
            case Linked():
                self._on_linked(event, actions)
            case LinkLost():
                self._on_link_lost(event, now_ns, actions)
            case LossProven():
                self._on_loss_proven(event, now_ns, actions)
            case Exited():
                self._on_exited(event, now_ns, actions)
            case StopRequested():
                self._on_stop(event, now_ns, actions)
            case TimerFired():
                self._on_timer(now_ns, actions)
            case _:
                assert_never(event)
        self._story.append(repr(event))
        self._settle(actions)
        return actions

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a rule that holds between any two events does not."""
        assert 0 <= self._view.epoch <= EPOCH_MAX
        ranks = self._view.ranks
        assert list(ranks) == sorted(set(ranks)), ranks
        assert self._unlinked <= set(ranks), self._unlinked
        gone = set(self._view.finished) | set(self._view.lost)
        assert not gone & set(ranks), self._view
        for r in self._ranks:
            assert r.incarnation > 0 or r.state is RankState.WAITING, r
            assert r.state is not RankState.JOINED or (r.forked and r.member), r
            assert all(i <= r.incarnation for i in r.unreaped), r
            if self._on_loss is not OnLoss.REPLACE:
                assert r.incarnation <= 1, r
        if self._phase is RunPhase.ENDED:
            assert self._end_reason

    # Events.

    def _on_forked(self, event: Forked, now_ns: int, actions: list[Action]) -> None:
        rank = self._current(event.rank, event.incarnation)
        if rank is None or rank.state is RankState.WAITING:
            raise self._misuse(event, "no such fork is under way")
        if not self._mark_forked(rank, now_ns, actions):
            return
        # The fork crossed the decision to stop: this process has not received it yet.
        if self._phase is RunPhase.STOPPING:
            actions.append(Terminate(rank=rank.rank, incarnation=rank.incarnation))
        elif self._phase is RunPhase.KILLING:
            actions.append(Kill(rank=rank.rank, incarnation=rank.incarnation))

    def _on_joined(self, event: Joined, now_ns: int, actions: list[Action]) -> None:
        rank = self._current(event.rank, event.incarnation)
        # A join may arrive after the death, or twice: it comes from another process.
        if rank is None or rank.state is not RankState.STARTING:
            return
        self._mark_forked(rank, now_ns, actions)
        rank.state = RankState.JOINED
        rank.member = Member(
            rank=event.rank,
            incarnation=event.incarnation,
            address=event.address,
            host=event.host,
            tcp_address=event.tcp_address,
        )
        self._view_wanted = True

    def _on_linked(self, event: Linked, actions: list[Action]) -> None:
        rank = self._current(event.rank, event.incarnation)
        # The message may cross the next view, or the death of its sender.
        if rank is None or rank.state is not RankState.JOINED or event.epoch != self._view.epoch:
            return
        if rank.rank in self._unlinked:
            self._unlinked.discard(rank.rank)
            if not self._unlinked and not self._view_wanted:
                actions.append(EnterView(epoch=self._view.epoch, to=self._view.ranks))

    def _on_link_lost(self, event: LinkLost, now_ns: int, actions: list[Action]) -> None:
        rank = self._current(event.rank, event.incarnation)
        entered = event.epoch == self._view.epoch and not self._unlinked and not self._view_wanted
        if rank is None or rank.state is not RankState.JOINED or not entered:
            return  # it crossed a view, which makes new links, or the death of its sender
        if self._phase is RunPhase.RUNNING and self._relink_at_ns is None:
            self._relink_at_ns = now_ns + self.relink_ns
            actions.append(SetTimer(at_ns=self._relink_at_ns))

    def _on_loss_proven(self, event: LossProven, now_ns: int, actions: list[Action]) -> None:
        rank = self._current(event.rank, event.incarnation)
        if rank is not None and self._alive(rank):
            rank.unreaped.add(event.incarnation)
            self._on_end(event, "killed (its exit status is not known yet)", now_ns, actions)

    def _on_exited(self, event: Exited, now_ns: int, actions: list[Action]) -> None:
        rank = self._ranks[event.rank]
        if event.incarnation in rank.unreaped:
            rank.unreaped.discard(event.incarnation)  # decided when the loss was proven
            return
        hopeless = self._hopeless(rank, event.code)
        self._on_end(event, event.reason, now_ns, actions, normal=event.code == 0, hopeless=hopeless)

    def _hopeless(self, rank: _Rank, code: int) -> str:
        """Return why a restart would fail in the same way; empty if it may succeed."""
        if code == USAGE_EXIT_CODE:
            return "with a usage error"
        if code > 0 and rank.incarnation == 1 and rank.state is RankState.STARTING:
            return "before it joined"  # as in OTP: what cannot start the first time is not retried
        return ""

    def _on_end(
        self,
        event: ForkFailed | LossProven | Exited,
        reason: str,
        now_ns: int,
        actions: list[Action],
        *,
        normal: bool = False,
        hopeless: str = "",
        fork_failed: bool = False,
    ) -> None:
        rank = self._current(event.rank, event.incarnation)
        if rank is None or not self._alive(rank):
            raise self._misuse(event, "that incarnation is not running")
        if not fork_failed:
            self._mark_forked(rank, now_ns, actions)
        rank.state = RankState.FINISHED if normal else RankState.LOST
        rank.reason = reason
        child = rank_name(rank.rank)
        to = tuple(r.rank for r in self._ranks if r.state is RankState.JOINED)
        if not fork_failed:
            actions.append(AnnounceDown(rank=rank.rank, incarnation=rank.incarnation, reason=reason, to=to))
        # Also after an orderly leave: the rank may have been entered into the view that it had asked for,
        # and the others wait for it there.
        self._view_wanted = True
        if hopeless:
            self._end(Outcome.FAILED, f"{child} failed {hopeless}: {reason}", now_ns, actions)
        elif not normal and self._on_loss is OnLoss.STOP:
            self._end(Outcome.FAILED, f"{child} failed: {reason}; on-loss is stop", now_ns, actions)
        if fork_failed:
            self._supervise(supervision.ChildStartFailed(child=child, reason=reason), now_ns, actions)
        else:
            exited = supervision.ChildExited(child=child, normal=normal, reason=reason)
            self._supervise(exited, now_ns, actions)

    def _on_stop(self, event: StopRequested, now_ns: int, actions: list[Action]) -> None:
        self._end(event.outcome, event.reason, now_ns, actions)
        if event.kill:
            self._kill_all(now_ns, actions)
        self._supervise(supervision.StopRequested(reason=event.reason), now_ns, actions)

    def _on_timer(self, now_ns: int, actions: list[Action]) -> None:
        if self._phase is RunPhase.RUNNING:
            due_ns = self._relink_at_ns
            if due_ns is not None and due_ns <= now_ns:
                self._view_wanted = True
            elif due_ns is not None:
                actions.append(SetTimer(at_ns=due_ns))
        elif self._phase is RunPhase.STOPPING:
            self._kill_all(now_ns, actions)
        elif self._phase is RunPhase.KILLING:
            left = [rank_name(r.rank) for r in self._ranks if self._alive(r) or r.unreaped]
            self._end_reason += f"; still running after SIGKILL: {', '.join(left)}"
            self._finish(actions)

    # Decisions.

    def _supervise(self, event: supervision.Event, now_ns: int, actions: list[Action]) -> None:
        """Put the event to the supervision machine and carry out its decisions."""
        for decision in self._supervision.handle(event, now_ns=now_ns):
            match decision:
                case supervision.StartChild(child=child, incarnation=incarnation, reason=reason):
                    self._fork(self._ranks[int(child.removeprefix("rank"))], incarnation, reason, actions)
                case supervision.Escalate(reason=reason):
                    self._end(Outcome.FAILED, reason, now_ns, actions)
                case supervision.StopChild(reason=reason) | supervision.KillChild(reason=reason):
                    # Supervision stops children one by one, but ranks wait for each other: stop all at once.
                    self._end(Outcome.FAILED, reason, now_ns, actions)
                case supervision.LeaveDown() | supervision.Stopped():
                    pass
                case supervision.SetChildTimer() | supervision.CancelChildTimer() | supervision.Refuse():
                    pass  # part of its own stop, or of requests, which are not used here
                case _:
                    assert_never(decision)

    def _fork(self, rank: _Rank, incarnation: int, reason: str, actions: list[Action]) -> None:
        if self._phase is not RunPhase.RUNNING:
            return
        rank.state, rank.incarnation = RankState.STARTING, incarnation
        rank.forked, rank.member = False, None
        self._restarts_total += incarnation > 1
        actions.append(Fork(rank=rank.rank, incarnation=incarnation, reason=reason))

    def _end(self, outcome: Outcome, reason: str, now_ns: int, actions: list[Action]) -> None:
        """Begin to end the run; the first reason is kept."""
        if self._phase not in (RunPhase.NEW, RunPhase.RUNNING):
            return
        self._phase = RunPhase.STOPPING
        self._outcome = outcome
        self._end_reason = reason
        for r in self._ranks:
            if self._alive(r) and r.forked:
                actions.append(Terminate(rank=r.rank, incarnation=r.incarnation))
        actions.append(SetTimer(at_ns=now_ns + self.grace_ns))

    def _kill_all(self, now_ns: int, actions: list[Action]) -> None:
        if self._phase is RunPhase.KILLING:
            return
        self._phase = RunPhase.KILLING
        for r in self._ranks:
            if self._alive(r) and r.forked:
                actions.append(Kill(rank=r.rank, incarnation=r.incarnation))
        actions.append(SetTimer(at_ns=now_ns + self.kill_ns))

    def _settle(self, actions: list[Action]) -> None:
        """Install a view if one is due, or end the run if no rank is left."""
        if self._phase is RunPhase.NEW:
            return
        ended = {RankState.FINISHED, RankState.LOST}
        if self._phase is not RunPhase.RUNNING:
            ended.add(RankState.WAITING)  # will never start
        if all(r.state in ended and not r.unreaped for r in self._ranks):
            if self._phase is RunPhase.RUNNING:
                self._judge()
            self._finish(actions)
        elif self._phase is RunPhase.RUNNING and self._view_wanted:
            self._install(actions)

    def _judge(self) -> None:
        lost = [r for r in self._ranks if r.state is RankState.LOST]
        if len(lost) == len(self._ranks):
            self._outcome = Outcome.FAILED
            last = lost[-1]
            self._end_reason = f"every rank was lost; {rank_name(last.rank)}: {last.reason}"
        elif lost:
            self._end_reason = f"finished without {', '.join(rank_name(r.rank) for r in lost)}"
        else:
            self._end_reason = "every rank finished"

    def _install(self, actions: list[Action]) -> None:
        pending = any(r.state in (RankState.WAITING, RankState.STARTING) for r in self._ranks)
        members = tuple(r.member for r in self._ranks if r.state is RankState.JOINED and r.member)
        if pending or not members:
            return
        if self._view.epoch >= EPOCH_MAX:
            raise LocalProtocolError(f"epoch {EPOCH_MAX} is the last one", story=tuple(self._story))
        self._view = View(
            epoch=self._view.epoch + 1,
            members=members,
            finished=tuple(r.rank for r in self._ranks if r.state is RankState.FINISHED),
            lost=tuple(r.rank for r in self._ranks if r.state is RankState.LOST),
        )
        self._view_wanted, self._relink_at_ns = False, None
        self._unlinked = set(self._view.ranks)
        actions.append(InstallView(view=self._view))

    def _finish(self, actions: list[Action]) -> None:
        self._phase = RunPhase.ENDED
        actions.append(RunEnded(outcome=self._outcome, reason=self._end_reason))

    def _mark_forked(self, rank: _Rank, now_ns: int, actions: list[Action]) -> bool:
        """Note that the process exists, on the first event that shows it; return False if it was known."""
        if rank.forked:
            return False
        rank.forked = True
        self._supervise(supervision.ChildStarted(child=rank_name(rank.rank)), now_ns, actions)
        return True

    def _alive(self, rank: _Rank) -> bool:
        return rank.state in (RankState.STARTING, RankState.JOINED)

    def _current(self, rank: int, incarnation: int) -> _Rank | None:
        if not 0 <= rank < len(self._ranks):
            return None
        found = self._ranks[rank]
        return found if found.incarnation == incarnation else None

    def _misuse(self, event: Event, state: str) -> LocalProtocolError:
        return LocalProtocolError(f"{event!r} does not fit: {state}", story=tuple(self._story))


_FIRST_GRACE_NS, _FIRST_KILL_NS, _FIRST_RELINK_NS = (
    1_000_000_000,
    500_000_000,
    100_000_000,
)  # of logs that do not name them


def _build_membership(config: Mapping[str, Any]) -> MembershipMachine:
    return MembershipMachine(
        config["world_size"],
        on_loss=OnLoss(config["on_loss"]),
        restarts_max=config["restarts_max"],
        period_ns=config["period_ns"],
        grace_ns=config.get("grace_ns", _FIRST_GRACE_NS),
        kill_ns=config.get("kill_ns", _FIRST_KILL_NS),
        relink_ns=config.get("relink_ns", _FIRST_RELINK_NS),
    )


MEMBERSHIP: MachineKind[Event, Action] = register(
    "membership",
    2,
    _build_membership,
    events=Event,
    actions=Action,
    states=(MembershipMachine, SupervisionMachine),
)
"""Its configuration: the arguments of `MembershipMachine`."""
