"""A line of the table of actors' figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorMeasurement:
    """One measurement; what does not apply is 0. amount: what `what` says."""

    what: str
    where: str
    p50_us: float = 0.0
    p99_us: float = 0.0
    per_second: float = 0.0
    amount: float = 0.0
    noise_percent: float = 0.0
    by: str = "zbmd"


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which that part of the values lies; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0


def table(rows: Sequence[ActorMeasurement]) -> str:
    """The rows under a line of titles."""
    columns = "   p50 us    p99 us   per second    amount  noise %"
    lines = [f"{'':32} {'':14} {'by':8} {columns}"]
    for row in rows:
        latency = f"{row.p50_us:9.1f} {row.p99_us:9.1f}" if row.p50_us else f"{'':9} {'':9}"
        rate = f"{row.per_second:12,.0f}" if row.per_second else f"{'':12}"
        amount = f"{row.amount:9,.1f}" if row.amount else f"{'':9}"
        noise = f"{row.noise_percent:8.1f}" if row.noise_percent else ""
        lines.append(f"{row.what:32} {row.where:14} {row.by:8} {latency} {rate} {amount} {noise}".rstrip())
    return "\n".join(lines)
