"""The supervision machine (sans-I/O): which child to start, stop, kill, and when to give up.

The semantics are those of Erlang/OTP's `supervisor` (stdlib, `supervisor.erl`), with one difference: OTP
blocks while it starts or stops children, this machine takes every event at once. A child that dies while
its siblings are still being started therefore changes the plan immediately, not after the start.

The machine does not know what a child is. Its driver owes it, for each `StartChild`, at most one
`ChildStarted` and then exactly one end: `ChildStartFailed` or `ChildExited`. `StopChild` and `KillChild`
may reach a child that is still starting; its end is owed all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import assert_never

from zbmd.transport.errors import LocalProtocolError

STORY_EVENTS_MAX = 16
CHILDREN_MAX = 4096
INTENSITY_MAX = 10_000


class Strategy(Enum):
    """Which siblings a child's end takes with it."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"


class Restart(Enum):
    """When a child that ended is started again."""

    PERMANENT = "permanent"  # always
    TRANSIENT = "transient"  # unless it ended normally
    TEMPORARY = "temporary"  # never, not even when a sibling's end stopped it


class ChildState(Enum):
    """Where one child stands."""

    DOWN = "down"  # not running, nothing planned
    QUEUED = "queued"  # starts once everything before it is up
    STARTING = "starting"
    RUNNING = "running"
    CONDEMNED = "condemned"  # stops once everything after it is down
    STOPPING = "stopping"  # asked to stop, its shutdown deadline runs
    KILLING = "killing"  # killed, its end not yet seen


class Phase(Enum):
    """Where the supervisor itself stands."""

    NEW = "new"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPolicy:
    """What the machine knows of a child. `shutdown_ns` 0 kills without asking first."""

    child: str
    restart: Restart = Restart.PERMANENT
    shutdown_ns: int = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequested:
    """Start all children, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStarted:
    """The child is up."""

    child: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStartFailed:
    """The child never came up."""

    child: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildExited:
    """The child ended. `normal`: it had nothing more to do, or was asked to stop."""

    child: str
    normal: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """The shutdown deadline of this incarnation of the child has passed."""

    child: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Stop all children in reverse order; with `kill`, kill all of them at once."""

    reason: str
    kill: bool = False


Event = StartRequested | ChildStarted | ChildStartFailed | ChildExited | TimerFired | StopRequested


@dataclass(frozen=True, slots=True, kw_only=True)
class StartChild:
    """Start the child; `incarnation` counts its starts from 1."""

    child: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopChild:
    """Ask the child to stop."""

    child: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillChild:
    """End the child without asking."""

    child: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveDown:
    """The child ended and stays down; nothing to perform."""

    child: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Deliver `TimerFired` with the same fields at `at_ns`. A child has at most one timer."""

    child: str
    incarnation: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTimer:
    """The child ended in time: its timer is no longer wanted."""

    child: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Escalate:
    """All children are down and this supervisor has failed: its own supervisor decides. The last action."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """All children are down, as was asked. The last action."""

    reason: str


Action = StartChild | StopChild | KillChild | LeaveDown | SetTimer | CancelTimer | Escalate | Stopped

_ALIVE = frozenset(
    {ChildState.STARTING, ChildState.RUNNING, ChildState.CONDEMNED, ChildState.STOPPING, ChildState.KILLING}
)
_ENDING = frozenset({ChildState.CONDEMNED, ChildState.STOPPING, ChildState.KILLING})


@dataclass(slots=True)
class _Child:
    policy: ChildPolicy
    index: int
    state: ChildState = ChildState.DOWN
    incarnation: int = 0
    ever_up: bool = False
    restart_after_end: bool = False
    why: str = ""


class SupervisionMachine:
    """Decides for an ordered list of children.

    `intensity` restarts are allowed in any window of `period_ns`; one more, and the supervisor stops all
    children and escalates. A restart of several children for one cause counts once, each failed attempt to
    start a child again counts too. A child that cannot be started the first time escalates at once.
    """

    def __init__(
        self,
        children: Sequence[ChildPolicy],
        *,
        strategy: Strategy,
        intensity: int = 3,
        period_ns: int = 5_000_000_000,
    ) -> None:
        if len(children) > CHILDREN_MAX:
            raise LocalProtocolError(f"{len(children)} children; one supervisor takes {CHILDREN_MAX}")
        if not 0 <= intensity <= INTENSITY_MAX or period_ns <= 0:
            raise LocalProtocolError(f"intensity {intensity} in {period_ns} ns: give 0..{INTENSITY_MAX}, > 0")
        self._children = {p.child: _Child(policy=p, index=i) for i, p in enumerate(children)}
        if len(self._children) != len(children):
            raise LocalProtocolError(f"child ids must differ: {[p.child for p in children]}")
        if any(p.shutdown_ns < 0 for p in children):
            raise LocalProtocolError("shutdown_ns must not be negative")
        self._order = list(self._children.values())
        self._strategy = strategy
        self._intensity = intensity
        self._period_ns = period_ns
        self._phase = Phase.NEW
        self._failure: str | None = None
        self._stop_reason = ""
        self._restarts_ns: deque[int] = deque(maxlen=intensity + 1)
        self._story: deque[str] = deque(maxlen=STORY_EVENTS_MAX)

    @property
    def phase(self) -> Phase:
        """Where the supervisor stands."""
        return self._phase

    @property
    def states(self) -> Mapping[str, ChildState]:
        """Each child's state, in start order."""
        return MappingProxyType({c.policy.child: c.state for c in self._order})

    def incarnation(self, child: str) -> int:
        """How often the child was started."""
        return self._find(child).incarnation

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take one event, return the actions to perform in order. Raises `LocalProtocolError` on misuse."""
        actions: list[Action] = []
        match event:
            case StartRequested():
                self._on_start_requested(event)
            case ChildStarted():
                self._on_started(event)
            case ChildStartFailed():
                self._on_start_failed(event, now_ns, actions)
            case ChildExited():
                self._on_exited(event, now_ns, actions)
            case TimerFired():
                self._on_timer(event, actions)
            case StopRequested():
                self._on_stop_requested(event, actions)
            case _:
                assert_never(event)
        self._story.append(repr(event))
        self._advance(now_ns, actions)
        return actions

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a rule that holds between any two events does not."""
        states = [c.state for c in self._order]
        assert states.count(ChildState.STOPPING) <= 1, states
        if self._phase is Phase.NEW or self._phase is Phase.STOPPED:
            assert all(s is ChildState.DOWN for s in states), states
        if self._phase is Phase.STOPPING:
            assert all(s in _ENDING or s is ChildState.DOWN for s in states), states
            assert not any(c.restart_after_end for c in self._order)
        if self._phase is Phase.RUNNING:
            assert len(self._restarts_ns) <= self._intensity, self._restarts_ns
            if any(s in _ENDING for s in states):
                assert self._strategy is not Strategy.ONE_FOR_ONE, states
                assert ChildState.STARTING not in states, states
            elif ChildState.QUEUED in states:
                assert ChildState.STARTING in states[: states.index(ChildState.QUEUED)], states
        for c in self._order:
            assert c.policy.restart is not Restart.TEMPORARY or c.incarnation <= 1
            assert c.incarnation > 0 or c.state not in _ALIVE

    # Events.

    def _on_start_requested(self, event: StartRequested) -> None:
        if self._phase is not Phase.NEW:
            raise self._misuse(event, f"the supervisor is {self._phase.value}")
        self._phase = Phase.RUNNING
        for c in self._order:
            self._queue(c, "initial start")

    def _on_started(self, event: ChildStarted) -> None:
        c = self._find(event.child)
        if c.state not in _ALIVE or c.state is ChildState.RUNNING:
            raise self._misuse(event, f"child is {c.state.value}")
        c.ever_up = True
        # A start that crossed our decision to stop the child leaves that decision as it is.
        if c.state is ChildState.STARTING:
            c.state = ChildState.RUNNING

    def _on_start_failed(self, event: ChildStartFailed, now_ns: int, actions: list[Action]) -> None:
        c = self._find(event.child)
        if c.state not in _ALIVE or c.state is ChildState.RUNNING:
            raise self._misuse(event, f"child is {c.state.value}")
        if c.state in _ENDING:
            self._ended(c, actions)
        elif c.incarnation == 1:
            c.state = ChildState.DOWN
            self._fail(f"{event.child} failed to start: {event.reason}")
        else:
            self._restart(c, f"{event.child} failed to start again: {event.reason}", now_ns)

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
            self._restart(c, what, now_ns)
        else:
            c.state = ChildState.DOWN
            actions.append(LeaveDown(child=event.child, reason=f"{what}; {restart.value}: not restarted"))

    def _on_timer(self, event: TimerFired, actions: list[Action]) -> None:
        c = self._find(event.child)
        # A timer that crossed the child's end, or belongs to an older incarnation, means nothing.
        if c.state is ChildState.STOPPING and c.incarnation == event.incarnation:
            seconds = c.policy.shutdown_ns / 1e9
            self._kill(c, f"{c.why}; still there {seconds:g} s after being asked to stop", actions)

    def _on_stop_requested(self, event: StopRequested, actions: list[Action]) -> None:
        if self._phase is Phase.NEW or self._phase is Phase.RUNNING:
            self._stop_reason = event.reason
            self._condemn_all(event.reason)
        if event.kill:
            for c in reversed(self._order):
                if c.state is ChildState.STOPPING:
                    actions.append(CancelTimer(child=c.policy.child, incarnation=c.incarnation))
                if c.state in (ChildState.CONDEMNED, ChildState.STOPPING):
                    self._kill(c, event.reason, actions)

    # Decisions.

    def _restart(self, c: _Child, what: str, now_ns: int) -> None:
        c.state = ChildState.DOWN
        threshold_ns = now_ns - self._period_ns
        while self._restarts_ns and self._restarts_ns[0] < threshold_ns:
            self._restarts_ns.popleft()
        self._restarts_ns.append(now_ns)
        if len(self._restarts_ns) > self._intensity:
            seconds = self._period_ns / 1e9
            self._fail(f"more than {self._intensity} restarts within {seconds:g} s; the last: {what}")
            return
        match self._strategy:
            case Strategy.ONE_FOR_ONE:
                self._queue(c, what)
                return
            case Strategy.ONE_FOR_ALL:
                group = self._order
            case Strategy.REST_FOR_ONE:
                group = self._order[c.index :]
            case _:
                assert_never(self._strategy)
        for other in group:
            if other.state in (ChildState.STARTING, ChildState.RUNNING):
                other.state = ChildState.CONDEMNED
                other.restart_after_end = other.policy.restart is not Restart.TEMPORARY
                other.why = f"{what}; {self._strategy.value}"
            elif other.state is ChildState.DOWN and other.policy.restart is not Restart.TEMPORARY:
                self._queue(other, what)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._condemn_all(reason)

    def _condemn_all(self, reason: str) -> None:
        self._phase = Phase.STOPPING
        for c in self._order:
            c.restart_after_end = False
            if c.state is ChildState.QUEUED:
                c.state = ChildState.DOWN
            elif c.state in (ChildState.STARTING, ChildState.RUNNING):
                c.state = ChildState.CONDEMNED
                c.why = reason

    def _queue(self, c: _Child, why: str) -> None:
        c.state = ChildState.QUEUED
        c.why = why

    def _ended(self, c: _Child, actions: list[Action]) -> None:
        if c.state is ChildState.STOPPING:
            actions.append(CancelTimer(child=c.policy.child, incarnation=c.incarnation))
        if c.restart_after_end:
            c.restart_after_end = False
            self._queue(c, c.why)
        else:
            c.state = ChildState.DOWN
            if self._phase is Phase.RUNNING:
                what = f"{c.why}; {c.policy.restart.value}: not restarted"
                actions.append(LeaveDown(child=c.policy.child, reason=what))

    def _kill(self, c: _Child, reason: str, actions: list[Action]) -> None:
        c.state = ChildState.KILLING
        actions.append(KillChild(child=c.policy.child, reason=reason))

    # The plan: stop from the last to the first, then start from the first to the last.

    def _advance(self, now_ns: int, actions: list[Action]) -> None:
        if self._phase is Phase.NEW or self._phase is Phase.STOPPED:
            return
        if self._advance_stops(now_ns, actions):
            return
        if self._phase is Phase.RUNNING:
            self._advance_starts(actions)
            return
        self._phase = Phase.STOPPED
        if self._failure is not None:
            actions.append(Escalate(reason=self._failure))
        else:
            actions.append(Stopped(reason=self._stop_reason))

    def _advance_stops(self, now_ns: int, actions: list[Action]) -> bool:
        """Stop the last condemned child; True while any child has yet to end."""
        if any(c.state in (ChildState.STOPPING, ChildState.KILLING) for c in self._order):
            return True
        c = next((c for c in reversed(self._order) if c.state is ChildState.CONDEMNED), None)
        if c is None:
            return False
        child = c.policy.child
        if c.policy.shutdown_ns == 0:
            self._kill(c, c.why, actions)
        else:
            c.state = ChildState.STOPPING
            actions.append(StopChild(child=child, reason=c.why))
            at_ns = now_ns + c.policy.shutdown_ns
            actions.append(SetTimer(child=child, incarnation=c.incarnation, at_ns=at_ns))
        return True

    def _advance_starts(self, actions: list[Action]) -> None:
        """Start what is queued: in order, except that single restarts do not wait for one another."""
        for c in self._order:
            if c.state is ChildState.QUEUED:
                c.state = ChildState.STARTING
                c.incarnation += 1
                start = StartChild(child=c.policy.child, incarnation=c.incarnation, reason=c.why)
                actions.append(start)
            waits = not c.ever_up or self._strategy is not Strategy.ONE_FOR_ONE
            if c.state is ChildState.STARTING and waits:
                return

    def _find(self, child: str) -> _Child:
        found = self._children.get(child)
        if found is None:
            raise LocalProtocolError(f"no child {child!r}; there are {list(self._children)}")
        return found

    def _misuse(self, event: Event, state: str) -> LocalProtocolError:
        return LocalProtocolError(f"{event!r} does not fit: {state}", story=tuple(self._story))
