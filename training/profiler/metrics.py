"""Counters, gauges and histograms of a user's own program: `zbmd.metrics`.

    rows = zbmd.metrics.counter("rows_read", "Rows that the loader has read")
    rows.add(512)

Instruments are updated in memory, and a thread writes all of them to a file of the rank in the run's
directory, at most once a second. The run's database and `/metrics` of the dashboard read that file.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import itertools
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
import structlog

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.training.profiler.announcements import announce_run
from zbmd.training.profiler.lines import PROFILE_DIRECTORY, RANKS_MAX
from zbmd.transport.errors import UserError

NAMES_MAX: Final = 128
SERIES_MAX: Final = 1_024
"""Sets of labels, over all names."""
BUCKETS_MAX: Final = 64
LABELS_MAX: Final = 8
TEXT_MAX: Final = 256
FILE_BYTES_MAX: Final = 4 << 20
FLUSH_S: Final = 1.0
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""The buckets of a histogram that states none."""
TAKEN_LABELS: Final = frozenset({"run", "rank", "le"})
_NAME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,127}")

log: Final = structlog.stdlib.get_logger("zbmd.metrics")

LabelPairs = tuple[tuple[str, str], ...]


class Counter:
    """A sum that only grows, such as rows read. Threads may share it."""

    __slots__ = ("_lock", "_total")

    def __init__(self) -> None:
        self._total = 0.0
        self._lock = threading.Lock()

    def add(self, amount: float = 1.0) -> None:
        """Add `amount`, 0 or more. Raises `UserError`."""
        if not amount >= 0:
            raise UserError(f"a counter grows: expected an amount of 0 or more, got {amount}. Use a gauge.")
        with self._lock:
            self._total += amount


class Gauge:
    """A value that goes up and down, such as the depth of a queue. Threads may share it."""

    __slots__ = ("_lock", "_value")

    def __init__(self) -> None:
        self._value = 0.0
        self._lock = threading.Lock()

    def set(self, value: float) -> None:
        """Set the value."""
        self._value = float(value)

    def add(self, amount: float) -> None:
        """Change the value by `amount`, which may be negative."""
        with self._lock:
            self._value += amount


class Histogram:
    """Values by size, such as seconds that a fetch took. Threads may share it."""

    __slots__ = ("_bounds", "_counts", "_lock", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count a value in its bucket."""
        bucket = bisect.bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._total += value


Instrument = Counter | Gauge | Histogram
InstrumentT = TypeVar("InstrumentT", Counter, Gauge, Histogram)
Name = Annotated[str, msgspec.Meta(pattern=r"\A[a-zA-Z][a-zA-Z0-9_]{0,127}\Z")]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class SeriesLine(msgspec.Struct, frozen=True, array_like=True):
    """One instrument as it is in the file. value: None if it is not finite; of a histogram, the sum.

    counts: of a histogram, one more than `bounds`.
    """

    name: Name
    kind: Literal["counter", "gauge", "histogram"]
    about: Text
    labels: Annotated[tuple[tuple[Name, Text], ...], msgspec.Meta(max_length=LABELS_MAX)]
    value: float | None
    bounds: Annotated[tuple[float, ...], msgspec.Meta(max_length=BUCKETS_MAX)] = ()
    counts: Annotated[tuple[Count, ...], msgspec.Meta(max_length=BUCKETS_MAX + 1)] = ()


class MetricsFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a process. began_ns: when it began to write, since 1970: it tells processes apart."""

    rank: Annotated[int, msgspec.Meta(ge=0, le=RANKS_MAX)]
    incarnation: Count
    began_ns: Count
    at_ns: Count
    series: Annotated[tuple[SeriesLine, ...], msgspec.Meta(max_length=SERIES_MAX)]


_DECODER: Final = msgspec.json.Decoder(MetricsFile)


def decode_metrics(data: bytes) -> MetricsFile:
    """Read a file of a rank. Raises ValueError or RecursionError for one that is damaged."""
    return _DECODER.decode(data[: FILE_BYTES_MAX + 1])


def metrics_path(directory: Path, rank: int, incarnation: int) -> Path:
    """Return the file of a process of the run in `directory`."""
    return directory / PROFILE_DIRECTORY / f"rank{rank}-{incarnation}.metrics.json"


class Registry:
    """All instruments of a process, and the thread that writes them."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[type[Instrument], str, tuple[float, ...]]] = {}
        self._series: dict[tuple[str, LabelPairs], Instrument] = {}
        self._dropped = False
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._who = (0, 1, 0)
        self._thread: threading.Thread | None = None
        self._written = b""
        self._stopped = threading.Event()

    def get(
        self,
        made: InstrumentT,
        name: str,
        about: str,
        labels: Mapping[str, object] | None,
        bounds: tuple[float, ...],
    ) -> InstrumentT:
        """Return the instrument of that name and labels: `made`, unless there is one. Raises `UserError`."""
        key = name, _checked(name, about, labels)
        with self._lock:
            kind = type(made), about, bounds
            known = self._kinds.get(name)
            if known is not None and (known[0], known[2]) != (kind[0], bounds):
                raise UserError(
                    f"metric {name}: it is a {known[0].__name__.lower()} already. Give each name one kind, "
                    "and a histogram the same buckets."
                )
            found = self._series.get(key)
            if found is None and len(self._series) < SERIES_MAX and (known or len(self._kinds) < NAMES_MAX):
                self._kinds.setdefault(name, kind)
                found = self._series[key] = made
                self._start()
            elif found is None and not self._dropped:
                self._dropped = True
                log.warning(
                    "too many metrics: new ones are not recorded", names_max=NAMES_MAX, series_max=SERIES_MAX
                )
            return made if found is None else found  # type: ignore[return-value]

    def record_to(self, directory: Path, rank: int, incarnation: int) -> None:
        """Write into the run in `directory` from now on."""
        with self._lock:
            self._path = metrics_path(directory, rank, incarnation)
            self._who = rank, incarnation, time.time_ns()
            self._written = b""
            self._start()

    def _start(self) -> None:
        """Have the thread run, once there is what to write and where to."""
        if self._thread is None and self._path is not None and self._series:
            self._stopped = threading.Event()
            self._thread = threading.Thread(
                target=self._write_on, args=(self._stopped,), name="zbmd-metrics", daemon=True
            )
            self._thread.start()

    def _write_on(self, stopped: threading.Event) -> None:
        while not stopped.wait(FLUSH_S):
            self.flush()

    def stop(self) -> None:
        """Write what has changed, and write no more until `record_to`. Idempotent."""
        self.flush()
        with self._lock:
            thread, self._thread, self._path = self._thread, None, None
            self._stopped.set()
        if thread is not None:
            thread.join()

    def flush(self) -> None:
        """Write what has changed. Raises nothing: a run goes on without it."""
        with self._lock:
            path, (rank, incarnation, began_ns) = self._path, self._who
            if path is None or not self._series:
                return
            series = tuple(
                _line(name, self._kinds[name][1], labels, one) for (name, labels), one in self._series.items()
            )
            written = msgspec.json.encode(series)
            if written == self._written:
                return
            content = MetricsFile(
                rank=rank, incarnation=incarnation, began_ns=began_ns, at_ns=time.time_ns(), series=series
            )
            beside = path.with_name(f"{path.name}.tmp")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                beside.write_bytes(msgspec.json.encode(content))
                os.replace(beside, path)  # not synced to disk: it is written again in a second
            except OSError as error:
                self._path = None
                log.warning("metrics are not recorded any more", path=str(path), error=error.strerror)
                return
            self._written = written

    def forget_writer(self) -> None:
        """Be the registry of a fork, which is no rank: it counts, and writes nothing."""
        self._lock = threading.Lock()
        self._path = self._thread = None
        for one in self._series.values():
            one._lock = threading.Lock()  # another thread may have held it


def _line(name: str, about: str, labels: LabelPairs, one: Instrument) -> SeriesLine:
    match one:
        case Counter():
            return SeriesLine(name, "counter", about, labels, one._total)
        case Gauge():
            return SeriesLine(name, "gauge", about, labels, one._value)
        case Histogram():
            with one._lock:
                counts, total = tuple(one._counts), one._total
            return SeriesLine(name, "histogram", about, labels, total, one._bounds, counts)


def _checked(name: str, about: str, labels: Mapping[str, object] | None) -> LabelPairs:
    pairs = tuple(sorted((label, str(value)) for label, value in (labels or {}).items()))
    if not _NAME.fullmatch(name):
        raise UserError(f"metric {name[:160]!r}: expected a letter and then up to 127 letters, digits or _")
    if len(about) > TEXT_MAX or len(pairs) > LABELS_MAX:
        raise UserError(f"metric {name}: expected at most {TEXT_MAX} characters and {LABELS_MAX} labels")
    for label, value in pairs:
        if not _NAME.fullmatch(label) or label in TAKEN_LABELS:
            raise UserError(
                f"metric {name}: label {label[:160]!r}: expected letters, digits or _, and not one of "
                f"{', '.join(sorted(TAKEN_LABELS))}"
            )
        if len(value) > TEXT_MAX:
            raise UserError(f"metric {name}: label {label}: expected at most {TEXT_MAX} characters")
    return pairs


_registry: Final = Registry()
os.register_at_fork(after_in_child=_registry.forget_writer)
atexit.register(_registry.flush)


def counter(name: str, about: str = "", *, labels: Mapping[str, object] | None = None) -> Counter:
    """Return the counter of that name and labels; the same one for the same arguments.

    A process has at most 128 names and 1,024 sets of labels; an instrument beyond them is not recorded.
    Raises `UserError` for a name or labels that Prometheus would refuse, or a name of another kind.
    """
    return _registry.get(Counter(), name, about, labels, ())


def gauge(name: str, about: str = "", *, labels: Mapping[str, object] | None = None) -> Gauge:
    """Return the gauge of that name and labels. Bounds and errors are those of `counter`."""
    return _registry.get(Gauge(), name, about, labels, ())


def histogram(
    name: str,
    about: str = "",
    *,
    buckets: Sequence[float] = SECONDS,
    labels: Mapping[str, object] | None = None,
) -> Histogram:
    """Return the histogram of that name and labels. Bounds and errors are those of `counter`.

    buckets: upper bounds, 1 to 64 in order; those of one more bucket are above all. By default for seconds.
    """
    bounds = tuple(float(bound) for bound in buckets)
    grow = all(a < b for a, b in itertools.pairwise(bounds)) and all(map(math.isfinite, bounds))
    if not 0 < len(bounds) <= BUCKETS_MAX or not grow:
        raise UserError(f"metric {name}: expected 1 to {BUCKETS_MAX} growing bounds, got {bounds[:8]}")
    return _registry.get(Histogram(bounds), name, about, labels, bounds)


def record_to(directory: str | os.PathLike[str]) -> None:
    """Record this process's metrics in the run in `directory`, as this rank of the job.

    `zbmd train`, and every job with a profile, calls it; a loop of PyTorch or a plain rank calls it once. A
    process without a launcher is rank RANK, or 0.
    """
    launched = RankEnvironment.read(os.environ)
    if launched is not None:
        rank, incarnation = launched.rank, launched.incarnation
    else:
        text = os.environ.get("RANK", "0")
        rank, incarnation = (int(text) if text.isdecimal() and int(text) <= RANKS_MAX else 0), 1
    path = Path(directory).absolute()
    with contextlib.suppress(OSError):
        path.mkdir(parents=True, exist_ok=True)
    announce_run(path)
    _registry.record_to(path, rank, incarnation)


def stop() -> None:
    """Write what has changed, and record nothing from now on: the run is over."""
    _registry.stop()


def flush() -> None:
    """Write what has changed now; a thread does so every second, and the end of the process."""
    _registry.flush()
