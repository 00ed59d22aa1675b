"""The machine of a node's spare ranks of one job (sans-I/O): when to start one, and which becomes what rank.

A spare is a process that waits for a rank (`zbmd.actors.process.spare`). The job table knows nothing of it:
it has no vote, is in no view, and its end disturbs nobody. When a rank is to be started here, a spare that
waits becomes that rank; without one, the rank is forked as before. A spare that ends, or does not answer
within `answer_ns`, before it is the rank costs no restart: the next spare, or a fork, takes its turn.

Spares are started `settle_ns` after a view of the job was entered, never during a recovery, whose ranks need
the processors. One that ends by itself is replaced; after more than `restarts_max` such ends within
`window_ns` no more are started, and the job goes on without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, assert_never

from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

STORY_EVENTS_MAX = 16


# --- events: a spare is known by its number, which no other one of this process ever has -------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewEntered:
    """The ranks of this node have entered a view of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWanted:
    """A rank is to be started on this node."""

    key: RankKey


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareForked:
    """The process exists."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareWaits:
    """Its script waits for a rank."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAccepted:
    """It has all that the rank needs, and waits to proceed."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareEnded:
    """The process is gone, or could not be made."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAsked:
    """The job needs no spares here any more, unless it has a rank started here again."""


Event: TypeAlias = (
    ViewEntered | RankWanted | SpareForked | SpareWaits | RankAccepted | SpareEnded | EndAsked | TimerFired
)


# --- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSpare:
    """Make a spare; answered by `SpareForked` or `SpareEnded`."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignRank:
    """Send a spare all that the rank needs; answered by `RankAccepted`, or by its end."""

    number: int
    key: RankKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Proceed:
    """The spare is that rank from now on, and no spare any more. Let it proceed."""

    number: int
    key: RankKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRank:
    """There is no spare for this rank: fork it."""

    key: RankKey


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSpare:
    """Ask a spare to end, or with `kill` end it."""

    number: int
    kill: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyLost:
    """A spare has ended by itself. is_last: no more are started."""

    number: int
    reason: str
    is_last: bool


Action: TypeAlias = ForkSpare | AssignRank | Proceed | ForkRank | EndSpare | NotifyLost | SetTimer


class SpareState(Enum):
    """The state of a spare."""

    FORKING = "forking"
    STARTING = "starting"  # its script runs
    WAITING = "waiting"
    ASSIGNED = "assigned"  # it was sent a rank, and has not accepted it yet
    ENDING = "ending"


@dataclass(slots=True)
class Spare:
    """A spare.

    key: the rank that it was sent; due_ns: when it is killed, unless its state changes; late: it was killed
    because its script did not come to where it waits.
    """

    number: int
    state: SpareState = SpareState.FORKING
    key: RankKey | None = None
    due_ns: int | None = None
    late: bool = False


class SparePool:
    """See the module. Raises `LocalProtocolError` for events out of turn.

    wanted: spares to hold; first: the number of the first one; restarts_max, window_ns, answer_ns, settle_ns:
    see the module; start_ns: time for a script to come to where it waits; grace_ns: to end when asked to.
    """

    def __init__(
        self,
        wanted: int,
        *,
        first: int = 1,
        restarts_max: int,
        window_ns: int,
        answer_ns: int,
        settle_ns: int,
        start_ns: int,
        grace_ns: int,
    ) -> None:
        self.spares: dict[int, Spare] = {}
        self.given_up = False
        self.wanted, self._restarts_max, self._window_ns = wanted, restarts_max, window_ns
        self._answer_ns, self._settle_ns = answer_ns, settle_ns
        self._start_ns, self._grace_ns = start_ns, grace_ns
        self.next_number = first
        self._ends_ns: deque[int] = deque(maxlen=restarts_max + 1)
        self._is_calm = self._is_over = False
        self._refill_ns: int | None = None
        self._timer_ns: int | None = None
        self._story: deque[str] = deque(maxlen=STORY_EVENTS_MAX)
        self._actions: list[Action] = []

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take one event at `now_ns` (monotonic) and return what to do, in order."""
        self._actions = []
        self._story.append(repr(event)[:200])
        match event:
            case ViewEntered():
                self._is_calm = True
                self._plan_refill(now_ns + self._settle_ns)
            case RankWanted(key=key):
                # Also after the end: a node that was cut off, and is back, has ranks again.
                self._is_calm = self._is_over = False
                self._refill_ns = None
                self._assign(key, now_ns)
            case SpareForked(number=number):
                self._forked(self._find(number), now_ns)
            case SpareWaits(number=number):
                spare = self._find(number)
                if spare.state is SpareState.STARTING:
                    spare.state, spare.due_ns = SpareState.WAITING, None
            case RankAccepted(number=number):
                self._accepted(self._find(number))
            case SpareEnded(number=number, reason=reason):
                self._ended(self._find(number), reason, now_ns)
            case EndAsked():
                self._end_all(now_ns)
            case TimerFired():
                self._timer_ns = None
                self._timer(now_ns)
            case _:
                assert_never(event)
        self._set_timer()
        return self._actions

    def check_invariants(self) -> None:
        """No rank is sent to two spares, each wait for a spare has a bound, and there are not too many."""
        keys = [spare.key for spare in self.spares.values() if spare.state is SpareState.ASSIGNED]
        assert len(keys) == len(set(keys)) and None not in keys, keys
        for spare in self.spares.values():
            bounded = spare.state in (SpareState.STARTING, SpareState.ASSIGNED)
            assert not bounded or spare.due_ns is not None, spare
            assert spare.key is None or spare.state in (SpareState.ASSIGNED, SpareState.ENDING), spare
        assert len(self._held()) <= self.wanted, self.spares
        assert not (self._is_over or self.given_up) or self._refill_ns is None, "no more are to be started"

    # -- what happens ------------------------------------------------------------------------------------

    def _assign(self, key: RankKey, now_ns: int) -> None:
        waiting = [spare for spare in self.spares.values() if spare.state is SpareState.WAITING]
        if not waiting:
            self._actions.append(ForkRank(key=key))
            return
        spare = waiting[0]  # the oldest
        spare.state, spare.key, spare.due_ns = SpareState.ASSIGNED, key, now_ns + self._answer_ns
        self._actions.append(AssignRank(number=spare.number, key=key))

    def _forked(self, spare: Spare, now_ns: int) -> None:
        if spare.state is SpareState.FORKING:
            spare.state, spare.due_ns = SpareState.STARTING, now_ns + self._start_ns
        elif spare.state is SpareState.ENDING:  # the fork crossed the decision to end it
            self._end(spare, now_ns)

    def _accepted(self, spare: Spare) -> None:
        if spare.state is not SpareState.ASSIGNED:
            return  # it was given up: its end follows
        assert spare.key is not None
        del self.spares[spare.number]
        self._actions.append(Proceed(number=spare.number, key=spare.key))

    def _ended(self, spare: Spare, reason: str, now_ns: int) -> None:
        del self.spares[spare.number]
        if spare.key is not None:
            self._assign(spare.key, now_ns)
        was_asked = spare.state is SpareState.ENDING and spare.key is None and not spare.late
        if self._is_over or was_asked:
            return
        self._ends_ns.append(now_ns)
        full = len(self._ends_ns) > self._restarts_max
        self.given_up = self.given_up or (full and now_ns - self._ends_ns[0] < self._window_ns)
        if self.given_up:
            self._refill_ns = None
        elif self._is_calm and self._refill_ns is None:
            self._plan_refill(now_ns)
        self._actions.append(NotifyLost(number=spare.number, reason=reason, is_last=self.given_up))

    def _end_all(self, now_ns: int) -> None:
        self._is_over, self._refill_ns = True, None
        for spare in self.spares.values():
            if spare.state in (SpareState.FORKING, SpareState.STARTING, SpareState.WAITING):
                self._end(spare, now_ns)  # one that was sent a rank answers, or its time is up

    def _end(self, spare: Spare, now_ns: int) -> None:
        if spare.state is not SpareState.FORKING:
            spare.due_ns = now_ns + self._grace_ns
            self._actions.append(EndSpare(number=spare.number))
        spare.state = SpareState.ENDING

    # -- time --------------------------------------------------------------------------------------------

    def _timer(self, now_ns: int) -> None:
        for spare in self.spares.values():
            if spare.due_ns is not None and spare.due_ns <= now_ns:
                spare.late = spare.state is SpareState.STARTING
                spare.state, spare.due_ns = SpareState.ENDING, None
                self._actions.append(EndSpare(number=spare.number, kill=True))
        if self._refill_ns is not None and self._refill_ns <= now_ns:
            self._refill_ns = None
            for _ in range(self.wanted - len(self._held())):
                self.spares[self.next_number] = Spare(self.next_number)
                self._actions.append(ForkSpare(number=self.next_number))
                self.next_number += 1

    def _plan_refill(self, at_ns: int) -> None:
        if not self._is_over and not self.given_up and len(self._held()) < self.wanted:
            self._refill_ns = at_ns

    def _held(self) -> list[Spare]:
        """Return those that are, or may soon be, of use."""
        gone = (SpareState.ASSIGNED, SpareState.ENDING)
        return [spare for spare in self.spares.values() if spare.state not in gone]

    def _set_timer(self) -> None:
        times = [self._refill_ns, *(spare.due_ns for spare in self.spares.values())]
        due_ns = min((at_ns for at_ns in times if at_ns is not None), default=None)
        if due_ns is not None and due_ns != self._timer_ns:
            self._actions.append(SetTimer(at_ns=due_ns))
        self._timer_ns = due_ns

    def _find(self, number: int) -> Spare:
        spare = self.spares.get(number)
        if spare is None:
            raise LocalProtocolError(f"there is no spare {number}", story=tuple(self._story))
        return spare


def _build_spares(config: Mapping[str, Any]) -> SparePool:
    return SparePool(**config)


SPARES: MachineKind[Event, Action] = register(
    "spares", 1, _build_spares, events=Event, actions=Action, states=(SparePool,)
)
"""The spare ranks of a job on a node; its configuration: the arguments of `SparePool`."""
