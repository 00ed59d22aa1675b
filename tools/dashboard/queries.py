"""The questions of the pages to a run's database; each answer is data for JSON, and bounded.

A curve of more steps than a screen has columns is drawn in bins: each value is the mean of a bin's steps.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final

from zbmd.actors.cluster.local_deaths import boot_id
from zbmd.tools.telemetry.measures import USER_SERIES_MAX
from zbmd.tools.telemetry.schema import CHUNK_STEPS, PHASES

BINS_MAX: Final = 400
POINTS_MAX: Final = 1_000
HEAT_RANKS_MAX: Final = 1_024
OPS_SHOWN: Final = 10
SPANS_MAX: Final = 6_000
EVENTS_MAX: Final = 500
COMM_LIMIT: Final = 0.15
BUBBLE_LIMIT: Final = 0.10

Answer = dict[str, Any]


class Bins:
    """Equal ranges of steps, from the first to the last that there are, and the view with their sums."""

    def __init__(self, connection: sqlite3.Connection, most: int = BINS_MAX) -> None:
        first, last, oldest = connection.execute(
            "SELECT (SELECT min(step) FROM step_timing), (SELECT max(step) FROM step_timing), "
            "(SELECT min(first_step) FROM step_history)"
        ).fetchone()
        first = first if oldest is None else oldest
        self.first = 0 if first is None else int(first)
        self.count = 0 if first is None else int(last) - self.first + 1
        self.width = max(1, -(-self.count // most))
        self.source = "step_sums"
        if self.width >= CHUNK_STEPS:
            self.first -= self.first % CHUNK_STEPS
            self.width += -self.width % CHUNK_STEPS
            self.source = "chunk_sums"

    @property
    def expression(self) -> str:
        """The first step of a row's bin, in SQL."""
        return f"(first_step - {self.first}) / {self.width} * {self.width} + {self.first}"


def _columns(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> Answer:
    """Rows as a list for each column."""
    return {name: [row[n] for row in rows] for n, name in enumerate(names)}


def summary(connection: sqlite3.Connection) -> Answer:
    """Return the numbers at the top of the page; None for one that is not known."""
    steps, wall, comm, bubble, flops, hardware = connection.execute(
        "SELECT sum(steps), sum(wall_ns), sum(comm_ns), sum(bubble_ns), sum(flops), sum(hardware_flops) "
        "FROM chunk_sums"
    ).fetchone()
    (last_step,) = connection.execute("SELECT max(first_step) FROM chunk_sums").fetchone()
    (peak_ns,) = connection.execute(
        "SELECT sum(wall_ns * peak_flops) FROM chunk_sums JOIN incarnations USING (incarnation_id)"
    ).fetchone()
    kinds = dict(connection.execute("SELECT kind, count(*) FROM events GROUP BY kind").fetchall())
    recoveries = connection.execute(
        "SELECT max(duration_ns) / 1e6 FROM events WHERE kind = 'recovered' "
        "GROUP BY at_ns / 1000000000 ORDER BY 1"
    ).fetchall()
    (ranks,) = connection.execute("SELECT count(DISTINCT rank) FROM incarnations").fetchone()
    directory = connection.execute("SELECT directory, world_size FROM runs").fetchone()
    return {
        "directory": None if directory is None else directory[0],
        "ranks": ranks,
        "steps": last_step,
        "step_ms": wall / steps / 1e6 if steps else None,
        "comm": comm / wall if wall else None,
        "bubble": bubble / wall if wall else None,
        "mfu": flops / (peak_ns / 1e9) if peak_ns and flops else None,
        "hfu": hardware / (peak_ns / 1e9) if peak_ns and hardware else None,
        "loss": _last_metric(connection, "loss"),
        "held_out_loss": _last_metric(connection, "held_out_loss"),
        "tokens_per_s": _last_metric(connection, "tokens_per_s"),
        "deaths": kinds.get("death", 0),
        "recovery_ms": recoveries[len(recoveries) // 2][0] if recoveries else None,
        "comm_limit": COMM_LIMIT,
        "bubble_limit": BUBBLE_LIMIT,
    }


def _last_metric(connection: sqlite3.Connection, name: str) -> float | None:
    found = connection.execute(
        "SELECT value FROM metrics WHERE name = ? ORDER BY step DESC LIMIT 1", (name,)
    ).fetchone()
    return None if found is None else found[0]


def waterfall(connection: sqlite3.Connection) -> Answer:
    """Return ms a step by phase, in the mean of the ranks, for each bin."""
    bins = Bins(connection)
    sums = ", ".join(f"sum({phase}_ns) / 1e6 / sum(steps)" for phase in PHASES)
    rows = connection.execute(
        f"SELECT {bins.expression} AS bin, {sums} FROM {bins.source} GROUP BY bin ORDER BY bin"
    ).fetchall()
    found = _columns(rows, ("step", *PHASES))
    phases = {phase: found[phase] for phase in PHASES if any(found[phase])}
    return {"step": found["step"], "width": bins.width, "phases": phases}


def utilisation(connection: sqlite3.Connection) -> Answer:
    """Return MFU, HFU, and the shares of communication and bubble, for each bin; None without a peak."""
    bins = Bins(connection)
    rows = connection.execute(
        f"SELECT {bins.expression} AS bin, sum(flops) * 1e9 / sum(wall_ns * peak_flops), "
        "sum(hardware_flops) * 1e9 / sum(wall_ns * peak_flops), sum(flops) * 1.0 / sum(wall_ns), "
        "sum(comm_ns) * 1.0 / sum(wall_ns), sum(bubble_ns) * 1.0 / sum(wall_ns) "
        f"FROM {bins.source} JOIN incarnations USING (incarnation_id) GROUP BY bin ORDER BY bin"
    ).fetchall()
    names = ("step", "mfu", "hfu", "gflops", "comm", "bubble")
    return {**_columns(rows, names), "comm_limit": COMM_LIMIT, "bubble_limit": BUBBLE_LIMIT}


def by_rank(connection: sqlite3.Connection) -> Answer:
    """Return, for each rank and bin, the ms a step in which the rank waited for nobody: who is slow."""
    bins = Bins(connection, BINS_MAX // 4)
    rows = connection.execute(
        f"SELECT rank, {bins.expression} AS bin, "
        "sum(wall_ns - comm_ns - idle_ns - bubble_ns) / 1e6 / sum(steps) "
        f"FROM {bins.source} WHERE rank < ? GROUP BY rank, bin ORDER BY rank, bin",
        (HEAT_RANKS_MAX,),
    ).fetchall()
    steps = sorted({row[1] for row in rows})
    ranks = sorted({row[0] for row in rows})
    column, line = ({value: n for n, value in enumerate(values)} for values in (steps, ranks))
    own: list[list[float | None]] = [[None] * len(steps) for _ in ranks]
    for rank, step, own_ms in rows:
        own[line[rank]][column[step]] = own_ms
    return {"step": steps, "rank": ranks, "own_ms": own}


def slowest_ops(connection: sqlite3.Connection) -> Answer:
    """Return the operations that took most time of their own, with launches a step and speeds.

    Of a run whose ops were sampled, these, by pass and shape; of another one, layers and collectives.
    of_peak: the time that the slower of products and memory takes at its peak, of the time it took.
    """
    (sampled,) = connection.execute("SELECT EXISTS (SELECT 1 FROM op_profile WHERE kind = 'op')").fetchone()
    kind = "op" if sampled else "span"
    (steps,) = connection.execute(
        "SELECT count(*) FROM (SELECT DISTINCT incarnation_id, step FROM op_profile WHERE kind = ?)", (kind,)
    ).fetchone()
    rows = connection.execute(
        "SELECT op, pass, shape, o.dtype, sum(calls), sum(execute_ns) / 1e6, "
        "sum(calls) * 1.0 / :steps, sum(execute_ns) / 1e6 / :steps, sum(wait_ns) / 1e6 / :steps, "
        "sum(enqueue_ns) / 1e6 / :steps, "
        "sum(execute_ns) * 1.0 / (SELECT sum(execute_ns) FROM op_profile WHERE kind = :kind), "
        "CASE WHEN sum(flops) > 0 THEN sum(flops) * 1.0 / sum(execute_ns) END, "
        "CASE WHEN sum(bytes) > 0 THEN sum(bytes) * 1.0 / sum(execute_ns) END, "
        "max(coalesce(sum(flops * 1e9 / peak_flops), 0), coalesce(sum(bytes * 1e9 / peak_bytes), 0)) "
        "/ sum(execute_ns), count(peak_flops) "
        "FROM op_profile AS o JOIN incarnations USING (incarnation_id) WHERE kind = :kind "
        "GROUP BY op, pass, shape, o.dtype ORDER BY 6 DESC LIMIT :most",
        {"kind": kind, "most": OPS_SHOWN, "steps": max(1, steps)},
    ).fetchall()
    names = (
        *("op", "pass", "shape", "dtype", "calls", "total_ms", "calls_per_step", "step_ms", "wait_ms"),
        *("enqueue_ms", "share", "gflops", "gigabytes_per_s", "of_peak", "peaks"),
    )
    found = [dict(zip(names, row, strict=True)) for row in rows]
    for row in found:
        if not row.pop("peaks") or not sampled or row["pass"] == "copy":
            row["of_peak"] = None  # never measured; or bytes that pass by no memory alone
    return {"rows": found, "sampled": bool(sampled)}


def memory(connection: sqlite3.Connection) -> Answer:
    """Return the most bytes of activations that any rank held, for each bin."""
    bins = Bins(connection)
    rows = connection.execute(
        f"SELECT {bins.expression} AS bin, max(activation_bytes), avg(activation_bytes) FROM {bins.source} "
        "WHERE activation_bytes IS NOT NULL GROUP BY bin ORDER BY bin"
    ).fetchall()
    return _columns(rows, ("step", "most", "mean"))


def curves(connection: sqlite3.Connection) -> Answer:
    """Return all metrics by step, each of at most `POINTS_MAX` points: the last value of each bin."""
    found: Answer = {}
    names = connection.execute("SELECT DISTINCT name FROM metrics ORDER BY name").fetchall()
    for (name,) in names:
        first, last = connection.execute(
            "SELECT min(step), max(step) FROM metrics WHERE name = ?", (name,)
        ).fetchone()
        width = max(1, -(-(last - first + 1) // POINTS_MAX))
        rows = connection.execute(
            "SELECT max(step), value FROM metrics WHERE name = ? AND value IS NOT NULL "
            "GROUP BY (step - ?) / ? ORDER BY step",
            (name, first, width),
        ).fetchall()
        found[name] = _columns(rows, ("step", "value"))
    return found


def user_metrics(connection: sqlite3.Connection) -> Answer:
    """Return the metrics of `zbmd.metrics`, over all ranks.

    They are the sum of a counter, the mean of a gauge's latest values, and of a histogram the mean and the
    number of values.
    """
    rows = connection.execute(
        "SELECT name, labels, kind, rank, value, counts FROM user_metrics WHERE value IS NOT NULL "
        "ORDER BY name, labels, began_ns LIMIT ?",
        (USER_SERIES_MAX,),
    ).fetchall()
    found: dict[tuple[str, str, str], Answer] = {}
    for name, labels, kind, rank, value, counts in rows:
        words = ", ".join(f"{label}={text}" for label, text in json.loads(labels))
        row = found.setdefault((name, words, kind), {"count": 0, "total": 0.0, "latest": {}})
        row["total"] += value
        row["count"] += sum(json.loads(counts)) if counts else 0
        row["latest"][rank] = value
    shown: list[Answer] = []
    for (name, words, kind), row in list(found.items())[:EVENTS_MAX]:
        latest = row["latest"].values()
        value = row["total"]
        if kind == "gauge":
            value = sum(latest) / len(latest)
        elif kind == "histogram":
            value = row["total"] / row["count"] if row["count"] else None
        count = row["count"] if kind == "histogram" else None
        shown.append({**{"name": name, "labels": words, "kind": kind}, "value": value, "count": count})
    return {"rows": shown}


def events(connection: sqlite3.Connection) -> Answer:
    """Return the latest events, oldest first, each with the last step that had begun by then."""
    rows = connection.execute(
        "SELECT at_ns, kind, rank, incarnation, duration_ns / 1e6, text, coalesce(step, (SELECT s.step "
        "FROM step_timing AS s WHERE s.begin_ns <= at_ns ORDER BY s.begin_ns DESC LIMIT 1)) FROM events "
        "ORDER BY at_ns DESC LIMIT ?",
        (EVENTS_MAX,),
    ).fetchall()
    names = ("at_ns", "kind", "rank", "incarnation", "ms", "text", "step")
    return {"rows": [dict(zip(names, row, strict=True)) for row in reversed(rows)]}


def cluster(connection: sqlite3.Connection) -> Answer:
    """Return each rank's latest process: its host, restarts, last step, and whether it runs."""
    rows = connection.execute(
        "SELECT rank, incarnation, host, pid, boot_id, began_ns, processor, dtype, threads, "
        "peak_flops / 1e9, "
        "(SELECT max(step) FROM step_timing AS s WHERE s.incarnation_id = i.incarnation_id), "
        "(SELECT count(*) - 1 FROM incarnations AS a WHERE a.rank = i.rank), "
        "(SELECT text FROM events WHERE kind = 'death' AND events.rank = i.rank ORDER BY at_ns DESC LIMIT 1) "
        "FROM incarnations AS i WHERE incarnation_id = (SELECT max(incarnation_id) FROM incarnations AS l "
        "WHERE l.rank = i.rank) ORDER BY rank"
    ).fetchall()
    names = ("rank", "incarnation", "host", "pid", "boot_id", "began_ns", "processor", "dtype", "threads")
    more = ("gflops_peak", "step", "restarts", "last_death")
    here = boot_id()
    found: list[Answer] = [dict(zip((*names, *more), row, strict=True)) for row in rows]
    for row in found:
        is_here = row.pop("boot_id") == here
        row["state"] = (
            ("runs" if os.path.exists(f"/proc/{row['pid']}") else "ended") if is_here else "elsewhere"
        )
    return {"rows": found}


def timeline(connection: sqlite3.Connection, first: int | None = None, last: int | None = None) -> Answer:
    """Return spans of the steps `first` to `last`, at most `SPANS_MAX`; by default of the last three steps.

    Times are ms from the first of them.
    """
    if first is None or last is None:
        (newest,) = connection.execute("SELECT max(step) FROM gpu_timeline").fetchone()
        last = 0 if newest is None else int(newest)
        first = last - 2
    rows = connection.execute(
        "SELECT rank, track, name, category, step, begin_ns, duration_ns / 1e6, bytes FROM gpu_timeline "
        "WHERE step BETWEEN ? AND ? ORDER BY duration_ns DESC LIMIT ?",
        (first, last, SPANS_MAX + 1),
    ).fetchall()
    origin = min((row[5] for row in rows), default=0)
    found = _columns(
        rows[:SPANS_MAX], ("rank", "track", "name", "category", "step", "begin_ns", "ms", "bytes")
    )
    found["begin_ms"] = [(at - origin) / 1e6 for at in found.pop("begin_ns")]
    (kept_first, kept_last) = connection.execute("SELECT min(step), max(step) FROM gpu_timeline").fetchone()
    return {
        **found,
        "first": first,
        "last": last,
        "kept": [kept_first, kept_last],
        "more": len(rows) > SPANS_MAX,
    }


QUESTIONS: Final[dict[str, Callable[[sqlite3.Connection], Answer]]] = {
    "summary": summary,
    "waterfall": waterfall,
    "utilisation": utilisation,
    "by_rank": by_rank,
    "slowest_ops": slowest_ops,
    "memory": memory,
    "curves": curves,
    "user_metrics": user_metrics,
    "events": events,
    "cluster": cluster,
}
"""By the name in the address; `timeline` has arguments."""
