"""The supervision machine (sans-I/O): which child to start, stop, kill, and when to give up.

The semantics are those of Erlang/OTP's `supervisor` (stdlib, `supervisor.erl`), with one difference: OTP
blocks while it starts or stops children, this machine takes every event at once. A child that dies while
its siblings are still being started therefore changes the plan immediately, not after the start.

The machine does not know what a child is. Its driver owes it, for each `StartChild`, at most one
`ChildStarted` and then exactly one end: `ChildStartFailed` or `ChildExited`. `StopChild` and `KillChild`
may reach a child that is still starting; its end is still owed.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, assert_never

import msgspec

from zbmd.actors.supervision.events import (
    Action,
    AddRequested,
    AutoShutdown,
    BackOff,
    CancelChildTimer,
    ChildExited,
    ChildPolicy,
    ChildRefusal,
    ChildStarted,
    ChildStartFailed,
    ChildTimerFired,
    DeleteRequested,
    Escalate,
    Event,
    KillChild,
    LeaveDown,
    Refuse,
    Restart,
    RestartRequested,
    SetChildTimer,
    StartChild,
    StartRequested,
    StopChild,
    Stopped,
    StopRequested,
    Strategy,
    TerminateRequested,
)
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError

STORY_EVENTS_MAX = 16
CHILDREN_MAX = 4096
INTENSITY_MAX = 10_000


class ChildState(Enum):
    """The state of one child."""

    DOWN = "down"  # not running, nothing planned
    WAITING = "waiting"  # its back-off runs
    QUEUED = "queued"  # starts once everything before it is up
    STARTING = "starting"
    RUNNING = "running"
    CONDEMNED = "condemned"  # stops once everything after it is down
    STOPPING = "stopping"  # asked to stop, its shutdown deadline runs
    KILLING = "killing"  # killed, its end not yet seen


class SupervisorPhase(Enum):
    """The state of the supervisor itself."""

    captured_as = enum.nonmember("Phase")
    NEW = "new"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


_ALIVE = frozenset(
    {ChildState.STARTING, ChildState.RUNNING, ChildState.CONDEMNED, ChildState.STOPPING, ChildState.KILLING}
)
_ENDING = frozenset({ChildState.CONDEMNED, ChildState.STOPPING, ChildState.KILLING})


@dataclass(slots=True)
class _Child:
    policy: ChildPolicy
    dynamic: bool = False
    state: ChildState = ChildState.DOWN
    incarnation: int = 0
    ever_up: bool = False
    up_since_ns: int = 0
    failures: int = 0  # in a row
    restart_after_end: bool = False
    why: str = ""


class SupervisionMachine:
    """Decides for an ordered list of children.

    `intensity` restarts are allowed in any window of `period_ns`; one more, and the supervisor stops all
    children and escalates. A restart of several children for one cause counts once, each failed attempt to
    start a child again counts too. A child that cannot be started the first time escalates at once, unless it
    was added later. A temporary child is forgotten when it has ended. auto_shutdown: whether the end of
    significant children, by themselves and for good, stops the supervisor: that is no failure.
    """

    def __init__(
        self,
        children: Sequence[ChildPolicy],
        *,
        strategy: Strategy,
        intensity: int = 3,
        period_ns: int = 5_000_000_000,
        back_off: BackOff | None = None,
        auto_shutdown: AutoShutdown = AutoShutdown.NEVER,
    ) -> None:
        if len(children) > CHILDREN_MAX:
            raise LocalProtocolError(f"{len(children)} children; one supervisor takes {CHILDREN_MAX}")
        if not 0 <= intensity <= INTENSITY_MAX or period_ns <= 0:
            raise LocalProtocolError(f"intensity {intensity} in {period_ns} ns: give 0..{INTENSITY_MAX}, > 0")
        self._children = {p.child: _Child(policy=p) for p in children}
        if len(self._children) != len(children):
            raise LocalProtocolError(f"child ids must differ: {[p.child for p in children]}")
        self._auto_shutdown = auto_shutdown
        for policy in children:
            if wrong := self._faults(policy):
                raise LocalProtocolError(f"{policy.child}: {wrong}")
        self._order = list(self._children.values())
        self._strategy = strategy
        self._intensity = intensity
        self._period_ns = period_ns
        self._back_off = back_off
        self._phase = SupervisorPhase.NEW
        self._failure: str | None = None
        self._stop_reason = ""
        self._restarts_ns: deque[int] = deque(maxlen=intensity + 1)
        self._story: deque[str] = deque(maxlen=STORY_EVENTS_MAX)

    @property
    def phase(self) -> SupervisorPhase:
        """Return the state of the supervisor."""
        return self._phase

    @property
    def states(self) -> Mapping[str, ChildState]:
        """Return each child's state, in start order."""
        return MappingProxyType({c.policy.child: c.state for c in self._order})

    def incarnation(self, child: str) -> int:
        """Return how often the child was started."""
        return self._find(child).incarnation

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take one event, return the actions to perform in order. Raises `LocalProtocolError` on misuse."""
        actions: list[Action] = []
        match event:
            case StartRequested():
                self._on_start_requested(event)
            case ChildStarted():
                self._on_started(event, now_ns)
            case ChildStartFailed():
                self._on_start_failed(event, now_ns, actions)
            case ChildExited():
                self._on_exited(event, now_ns, actions)
            case ChildTimerFired():
                self._on_timer(event, actions)
            case StopRequested():
                self._on_stop_requested(event, actions)
            case AddRequested():
                self._on_add(event, actions)
            case TerminateRequested():
                self._on_terminate(event, actions)
            case RestartRequested():
                self._on_restart_requested(event, actions)
            case DeleteRequested():
                self._on_delete(event, actions)
            case _:
                assert_never(event)
        self._story.append(repr(event))
        self._advance(now_ns, actions)
        return actions

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a rule that holds between any two events does not."""
        states = [c.state for c in self._order]
        assert list(self._children.values()) == self._order
        in_turn = self._phase is not SupervisorPhase.RUNNING or self._strategy is not Strategy.ONE_FOR_ONE
        if in_turn and self._phase is not SupervisorPhase.STOPPING:
            assert states.count(ChildState.STOPPING) <= 1, states
        if self._phase is SupervisorPhase.NEW or self._phase is SupervisorPhase.STOPPED:
            assert all(s is ChildState.DOWN for s in states), states
        if self._phase is SupervisorPhase.STOPPING:
            assert all(s in _ENDING or s is ChildState.DOWN for s in states), states
            assert not any(c.restart_after_end for c in self._order)
        if self._phase is SupervisorPhase.RUNNING:
            assert len(self._restarts_ns) <= self._intensity, self._restarts_ns
            if self._strategy is Strategy.ONE_FOR_ONE:
                assert ChildState.CONDEMNED not in states, states
            elif any(s in _ENDING for s in states):
                # None of a group that starts again; an end that was asked for keeps no other from starting.
                group = next((i for i, c in enumerate(self._order) if c.restart_after_end), len(states))
                assert ChildState.STARTING not in states[group:], states
            elif ChildState.QUEUED in states and ChildState.WAITING not in states:
                assert ChildState.STARTING in states[: states.index(ChildState.QUEUED)], states
        if self._back_off is None or self._phase is SupervisorPhase.STOPPING:
            assert ChildState.WAITING not in states, states
        for c in self._order:
            assert c.policy.restart is not Restart.TEMPORARY or c.incarnation <= 1
            assert c.incarnation > 0 or c.state not in _ALIVE

    # Events.

    def _on_start_requested(self, event: StartRequested) -> None:
        if self._phase is not SupervisorPhase.NEW:
            raise self._misuse(event, f"the supervisor is {self._phase.value}")
        self._phase = SupervisorPhase.RUNNING
        for c in self._order:
            self._queue(c, "initial start")

    def _on_started(self, event: ChildStarted, now_ns: int) -> None:
        c = self._find(event.child)
        if c.state not in _ALIVE or c.state is ChildState.RUNNING:
            raise self._misuse(event, f"child is {c.state.value}")
        c.ever_up = True
        c.up_since_ns = now_ns
        # A start that crossed our decision to stop the child leaves that decision as it is.
        if c.state is ChildState.STARTING:
            c.state = ChildState.RUNNING

    def _on_start_failed(self, event: ChildStartFailed, now_ns: int, actions: list[Action]) -> None:
        c = self._find(event.child)
        if c.state not in _ALIVE or c.state is ChildState.RUNNING:
            raise self._misuse(event, f"child is {c.state.value}")
        if c.state in _ENDING:
            self._ended(c, actions)
        elif c.dynamic and not c.ever_up:
            self._leave_down(c, f"{event.child} failed to start: {event.reason}", actions)
            self._forget(c)
        elif c.incarnation == 1:
            c.state = ChildState.DOWN
            self._fail(f"{event.child} failed to start: {event.reason}", actions)
        else:
            self._restart(c, f"{event.child} failed to start again: {event.reason}", now_ns, actions)

    def _on_exited(self, event: ChildExited, now_ns: int, actions: list[Action]) -> None:
        c = self._find(event.child)
        if c.state not in _ALIVE:
            raise self._misuse(event, f"child is {c.state.value}")
        how = "ended normally" if event.normal else "failed"
        what = f"{event.child} {how}: {event.reason}"
        if c.state in _ENDING:
            self._ended(c, actions)
            return
        restart = c.policy.restart
        if restart is Restart.PERMANENT or (restart is Restart.TRANSIENT and not event.normal):
            self._restart(c, what, now_ns, actions)
        else:
            self._leave_down(c, f"{what}; {restart.value}: not restarted", actions)
            if c.policy.significant:
                self._shut_down_with(what, actions)

    def _on_timer(self, event: ChildTimerFired, actions: list[Action]) -> None:
        c = self._children.get(event.child)
        # A timer that crossed the child's end, or belongs to an older incarnation, means nothing.
        if c is None or c.incarnation != event.incarnation:
            return
        if c.state is ChildState.WAITING:
            self._queue(c, c.why)
        elif c.state is ChildState.STOPPING:
            seconds = (c.policy.shutdown_ns or 0) / 1e9
            self._kill(c, f"{c.why}; still there {seconds:g} s after being asked to stop", actions)

    def _on_stop_requested(self, event: StopRequested, actions: list[Action]) -> None:
        if self._phase is SupervisorPhase.NEW or self._phase is SupervisorPhase.RUNNING:
            self._stop_reason = event.reason
            self._condemn_all(event.reason, actions)
        if event.kill:
            for c in reversed(self._order):
                if c.state is ChildState.STOPPING and c.policy.shutdown_ns is not None:
                    actions.append(CancelChildTimer(child=c.policy.child, incarnation=c.incarnation))
                if c.state in (ChildState.CONDEMNED, ChildState.STOPPING):
                    self._kill(c, event.reason, actions)

    # Requests.

    def _refuses(self, child: str, actions: list[Action], *may_be: ChildState) -> bool:
        """Return whether a request for a child that must be in one of these states is refused."""
        c = self._children.get(child)
        if self._phase is not SupervisorPhase.RUNNING:
            why = ChildRefusal.STOPPING
        elif c is None:
            why = ChildRefusal.UNKNOWN
        elif may_be and c.state not in may_be:
            why = ChildRefusal.UP
        else:
            return False
        actions.append(Refuse(child=child, why=why))
        return True

    def _on_add(self, event: AddRequested, actions: list[Action]) -> None:
        child = event.policy.child
        known = self._children.get(child)
        if wrong := self._faults(event.policy):
            raise self._misuse(event, wrong)
        if (
            known is not None
            or len(self._order) >= CHILDREN_MAX
            or self._phase is not SupervisorPhase.RUNNING
        ):
            down = known is not None and known.state is ChildState.DOWN
            why = (
                ChildRefusal.TOO_MANY if known is None else ChildRefusal.PRESENT if down else ChildRefusal.UP
            )
            why = why if self._phase is SupervisorPhase.RUNNING else ChildRefusal.STOPPING
            actions.append(Refuse(child=child, why=why))
            return
        c = self._children[child] = _Child(policy=event.policy, dynamic=True)
        self._order.append(c)
        self._queue(c, "added")

    def _on_terminate(self, event: TerminateRequested, actions: list[Action]) -> None:
        if self._refuses(event.child, actions):
            return
        c = self._find(event.child)
        c.restart_after_end = False
        if c.state in (ChildState.STARTING, ChildState.RUNNING):
            c.state = ChildState.CONDEMNED
            c.why = "its end was asked for"
        elif c.state not in _ENDING:
            if c.state is ChildState.WAITING:
                actions.append(CancelChildTimer(child=event.child, incarnation=c.incarnation))
            self._leave_down(c, "its end was asked for", actions)

    def _on_restart_requested(self, event: RestartRequested, actions: list[Action]) -> None:
        if not self._refuses(event.child, actions, ChildState.DOWN):
            self._queue(self._find(event.child), "its restart was asked for")

    def _on_delete(self, event: DeleteRequested, actions: list[Action]) -> None:
        if not self._refuses(event.child, actions, ChildState.DOWN):
            self._forget(self._find(event.child))

    # Decisions.

    def _restart(self, c: _Child, what: str, now_ns: int, actions: list[Action]) -> None:
        c.state = ChildState.DOWN
        threshold_ns = now_ns - self._period_ns
        while self._restarts_ns and self._restarts_ns[0] < threshold_ns:
            self._restarts_ns.popleft()
        self._restarts_ns.append(now_ns)
        if len(self._restarts_ns) > self._intensity:
            seconds = self._period_ns / 1e9
            self._fail(
                f"more than {self._intensity} restarts within {seconds:g} s; the last: {what}", actions
            )
            return
        was_up = c.up_since_ns and now_ns - c.up_since_ns >= self._period_ns
        c.failures = 1 if was_up else c.failures + 1
        c.up_since_ns = 0
        self._queue_or_wait(c, what, now_ns, actions)
        match self._strategy:
            case Strategy.ONE_FOR_ONE:
                return
            case Strategy.ONE_FOR_ALL:
                group = self._order
            case Strategy.REST_FOR_ONE:
                group = self._order[self._order.index(c) :]
            case _:
                assert_never(self._strategy)
        for other in group:
            if other.state in (ChildState.STARTING, ChildState.RUNNING):
                other.state = ChildState.CONDEMNED
                other.restart_after_end = other.policy.restart is not Restart.TEMPORARY
                other.why = f"{what}; {self._strategy.value}"
            elif other.state is ChildState.DOWN and other.policy.restart is not Restart.TEMPORARY:
                self._queue(other, what)

    def _queue_or_wait(self, c: _Child, what: str, now_ns: int, actions: list[Action]) -> None:
        delay_ns = 0 if self._back_off is None else self._back_off.delay_ns(c.policy.child, c.failures)
        if not delay_ns:
            self._queue(c, what)
            return
        c.state = ChildState.WAITING
        c.why = what
        actions.append(
            SetChildTimer(child=c.policy.child, incarnation=c.incarnation, at_ns=now_ns + delay_ns)
        )

    def _faults(self, policy: ChildPolicy) -> str:
        """Return what is wrong with a child's policy, empty if nothing is."""
        if policy.shutdown_ns is not None and policy.shutdown_ns < 0:
            return "shutdown_ns must not be negative"
        if policy.significant and policy.restart is Restart.PERMANENT:
            return "a permanent child never ends for good: only a transient or temporary one is significant"
        if policy.significant and self._auto_shutdown is AutoShutdown.NEVER:
            return "it is significant to nobody: give an auto_shutdown, too"
        return ""

    def _shut_down_with(self, what: str, actions: list[Action]) -> None:
        """A significant child has ended by itself."""
        significant = [c for c in self._order if c.policy.significant]
        left = any(c.restart_after_end or c.state not in _ENDING | {ChildState.DOWN} for c in significant)
        if self._auto_shutdown is AutoShutdown.ANY_SIGNIFICANT or not left:
            self._stop_reason = f"{what}; {self._auto_shutdown.value}"
            self._condemn_all(self._stop_reason, actions)

    def _fail(self, reason: str, actions: list[Action]) -> None:
        self._failure = reason
        self._condemn_all(reason, actions)

    def _condemn_all(self, reason: str, actions: list[Action]) -> None:
        self._phase = SupervisorPhase.STOPPING
        for c in self._order:
            c.restart_after_end = False
            if c.state is ChildState.WAITING:
                actions.append(CancelChildTimer(child=c.policy.child, incarnation=c.incarnation))
            if c.state is ChildState.QUEUED or c.state is ChildState.WAITING:
                c.state = ChildState.DOWN
            elif c.state in (ChildState.STARTING, ChildState.RUNNING):
                c.state = ChildState.CONDEMNED
                c.why = reason

    def _queue(self, c: _Child, why: str) -> None:
        c.state = ChildState.QUEUED
        c.why = why

    def _ended(self, c: _Child, actions: list[Action]) -> None:
        if c.state is ChildState.STOPPING and c.policy.shutdown_ns is not None:
            actions.append(CancelChildTimer(child=c.policy.child, incarnation=c.incarnation))
        if c.restart_after_end:
            c.restart_after_end = False
            self._queue(c, c.why)
        elif self._phase is SupervisorPhase.RUNNING:
            self._leave_down(c, f"{c.why}; {c.policy.restart.value}: not restarted", actions)
        else:
            c.state = ChildState.DOWN

    def _leave_down(self, c: _Child, reason: str, actions: list[Action]) -> None:
        c.state = ChildState.DOWN
        actions.append(LeaveDown(child=c.policy.child, reason=reason))
        if c.policy.restart is Restart.TEMPORARY:
            self._forget(c)

    def _forget(self, c: _Child) -> None:
        if self._children.pop(c.policy.child, None) is not None:
            self._order.remove(c)

    def _kill(self, c: _Child, reason: str, actions: list[Action]) -> None:
        c.state = ChildState.KILLING
        actions.append(KillChild(child=c.policy.child, reason=reason))

    # The plan: stop from the last to the first, then start from the first to the last.

    def _advance(self, now_ns: int, actions: list[Action]) -> None:
        if self._phase is SupervisorPhase.NEW or self._phase is SupervisorPhase.STOPPED:
            return
        if self._advance_stops(now_ns, actions):
            return
        if self._phase is SupervisorPhase.RUNNING:
            self._advance_starts(actions)
            return
        self._phase = SupervisorPhase.STOPPED
        if self._failure is not None:
            actions.append(Escalate(reason=self._failure))
        else:
            actions.append(Stopped(reason=self._stop_reason))

    def _advance_stops(self, now_ns: int, actions: list[Action]) -> bool:
        """Stop the last condemned child; return True while the next step has to wait for an end."""
        running = self._phase is SupervisorPhase.RUNNING
        if self._strategy is Strategy.ONE_FOR_ONE:
            for each in self._order:
                # Each by itself, as it was asked for; and what was added later stops all at once.
                if each.state is ChildState.CONDEMNED and (running or each.dynamic):
                    self._stop(each, now_ns, actions)
            if running:
                return False
        if any(c.state in (ChildState.STOPPING, ChildState.KILLING) for c in self._order):
            return True
        c = next((c for c in reversed(self._order) if c.state is ChildState.CONDEMNED), None)
        if c is None:
            return False
        self._stop(c, now_ns, actions)
        return True

    def _stop(self, c: _Child, now_ns: int, actions: list[Action]) -> None:
        child = c.policy.child
        if c.policy.shutdown_ns == 0:
            self._kill(c, c.why, actions)
        else:
            c.state = ChildState.STOPPING
            actions.append(StopChild(child=child, reason=c.why))
            if c.policy.shutdown_ns is not None:
                at_ns = now_ns + c.policy.shutdown_ns
                actions.append(SetChildTimer(child=child, incarnation=c.incarnation, at_ns=at_ns))

    def _advance_starts(self, actions: list[Action]) -> None:
        """Start the queued children in order; single restarts do not wait for one another."""
        alone = self._strategy is Strategy.ONE_FOR_ONE
        if not alone and any(c.state is ChildState.WAITING for c in self._order):
            return
        for c in self._order:
            if c.state is ChildState.QUEUED:
                c.state = ChildState.STARTING
                c.incarnation += 1
                start = StartChild(child=c.policy.child, incarnation=c.incarnation, reason=c.why)
                actions.append(start)
            waits = not alone or not (c.ever_up or c.dynamic)
            if c.state is ChildState.STARTING and waits:
                return

    def _find(self, child: str) -> _Child:
        found = self._children.get(child)
        if found is None:
            raise LocalProtocolError(f"no child {child!r}; there are {list(self._children)}")
        return found

    def _misuse(self, event: Event, state: str) -> LocalProtocolError:
        return LocalProtocolError(f"{event!r} does not fit: {state}", story=tuple(self._story))


def _build_supervision(config: Mapping[str, Any]) -> SupervisionMachine:
    return SupervisionMachine(
        msgspec.convert(config["children"], list[ChildPolicy]),
        strategy=Strategy(config["strategy"]),
        intensity=config["intensity"],
        period_ns=config["period_ns"],
        back_off=msgspec.convert(config.get("back_off"), BackOff | None),
        auto_shutdown=AutoShutdown(config.get("auto_shutdown", "never")),
    )


SUPERVISION: MachineKind[Event, Action] = register(
    "supervision",
    1,
    _build_supervision,
    events=Event,
    actions=Action,
    states=(SupervisionMachine,),
)
"""Its configuration: the arguments of `SupervisionMachine`."""
