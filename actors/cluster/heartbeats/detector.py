"""The failure detector: judges from heartbeats which members have been silent for too long (sans-I/O).

Accrual as in Hayashibara et al., "The phi accrual failure detector" (SRDS 2004): the limit follows the mean
and spread of the observed intervals, so that a busy network does not look like a dead host. It stays
between four missed heartbeats and the `suspicion_ns` of the recovery budget, or four beats if that is
longer.

Arrivals come in batches, each with its own time: the driver asks for a judgement only when the silence of a
member has reached its limit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, assert_never

from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.clock.deadlines import Deadlines, derive

INTERVALS_KEPT = 32
INTERVALS_MIN = 4
"""Until so many were seen, the longest limit holds."""
PHI_SIGMAS = 5.6
"""A phi of 8, in standard deviations: one wrong suspicion in 10^8 if intervals were normal."""
MISSED_MIN = 4
CALM_FACTOR = 4
"""A cluster without a job beats so much slower, and its nodes are suspected after four of these beats: there
is no job to recover, and four fifths of the recovery budget are still less than a connection's timeout."""


def beat_ns(deadlines: Deadlines, *, busy: bool) -> int:
    """Return the interval between heartbeats of a view's members; busy: whether it has a job."""
    return deadlines.heartbeat_ns * (1 if busy else CALM_FACTOR)


def longest_limit_ns(suspicion_ns: int, beat_ns: int) -> int:
    """Return the longest silence that is not suspect for a member with this beat interval."""
    return max(suspicion_ns, MISSED_MIN * beat_ns)


# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """Observe exactly these members, which beat every `beat_ns`; new ones count as just heard."""

    subjects: tuple[NodeKey, ...]
    beat_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beats:
    """A member was heard at these times, ns, ascending. Ignored for members that are not observed."""

    key: NodeKey
    arrivals_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """All arrivals up to `now_ns` were reported: judge who is silent."""


Event: TypeAlias = Observe | Beats | Looked


# --- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Judge again when this member was not heard for `limit_ns`."""

    key: NodeKey
    limit_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """This member is suspected from now on."""

    key: NodeKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audible:
    """A suspected member was heard again."""

    key: NodeKey


Action: TypeAlias = Limit | Silent | Audible


@dataclass(slots=True)
class _Heard:
    last_ns: int
    limit_ns: int
    """Derived from the intervals when they change, since it is read far more often."""
    intervals_ns: deque[int] = field(default_factory=lambda: deque(maxlen=INTERVALS_KEPT))
    sum_ns: int = 0
    sum_ns2: int = 0
    """Sums of the intervals and their squares: integers, so that no precision is lost."""
    suspected: bool = False

    def took(self, interval_ns: int) -> None:
        """Add an interval, dropping the oldest beyond `INTERVALS_KEPT`."""
        if len(self.intervals_ns) == INTERVALS_KEPT:
            oldest_ns = self.intervals_ns[0]
            self.sum_ns -= oldest_ns
            self.sum_ns2 -= oldest_ns * oldest_ns
        self.intervals_ns.append(interval_ns)
        self.sum_ns += interval_ns
        self.sum_ns2 += interval_ns * interval_ns


class Detector:
    """Judges the heartbeats of the members that a node observes."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._suspicion_ns = deadlines.suspicion_ns
        self._set_beat(deadlines.heartbeat_ns)
        self._heard: dict[NodeKey, _Heard] = {}

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take one event at `now_ns` (monotonic) and return what follows, in order."""
        match event:
            case Beats(key=key, arrivals_ns=arrivals_ns):
                return self._beats(key, arrivals_ns)
            case Observe(subjects=subjects, beat_ns=beat_ns):
                return self._observe(subjects, beat_ns, now_ns)
            case Looked():
                return self._looked(now_ns)
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Limits are within their bounds, and the sums are sums of some intervals (Cauchy, Schwarz)."""
        for key in self._heard:
            self.check_heard(key)

    def check_heard(self, key: NodeKey) -> None:
        """Check one member, if it is observed: beats change nothing else."""
        if (known := self._heard.get(key)) is not None:
            assert self._beat_ns < known.limit_ns <= self._limit_ns_max, (key, known.limit_ns)
            assert 0 <= known.sum_ns * known.sum_ns <= INTERVALS_KEPT * known.sum_ns2, (key, known)

    def silence(self, key: NodeKey, now_ns: int) -> tuple[int | None, int]:
        """Return how long `key` has been silent, and its limit; None and 0 if it is not observed."""
        known = self._heard.get(key)
        return (None, 0) if known is None else (max(0, now_ns - known.last_ns), known.limit_ns)

    def _set_beat(self, beat_ns: int) -> None:
        self._beat_ns = beat_ns
        self._limit_ns_max = longest_limit_ns(self._suspicion_ns, beat_ns)

    def _limit_ns(self, known: _Heard) -> int:
        """Return the silence that is suspect after these intervals."""
        count = len(known.intervals_ns)
        if count < INTERVALS_MIN:
            return self._limit_ns_max
        mean = known.sum_ns / count
        spread = math.sqrt(count * known.sum_ns2 - known.sum_ns * known.sum_ns) / count
        limit_ns = mean + PHI_SIGMAS * max(spread, self._beat_ns / 2)
        return int(min(self._limit_ns_max, max(MISSED_MIN * self._beat_ns, limit_ns)))

    def _observe(self, subjects: tuple[NodeKey, ...], beat_ns: int, now_ns: int) -> list[Action]:
        self._set_beat(beat_ns)
        self._heard = {key: self._heard.get(key) or _Heard(now_ns, self._limit_ns_max) for key in subjects}
        for known in self._heard.values():
            known.limit_ns = self._limit_ns(known)
        return [Limit(key=key, limit_ns=known.limit_ns) for key, known in self._heard.items()]

    def _beats(self, key: NodeKey, arrivals_ns: tuple[int, ...]) -> list[Action]:
        known = self._heard.get(key)
        if known is None:
            return []
        before_ns = known.last_ns
        for at_ns in arrivals_ns:
            if at_ns > known.last_ns:
                known.took(at_ns - known.last_ns)
                known.last_ns = at_ns
        if known.last_ns == before_ns:
            return []
        known.limit_ns = self._limit_ns(known)
        was, known.suspected = known.suspected, False
        limit = Limit(key=key, limit_ns=known.limit_ns)
        return [limit, Audible(key=key)] if was else [limit]

    def _looked(self, now_ns: int) -> list[Action]:
        found: list[Action] = []
        for key, known in self._heard.items():
            silence_ns = now_ns - known.last_ns
            if known.suspected or silence_ns < known.limit_ns:
                continue
            known.suspected = True
            found.append(Silent(key=key, reason=f"not heard for {silence_ns / 1e6:.0f} ms"))
        return found


def _build_detector(config: Mapping[str, Any]) -> Detector:
    return Detector(derive(config["recovery_budget_ns"]))


DETECTOR: MachineKind[Event, Action] = register(
    "detector", 1, _build_detector, events=Event, actions=Action, states=(Detector,)
)
"""The failure detector of an incarnation; its configuration: `recovery_budget_ns`."""
