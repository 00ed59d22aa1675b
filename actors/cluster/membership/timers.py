"""Timeouts of the view-change machine, from the cluster's deadlines, and its agenda of named timers."""

from __future__ import annotations

from dataclasses import dataclass

from zbmd.actors.cluster.heartbeats.detector import beat_ns
from zbmd.transport.clock.deadlines import Deadlines


class Agenda:
    """Deadlines of a machine by name, in ns, behind one timer. Each is due once."""

    def __init__(self) -> None:
        self._due: dict[str, int] = {}
        self.next_ns: int | None = None
        """When the next entry is due."""

    def put(self, what: str, at_ns: int) -> None:
        """Set an entry's time."""
        self._due[what] = at_ns
        self._look()

    def put_by(self, what: str, at_ns: int) -> None:
        """Set an entry's time, unless an earlier one is set."""
        self.put(what, min(at_ns, self._due.get(what, at_ns)))

    def drop(self, *names: str) -> None:
        """Remove entries."""
        for what in names:
            self._due.pop(what, None)
        self._look()

    def clear(self) -> None:
        """Remove all entries."""
        self._due.clear()
        self._look()

    def take(self, now_ns: int) -> list[str]:
        """Remove and return what is due, the oldest first."""
        due = sorted((at_ns, what) for what, at_ns in self._due.items() if at_ns <= now_ns)
        for _, what in due:
            del self._due[what]
        self._look()
        return [what for _, what in due]

    def _look(self) -> None:
        self.next_ns = min(self._due.values(), default=None)


QUICK_SHARE = 20
"""Commands and leaves, which nobody else reports, wait only for this share of an agreement's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """All in ns; those of deaths are indexed by whether the view has a job, as the beat interval is."""

    round_ns: int
    """For the answers to one round."""
    retry_ns: int
    batch_ns: int
    """For further reports other than deaths."""
    quick_ns: int
    deaths_ns: tuple[int, int]
    """All observers of a death notice it within a beat, and of deaths that come together. So do those who
    have missed one who lives hear it again, and say so: for that long a suspicion has to stand."""
    settle_ns: tuple[int, int]
    """At most, until the observers of a suspect agree."""
    lonely_ns: int
    """Without reaching a quorum."""
    join_ns: int


def waits_of(deadlines: Deadlines) -> Waits:
    """Derive the timeouts."""
    latency_ns = deadlines.heartbeat_ns // 2
    calm_ns, busy_ns = beat_ns(deadlines, busy=False), beat_ns(deadlines, busy=True)
    return Waits(
        round_ns=deadlines.agreement_ns,
        retry_ns=deadlines.agreement_ns,
        batch_ns=deadlines.heartbeat_ns,
        quick_ns=max(1, deadlines.agreement_ns // QUICK_SHARE),
        deaths_ns=(calm_ns + latency_ns, busy_ns + latency_ns),
        settle_ns=(2 * calm_ns + latency_ns, 2 * busy_ns + latency_ns),
        lonely_ns=deadlines.recovery_budget_ns,
        join_ns=deadlines.view_ns,
    )
