"""For how long the view-change machine waits for what: shares and multiples of the cluster's deadlines."""

from __future__ import annotations

from dataclasses import dataclass

from zbmd.actors.cluster.heartbeats.detector import beat_ns
from zbmd.transport.clock.deadlines import Deadlines

QUICK_SHARE = 20
"""What no others will report, commands and leaves, waits only for such a share of an agreement's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """All in ns; those of deaths by whether the view has a job (0 or 1), as the pace of the beats is."""

    round_ns: int
    """For the answers of all to one question."""
    retry_ns: int
    batch_ns: int
    """For more that report something other than a death."""
    quick_ns: int
    deaths_ns: tuple[int, int]
    """All observers of a death notice it within a beat, and of deaths that come together. So do those who
    have missed one who lives hear it again, and say so: for that long a suspicion has to stand."""
    settle_ns: tuple[int, int]
    """At most, for the observers of a suspect to agree."""
    lonely_ns: int
    """Without the word of a quorum."""
    join_ns: int


def waits_of(deadlines: Deadlines) -> Waits:
    """What follows from these."""
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
