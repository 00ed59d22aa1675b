"""The metrics of a run as numbers with labels, from its database: for Prometheus and for OpenTelemetry.

Counters and histograms are kept in memory and grow by the rows that are new, so they never go down while the
database adds up old steps. Labels are bounded: run, rank, phase, cause, and the names of a run's metrics.
"""

from __future__ import annotations

import importlib
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zbmd.tools.runs.snapshots import newest_in_memory
from zbmd.tools.telemetry.schema import PHASE_COLUMNS, PHASES
from zbmd.training.checkpoint.index import SHARDS_NAME
from zbmd.transport.errors import UserError

SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds of the buckets of a histogram of seconds; one more takes the rest."""
RANKS_MAX: Final = 1_024
NAMES_MAX: Final = 256
USER_SERIES_MAX: Final = 65_536
"""Of `zbmd.metrics`, over all ranks and processes."""
BATCH_ROWS: Final = 50_000
AGAIN_STEPS: Final = 64
"""A rank repeats at most so many steps after a loss."""
UNKNOWN: Final = "unknown"
WAITS: Final = ("comm", "bubble", "idle")
"""Phases in which a rank waits for others."""

Labels = tuple[tuple[str, str], ...]
Integers = npt.NDArray[np.int64]


class Kind(Enum):
    """The meaning of a metric's values."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Counts:
    """A histogram. counts: of values up to each bound and above the one before it, and of those above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric. name: without the suffix of a counter. samples: a value for each set of labels."""

    name: str
    kind: Kind
    about: str
    samples: tuple[tuple[Labels, float | Counts], ...]


@dataclass(slots=True)
class _Histogram:
    counts: Integers = field(default_factory=lambda: np.zeros(len(SECONDS) + 1, np.int64))
    total: float = 0.0

    def add(self, ns: Integers, weights: Integers | None = None) -> None:
        """Add values in ns. weights: how often each."""
        buckets = np.searchsorted(np.asarray(SECONDS) * 1e9, ns)
        found = np.bincount(buckets, weights, minlength=len(self.counts))
        self.counts += found.astype(np.int64)
        self.total += float((ns if weights is None else ns * weights).sum()) / 1e9

    def frozen(self) -> Counts:
        """Return what has been added up."""
        return Counts(SECONDS, tuple(self.counts.tolist()), self.total)


@dataclass(slots=True)
class _Rank:
    steps: int = 0
    flops: int = 0
    hardware_flops: int = 0
    step_s: _Histogram = field(default_factory=_Histogram)
    phase_ns: Integers = field(default_factory=lambda: np.zeros(len(PHASES), np.int64))


class RunMeasures:
    """The metrics of one run. name: the label `run`; not for two threads."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self._directory = name, directory
        self._ranks: dict[int, _Rank] = {}
        self._phases = {phase: _Histogram() for phase in PHASES}
        self._read_to: dict[int, tuple[int, int]] = {}
        self._began = False

    def collect(
        self, connection: sqlite3.Connection, causes: Mapping[tuple[int, int], str] | None = None
    ) -> list[Measure]:
        """Return all metrics, with the rows that are new in the database.

        causes: of deaths, by rank and incarnation, as far as they are known.
        """
        self._take_steps(connection)
        return [
            *self._of_steps(connection),
            *self._of_events(connection, causes or {}),
            *self._of_metrics(connection),
            *self._of_users(connection),
            *self._of_files(),
            *self._of_snapshots(),
        ]

    # ---- steps

    def _take_steps(self, connection: sqlite3.Connection) -> None:
        columns = ", ".join(("wall_ns", "flops", "hardware_flops", *PHASE_COLUMNS))
        if not self._began:
            self._began = True
            history = connection.execute(
                f"SELECT rank, steps, {columns} FROM step_history WHERE rank < ?", (RANKS_MAX,)
            )
            self._take_batches(history, summed=True)
        known = connection.execute(
            "SELECT incarnation_id FROM incarnations WHERE rank < ?", (RANKS_MAX,)
        ).fetchall()
        for (number,) in known:
            step, begin_ns = self._read_to.get(number, (0, -1))
            where = "incarnation_id = ? AND step >= ? AND begin_ns > ?"
            given = (number, step - AGAIN_STEPS, begin_ns)
            last = connection.execute(
                f"SELECT max(step), max(begin_ns) FROM step_timing WHERE {where}", given
            ).fetchone()
            if last[0] is None:
                continue
            rows = connection.execute(f"SELECT rank, 1, {columns} FROM step_timing WHERE {where}", given)
            self._take_batches(rows, summed=False)
            self._read_to[number] = last

    def _take_batches(self, cursor: sqlite3.Cursor, *, summed: bool) -> None:
        while rows := cursor.fetchmany(BATCH_ROWS):
            table = np.asarray(rows, np.int64)
            steps = table[:, 1]
            each = steps if summed else None  # of summed rows, the mean of their steps counts so often
            for number in np.unique(table[:, 0]).tolist():
                mine = table[:, 0] == number
                rank = self._ranks.setdefault(number, _Rank())
                own = table[mine]
                rank.steps += int(own[:, 1].sum())
                rank.flops += int(own[:, 3].sum())
                rank.hardware_flops += int(own[:, 4].sum())
                rank.phase_ns += own[:, 5:].sum(axis=0)
                rank.step_s.add(own[:, 2] // own[:, 1], own[:, 1] if summed else None)
            for n, phase in enumerate(PHASES):
                self._phases[phase].add(table[:, 5 + n] // steps, each)

    def _of_steps(self, connection: sqlite3.Connection) -> Iterable[Measure]:
        ranks = sorted(self._ranks.items())
        by_rank = [(self._labels(rank=number), rank) for number, rank in ranks]
        yield self._measure(
            "steps", Kind.COUNTER, "Steps that ended, also those that were repeated after a loss",
            [(labels, rank.steps) for labels, rank in by_rank],
        )  # fmt: skip
        yield self._measure(
            "step_seconds", Kind.HISTOGRAM, "Duration of a step",
            [(labels, rank.step_s.frozen()) for labels, rank in by_rank],
        )  # fmt: skip
        yield self._measure(
            "step_phase_seconds", Kind.HISTOGRAM, "Part of a step, by phase, over all ranks",
            [(self._labels(phase=phase), found.frozen()) for phase, found in self._phases.items()],
        )  # fmt: skip
        yield self._measure(
            "rank_phase_seconds", Kind.COUNTER, "Time of a rank by phase",
            [
                (self._labels(rank=number, phase=phase), ns / 1e9)
                for number, rank in ranks
                for phase, ns in zip(PHASES, rank.phase_ns.tolist(), strict=True)
                if ns
            ],
        )  # fmt: skip
        yield self._measure(
            "flops", Kind.COUNTER, "FLOPs that the passes of the model need",
            [(labels, rank.flops) for labels, rank in by_rank],
        )  # fmt: skip
        yield self._measure(
            "hardware_flops", Kind.COUNTER, "FLOPs that were computed, recomputation included",
            [(labels, rank.hardware_flops) for labels, rank in by_rank],
        )  # fmt: skip
        latest = connection.execute(
            "SELECT i.rank, peak_flops, step, flops * 1e9 / (wall_ns * peak_flops) FROM incarnations AS i "
            "LEFT JOIN step_timing AS s ON s.incarnation_id = i.incarnation_id AND s.step = "
            "(SELECT max(step) FROM step_timing AS t WHERE t.incarnation_id = i.incarnation_id) "
            "WHERE i.rank < ? ORDER BY i.incarnation_id, begin_ns",
            (RANKS_MAX,),
        ).fetchall()
        newest = {row[0]: row for row in latest}
        for column, name, about in (
            (1, "peak_flops", "FLOPs a second of a rank's share of its machine's peak"),
            (2, "step", "Step that ended last"),
            (3, "mfu_ratio", "Model FLOPs utilisation of the step that ended last"),
        ):
            found = [(self._labels(rank=rank), row[column]) for rank, row in sorted(newest.items())]
            yield self._measure(name, Kind.GAUGE, about, [each for each in found if each[1] is not None])

    # ---- what else there is

    def _of_events(
        self, connection: sqlite3.Connection, causes: Mapping[tuple[int, int], str]
    ) -> Iterable[Measure]:
        died = connection.execute("SELECT rank, incarnation FROM events WHERE kind = 'death'").fetchall()
        by_cause = {UNKNOWN: 0}
        for key in {tuple(row) for row in died} | set(causes):
            cause = causes.get(key, UNKNOWN)
            by_cause[cause] = by_cause.get(cause, 0) + 1
        yield self._measure(
            "deaths", Kind.COUNTER, "Ranks that were lost, by cause, as far as their launcher told it",
            [(self._labels(cause=cause), count) for cause, count in sorted(by_cause.items())],
        )  # fmt: skip
        took = connection.execute("SELECT duration_ns FROM events WHERE kind = 'recovered'").fetchall()
        recovery = _Histogram()
        recovery.add(np.asarray([row[0] for row in took], np.int64))
        yield self._measure(
            "recovery_seconds", Kind.HISTOGRAM, "From the moment a rank gave a step up to its next one",
            [(self._labels(), recovery.frozen())],
        )  # fmt: skip
        (cut,) = connection.execute("SELECT count(*) FROM events WHERE kind = 'cut'").fetchone()
        yield self._measure("cut_steps", Kind.COUNTER, "Steps that ranks gave up", [(self._labels(), cut)])
        restarts = connection.execute(
            "SELECT rank, count(*) - 1 FROM incarnations WHERE rank < ? GROUP BY rank ORDER BY rank",
            (RANKS_MAX,),
        ).fetchall()
        yield self._measure(
            "restarts", Kind.COUNTER, "Processes that took the place of a lost one",
            [(self._labels(rank=rank), count) for rank, count in restarts],
        )  # fmt: skip

    def _of_metrics(self, connection: sqlite3.Connection) -> Iterable[Measure]:
        found = connection.execute(
            "SELECT name, value FROM metrics AS m WHERE step = (SELECT max(step) FROM metrics AS l "
            "WHERE l.name = m.name AND l.value IS NOT NULL) ORDER BY name LIMIT ?",
            (NAMES_MAX,),
        ).fetchall()
        yield self._measure(
            "run_metric", Kind.GAUGE, "Latest value of what the run notes by step: loss, tokens_per_s, …",
            [(self._labels(name=name), value) for name, value in found],
        )  # fmt: skip
        tokens = [(self._labels(), value) for name, value in found if name == "tokens"]
        yield self._measure("tokens", Kind.COUNTER, "Tokens that the state was trained on", tokens)

    def _of_users(self, connection: sqlite3.Connection) -> Iterable[Measure]:
        """The metrics of `zbmd.metrics`: of all processes that were a rank, a gauge of the latest."""
        rows = connection.execute(
            "SELECT name, kind, about, rank, labels, value, bounds, counts FROM user_metrics "
            "WHERE rank < ? AND value IS NOT NULL AND (kind != 'histogram' OR counts IS NOT NULL) "
            "ORDER BY began_ns, name LIMIT ?",
            (RANKS_MAX, USER_SERIES_MAX),
        ).fetchall()
        found: dict[tuple[str, Kind], tuple[str, dict[Labels, float | Counts]]] = {}
        for name, kind_name, about, rank, labels, value, bounds, counts in rows:
            kind = Kind(kind_name)
            pairs = tuple((label, text) for label, text in json.loads(labels))
            key: Labels = (*self._labels(rank=rank), *pairs)
            _, samples = found.setdefault((name, kind), (about, {}))
            known = samples.get(key)
            now: float | Counts = value
            if kind is Kind.HISTOGRAM:
                now = Counts(tuple(json.loads(bounds)), tuple(json.loads(counts)), value)
            samples[key] = now if kind is Kind.GAUGE or known is None else _sum(known, now)
        for (name, kind), (about, samples) in sorted(found.items(), key=lambda one: one[0][0]):
            yield self._measure(f"user_{name}", kind, about or name, list(samples.items()))

    def _of_snapshots(self) -> Iterable[Measure]:
        """The newest state of each rank in the memory of snapshot processes of this host."""
        try:
            found = sorted(newest_in_memory(self._directory).items())
        except (
            UserError,
            OSError,
        ):  # of another zbmd, or a log that cannot be read: `zbmd snapshots` says it
            return
        ranks = [(self._labels(rank=rank), held) for rank, held in found if rank < RANKS_MAX]
        about = "Newest version of a rank's state that a snapshot process has"
        yield self._measure("snapshot_version", Kind.GAUGE, about, [(key, held[0]) for key, held in ranks])
        ages = [(key, held[1]) for key, held in ranks if held[1] is not None]
        yield self._measure("snapshot_age_seconds", Kind.GAUGE, "Since that version was committed", ages)

    def _of_files(self) -> Iterable[Measure]:
        """When the newest checkpoint that is named in the run's directory was completed."""
        try:
            at_s = (self._directory / SHARDS_NAME).stat().st_mtime
        except OSError:
            return
        about = "When the newest checkpoint was completed, since 1970"
        yield self._measure("checkpoint_timestamp_seconds", Kind.GAUGE, about, [(self._labels(), at_s)])

    def _labels(self, **more: object) -> Labels:
        return ("run", self.name), *((name, str(value)) for name, value in more.items())

    @staticmethod
    def _measure(
        name: str, kind: Kind, about: str, samples: Sequence[tuple[Labels, float | Counts]]
    ) -> Measure:
        return Measure(f"zbmd_{name}", kind, about, tuple(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPhases:
    """The time of a rank's latest steps: ms a step, in all and by phase. slowness: see `compared`."""

    run: str
    rank: int
    step: int
    window: int
    step_ms: float
    ms: Mapping[str, float]
    slowness: float = 1.0
    is_slow: bool = False

    @property
    def own_ms(self) -> float:
        """Return the time in which the rank waits for no other."""
        return self.step_ms - sum(self.ms.get(phase, 0.0) for phase in WAITS)

    def compared(self, middle_ms: float, slow: float) -> RankPhases:
        """Return it with its own time as a multiple of `middle_ms`; from `slow` on it is a straggler."""
        slowness = self.own_ms / middle_ms if middle_ms > 0 else 1.0
        return replace(self, slowness=slowness, is_slow=slowness >= slow)


def latest_phases(connection: sqlite3.Connection, run: str, *, window: int) -> list[RankPhases]:
    """Return the time of each rank over the last `window` steps of the run."""
    sums = ", ".join(f"sum({column}) / 1e6 / count(*)" for column in PHASE_COLUMNS)
    rows = connection.execute(
        f"SELECT rank, max(step), sum(wall_ns) / 1e6 / count(*), {sums} FROM step_timing "
        "WHERE step > (SELECT max(step) FROM step_timing) - ? AND rank < ? GROUP BY rank ORDER BY rank",
        (window, RANKS_MAX),
    ).fetchall()
    return [
        RankPhases(
            run=run,
            rank=rank,
            step=step,
            window=window,
            step_ms=step_ms,
            ms=dict(zip(PHASES, phases, strict=True)),
        )
        for rank, step, step_ms, *phases in rows
    ]


def _sum(one: float | Counts, other: float | Counts) -> float | Counts:
    """Return the sum of a counter or histogram over two processes; buckets that differ: of the later one."""
    if isinstance(one, Counts) and isinstance(other, Counts):
        if one.bounds != other.bounds:
            return other
        counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
        return Counts(one.bounds, counts, one.total + other.total)
    if isinstance(one, Counts) or isinstance(other, Counts):
        return other
    return one + other


def merged(measures: Iterable[Measure]) -> list[Measure]:
    """Return metrics with the samples of all that have the same name, such as those of several runs."""
    found: dict[str, Measure] = {}
    for one in measures:
        known = found.get(one.name)
        if known is not None and known.kind is not one.kind:
            continue  # counters of a user whose kinds differ from rank to rank
        samples = one.samples if known is None else (*known.samples, *one.samples)
        found[one.name] = Measure(one.name, one.kind, one.about, samples)
    return list(found.values())


# ---- Prometheus


def prometheus_library() -> Any:
    """Return the client library. Raises `UserError` without it."""
    try:
        return importlib.import_module("prometheus_client")
    except ImportError as error:
        raise UserError('/metrics needs prometheus_client: pip install "zbmd[telemetry]".') from error


def exposition(measures: Iterable[Measure]) -> tuple[bytes, str]:
    """Return what Prometheus scrapes, in its text format, and the content type. Raises `UserError`."""
    library = prometheus_library()
    core = importlib.import_module("prometheus_client.core")
    families: list[Any] = []
    for one in merged(measures):
        family: Any
        match one.kind:
            case Kind.COUNTER:
                family = core.CounterMetricFamily(one.name, one.about)
            case Kind.GAUGE:
                family = core.GaugeMetricFamily(one.name, one.about)
            case Kind.HISTOGRAM:
                family = core.HistogramMetricFamily(one.name, one.about)
        for labels, value in one.samples:
            _add_sample(family, one, dict(labels), value)
        families.append(family)

    class Collected:
        def collect(self) -> list[Any]:
            return families

    registry = library.CollectorRegistry()
    registry.register(Collected())
    return library.generate_latest(registry), library.CONTENT_TYPE_LATEST


def _add_sample(family: Any, one: Measure, labels: dict[str, str], value: float | Counts) -> None:
    if not isinstance(value, Counts):
        family.add_sample(f"{one.name}_total" if one.kind is Kind.COUNTER else one.name, labels, value)
        return
    below = 0
    for bound, count in zip((*value.bounds, float("inf")), value.counts, strict=True):
        below += count
        text = "+Inf" if bound == float("inf") else repr(bound)
        family.add_sample(f"{one.name}_bucket", {**labels, "le": text}, below)
    family.add_sample(f"{one.name}_count", labels, below)
    family.add_sample(f"{one.name}_sum", labels, value.total)
