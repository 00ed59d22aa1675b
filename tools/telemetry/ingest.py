"""Fill a run's database from the files that its ranks write.

Ranks append to files of their own (`zbmd.training.profiler`, `metrics.jsonl`), which are bounded and cost
a step some microseconds: they wait for nobody. A query, an export or a page brings the database up to date
first, by what has been added since. One writer at a time; others wait for it.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from zbmd.tools.runs.launches import (
    HangFound,
    Launch,
    LaunchEnded,
    RankEnded,
    launch_files,
    read_launch,
)
from zbmd.tools.telemetry.schema import CHUNK_STEPS, PHASES, SUMMED_COLUMNS, open_database
from zbmd.tools.telemetry.tail import Lines, Position, new_lines
from zbmd.training.autograd._spans import CATEGORIES, TRACK_OP, TRACK_STEP
from zbmd.training.job.records import METRICS_NAME
from zbmd.training.profiler.lines import (
    LINE_BYTES_MAX,
    LINE_DECODER,
    PROFILE_DIRECTORY,
    VERSION,
    CutLine,
    OpsLine,
    RunLine,
    StepLine,
    StragglerLine,
    old_path,
)
from zbmd.training.profiler.metrics import FILE_BYTES_MAX as METRICS_BYTES_MAX
from zbmd.training.profiler.metrics import SeriesLine, decode_metrics
from zbmd.training.profiler.ring import Spans, read_ring
from zbmd.transport.errors import UserError

STEP_ROWS_MAX: Final = 2_000_000
"""Rows of `step_timing`; the oldest are added up in `step_history` then, a quarter at a time."""
TIMELINE_ROWS_MAX: Final = 2_000_000
OP_ROWS_MAX: Final = 2_000_000
Row = tuple[Any, ...]

_STEP_COLUMNS: Final = ("incarnation_id", "step", "begin_ns", "rank", *SUMMED_COLUMNS, "activation_bytes")


def insert(table: str, columns: Iterable[str], *, or_else: str = "IGNORE") -> str:
    """Return the statement that adds a row. or_else: what becomes of one that is there already."""
    names = list(columns)
    return f"INSERT OR {or_else} INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


_CHUNK_COLUMNS: Final = ", ".join(
    ("incarnation_id", "first_step", "rank", "steps", "begin_ns", "wall_ns_max", *SUMMED_COLUMNS)
)
_ADD_CHUNK: Final = (
    ", ".join(f"{name} = {name} + excluded.{name}" for name in ("steps", *SUMMED_COLUMNS))
    + ", wall_ns_max = max(wall_ns_max, excluded.wall_ns_max)"
)
_ADD_STEP: Final = insert("step_timing", _STEP_COLUMNS)
_ADD_EVENT: Final = insert(
    "events", ("identity", "at_ns", "kind", "rank", "incarnation", "step", "duration_ns", "text")
)

_ADD_OP: Final = insert(
    "op_profile",
    (
        *("incarnation_id", "step", "rank", "kind", "op", "pass", "shape", "dtype"),
        *("calls", "execute_ns", "wait_ns", "bytes", "flops", "enqueue_ns"),
    ),
    or_else="REPLACE",
)

_PUT_EVENT: Final = insert(
    "events",
    ("identity", "at_ns", "kind", "rank", "incarnation", "step", "duration_ns", "text"),
    or_else="REPLACE",  # a launcher knows why a rank died, its peers only when
)

_PUT_USER_METRIC: Final = insert(
    "user_metrics",
    (
        *("rank", "incarnation", "began_ns", "name", "labels", "kind", "about", "value"),
        "bounds",
        "counts",
        "at_ns",
    ),
    or_else="REPLACE",
)


@dataclass(slots=True)
class _Incarnation:
    """The process whose lines are being read."""

    number: int
    rank: int
    incarnation: int
    shift_ns: int
    cut_ns: int | None = None
    """When its step was cut, if no step has followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """The rows that an update has added.

    damaged: lines that are no lines of a profile, or contradict themselves.
    """

    steps: int = 0
    damaged: int = 0
    files_lost: int = 0


class RunDatabase:
    """The database of the run in `directory`. Not for two threads.

    Raises `UserError` if it cannot be opened.
    """

    def __init__(
        self,
        directory: Path,
        *,
        step_rows_max: int = STEP_ROWS_MAX,
        timeline_rows_max: int = TIMELINE_ROWS_MAX,
    ) -> None:
        if not directory.is_dir():
            raise UserError(f"{directory} is not the directory of a run.")
        self.directory = directory
        self.connection = open_database(directory)
        self._step_rows_max, self._timeline_rows_max = step_rows_max, timeline_rows_max

    def __enter__(self) -> RunDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def update(self, *, spans: bool = False) -> Added:
        """Read what is new. spans: those as well, of which each rank keeps the latest; slower.

        Raises `UserError` if there is nothing to read, or a file cannot be.
        """
        paths = sorted((self.directory / PROFILE_DIRECTORY).glob("rank*.jsonl"))
        metrics = self.directory / METRICS_NAME
        of_users = sorted((self.directory / PROFILE_DIRECTORY).glob("rank*.metrics.json"))
        launches = launch_files(self.directory)
        if not paths and not of_users and not metrics.exists() and not launches:
            raise UserError(
                f"{self.directory} holds neither a profile nor {METRICS_NAME}: it is not the directory of a "
                "run, or the run had ZBMD_PROFILE=off."
            )
        added = Added()
        try:
            for path in paths:
                for lines, source in self._new_lines(path, old_path(path)):
                    with self._transaction():
                        added = self._take_profile(path, lines, source, added)
            for lines, _ in self._new_lines(metrics, None):
                with self._transaction():
                    self._take_metrics(metrics, lines)
            for path in of_users:
                self._take_user_metrics(path)
            for path in launches:
                self._take_launch(path)
            if spans:
                for path in sorted((self.directory / PROFILE_DIRECTORY).glob("rank*.spans")):
                    self._take_spans(path)
            self._roll_up()
        except OSError as error:
            raise UserError(f"cannot read {self.directory}: {error.strerror}.") from error
        except sqlite3.OperationalError as error:
            raise UserError(f"cannot write the database in {self.directory}: {error}.") from error
        return added

    # ---- files of lines

    def _new_lines(self, path: Path, old: Path | None) -> Iterator[tuple[Lines, Row]]:
        source = self._source(path)
        position = Position(*source[:3])
        for lines in new_lines(path, old, position, line_bytes_max=LINE_BYTES_MAX):
            source = self._source(path)  # what the lines before have left
            yield lines, source

    def _source(self, path: Path) -> Row:
        found = self.connection.execute(
            "SELECT inode, read_bytes, mark, incarnation_id, cut_ns FROM sources WHERE path = ?", (path.name,)
        ).fetchone()
        return found or (0, 0, b"", None, None)

    def _read_to(self, path: Path, lines: Lines, here: _Incarnation | None, damaged: int) -> None:
        self.connection.execute(
            "INSERT INTO sources VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (path) DO UPDATE SET "
            "inode = excluded.inode, read_bytes = excluded.read_bytes, mark = excluded.mark, "
            "incarnation_id = excluded.incarnation_id, cut_ns = excluded.cut_ns, "
            "damaged_lines = damaged_lines + excluded.damaged_lines, "
            "files_lost = files_lost + excluded.files_lost",
            (
                path.name,
                lines.position.inode,
                lines.position.read_bytes,
                lines.position.mark,
                None if here is None else here.number,
                None if here is None else here.cut_ns,
                damaged,
                lines.files_lost,
            ),
        )

    def _take_profile(self, path: Path, lines: Lines, source: Row, added: Added) -> Added:
        here, damaged = self._incarnation(source), 0
        steps: list[Row] = []
        for data in lines.lines:
            try:
                line = LINE_DECODER.decode(data)
            except (ValueError, RecursionError):
                damaged += 1
                continue
            match line:
                case RunLine():
                    here = self._begin(line, path)
                case StepLine() if here is not None and sum(line.ns.values()) == line.wall_ns:
                    steps.append(_step_row(here, line))
                    self._recovered(here, line)
                case CutLine() if here is not None:
                    self._cut(here, line)
                case OpsLine() if here is not None:
                    key = (here.number, line.step, here.rank, "op")
                    rows = [(*key, *msgspec.structs.astuple(one)) for one in line.ops]
                    self.connection.executemany(_ADD_OP, rows)
                case StragglerLine() if here is not None:
                    kind, slow = (
                        "straggler_over" if line.over else "straggler",
                        _Incarnation(0, line.slow, 0, 0),
                    )
                    identity, at_ns = (
                        f"{kind} {line.slow} {line.cause} {line.step}",
                        line.at_ns + here.shift_ns,
                    )
                    self._event(identity, at_ns, kind, slow, step=line.step, text=line.text)
                case _:
                    damaged += 1
        self.connection.executemany(_ADD_STEP, steps)
        if lines.files_lost and here is not None:
            text = f"lines of rank {here.rank} may be missing: its file was removed before it was read again"
            self._event(f"lost {path.name} {lines.position}", 0, "lost_lines", here, text=text)
        self._read_to(path, lines, here, damaged)
        return Added(
            steps=added.steps + len(steps),
            damaged=added.damaged + damaged,
            files_lost=added.files_lost + lines.files_lost,
        )

    def _incarnation(self, source: Row) -> _Incarnation | None:
        number, cut_ns = source[3:]
        if number is None:
            return None
        row = self.connection.execute(
            "SELECT rank, incarnation, clock_shift_ns FROM incarnations WHERE incarnation_id = ?", (number,)
        ).fetchone()
        return None if row is None else _Incarnation(number, row[0], row[1], row[2], cut_ns)

    def _begin(self, line: RunLine, path: Path) -> _Incarnation:
        """Begin the lines of a process; they may begin again in another file. Raises `UserError`."""
        if line.version != VERSION:
            raise UserError(f"{path} has format {line.version}; this version reads format {VERSION}.")
        shift_ns = line.unix_ns - line.monotonic_ns
        began_ns = (line.process_ns or line.monotonic_ns) + shift_ns
        machine = line.machine
        run = self.connection.execute("SELECT run FROM runs").fetchone()
        if run is None:
            values = (1, str(self.directory.absolute()), line.world_size, began_ns)
            self.connection.execute("INSERT INTO runs VALUES (?, ?, ?, ?)", values)
        key = (line.rank, line.incarnation, line.pid, began_ns)
        of_machine = (machine.processor, machine.dtype, machine.threads)
        self.connection.execute(
            "INSERT OR IGNORE INTO incarnations (rank, incarnation, pid, began_ns, host, boot_id, "
            "clock_shift_ns, processor, dtype, threads, peak_flops, peak_bytes) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*key, line.host, line.boot_id, shift_ns, *of_machine, line.peak, line.stream),
        )
        (number,) = self.connection.execute(
            "SELECT incarnation_id FROM incarnations "
            "WHERE rank = ? AND incarnation = ? AND pid = ? AND began_ns = ?",
            key,
        ).fetchone()
        here = _Incarnation(number, line.rank, line.incarnation, shift_ns)
        text = f"rank {line.rank} began on {line.host}, process {line.pid}"
        self._event(f"start {number}", began_ns, "start", here, text=text)
        return here

    # ---- events

    def _event(
        self,
        identity: str,
        at_ns: int,
        kind: str,
        here: _Incarnation,
        *,
        text: str,
        step: int | None = None,
        duration_ns: int | None = None,
    ) -> None:
        values = (identity, at_ns, kind, here.rank, here.incarnation, step, duration_ns, text)
        self.connection.execute(_ADD_EVENT, values)

    def _cut(self, here: _Incarnation, line: CutLine) -> None:
        at_ns = line.at_ns + here.shift_ns
        here.cut_ns = at_ns
        lost = ", ".join(f"rank {death.rank}" for death in line.deaths) or "another rank"
        text = f"rank {here.rank} gave a step up: {lost} was lost"
        self._event(f"cut {here.number} {line.at_ns}", at_ns, "cut", here, text=text)
        for death in line.deaths:
            died = _Incarnation(0, death.rank, death.incarnation, 0)
            text = f"rank {death.rank} died, as rank {here.rank} noticed"
            identity = f"death {death.rank}#{death.incarnation}"
            self._event(identity, death.at_ns + here.shift_ns, "death", died, text=text)

    def _recovered(self, here: _Incarnation, line: StepLine) -> None:
        """The line of a step that was cut ends when its rank goes on."""
        if here.cut_ns is None:
            return
        at_ns = line.end_ns + here.shift_ns
        took_ns, here.cut_ns = at_ns - here.cut_ns, None
        text = f"rank {here.rank} goes on, {took_ns / 1e6:.1f} ms after it gave step {line.step} up"
        identity = f"recovered {here.number} {line.begin_ns}"
        self._event(identity, at_ns, "recovered", here, text=text, step=line.step, duration_ns=took_ns)

    # ---- metrics and spans

    def _take_metrics(self, path: Path, lines: Lines) -> None:
        if lines.is_new_file:  # a resumed run has written it again without the steps that it repeats
            self.connection.execute("DELETE FROM metrics")
        rows: list[Row] = []
        damaged = 0
        for data in lines.lines:
            try:
                values = msgspec.json.decode(data, type=dict[str, float | None])
                step = int(values.pop("step") or 0)
            except (ValueError, RecursionError, KeyError):
                damaged += 1
                continue
            rows += [(name, step, value) for name, value in values.items()]
        self.connection.executemany(insert("metrics", ("name", "step", "value"), or_else="REPLACE"), rows)
        self._read_to(path, lines, None, damaged)

    def _take_user_metrics(self, path: Path) -> None:
        """Take a file that has been replaced since it was read."""
        status = path.stat()
        if self._source(path)[:2] == (status.st_ino, status.st_mtime_ns):
            return
        position, damaged = Position(status.st_ino, status.st_mtime_ns), 0
        rows: list[Row] = []
        try:
            found = decode_metrics(path.read_bytes() if status.st_size <= METRICS_BYTES_MAX else b"")
            process = (found.rank, found.incarnation, found.began_ns)
            rows = [(*process, *_of_series(one), found.at_ns) for one in found.series]
        except (ValueError, RecursionError):
            damaged = 1
        with self._transaction():
            self.connection.executemany(_PUT_USER_METRIC, rows)
            self._read_to(path, Lines([], position, is_new_file=True), None, damaged)

    def _take_launch(self, path: Path) -> None:
        """Take the record of a launcher, of at most some MiB, if it has changed since it was read."""
        status = path.stat()
        if self._source(path)[:2] == (status.st_ino, status.st_mtime_ns):
            return
        launch = read_launch(path)
        rows = [] if launch is None else list(_launch_rows(launch))
        with self._transaction():
            self.connection.executemany(_PUT_EVENT, rows)
            position = Position(status.st_ino, status.st_mtime_ns)
            self._read_to(path, Lines([], position, is_new_file=False), None, 0)

    def _take_spans(self, path: Path) -> None:
        spans = read_ring(path)
        run = spans.run
        found = self.connection.execute(
            "SELECT incarnation_id, clock_shift_ns FROM incarnations "
            "WHERE rank = ? AND incarnation = ? AND pid = ?",
            (run.rank, run.incarnation, run.pid),
        ).fetchone()
        if found is None:
            return
        number, shift_ns = found
        inode, last_ns = self._source(path)[:2]
        records = spans.records
        if inode == path.stat().st_ino:
            records = records[records["end_ns"] > last_ns]
        if not len(records):
            return
        last_ns = int(records["end_ns"].max())
        timeline: list[Row] = []
        sums: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        for row, own_ns in _timeline_rows(spans, records, number, shift_ns):
            timeline.append(row)
            _, _, step, _, name, category, _, _, nbytes = row
            if category == "op":
                continue  # its lines have more
            one = sums[step, name]
            one[0], one[1], one[2] = one[0] + 1, one[1] + own_ns, one[2] + (nbytes or 0)
        with self._transaction():
            self.connection.executemany(
                "INSERT INTO gpu_timeline VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", timeline
            )
            self.connection.executemany(
                "INSERT INTO op_profile (incarnation_id, step, op, rank, calls, execute_ns, bytes) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "calls = calls + excluded.calls, execute_ns = execute_ns + excluded.execute_ns, "
                "bytes = bytes + excluded.bytes",
                [(number, step, name, run.rank, *one) for (step, name), one in sums.items()],
            )
            lines = Lines([], Position(path.stat().st_ino, last_ns), is_new_file=False)
            self._read_to(path, lines, None, 0)

    # ---- bounds

    def _roll_up(self) -> None:
        """Add steps up; of too many keep sums of the oldest alone, and forget the oldest spans."""
        open_steps = self.connection.execute(
            "SELECT incarnation_id, min(step), max(step) FROM step_timing WHERE is_summed = 0 "
            "GROUP BY incarnation_id"
        ).fetchall()
        begins = [(number, first, last // CHUNK_STEPS * CHUNK_STEPS) for number, first, last in open_steps]
        chunks = [(number, begin) for number, first, begin in begins if first < begin]
        if chunks:
            with self._transaction():
                self._add_up(chunks)
        (rows,) = self.connection.execute("SELECT count(*) FROM step_timing").fetchone()
        if rows > self._step_rows_max:
            with self._transaction():
                self._forget_oldest(rows - self._step_rows_max * 3 // 4)
        (spans,) = self.connection.execute("SELECT count(*) FROM gpu_timeline").fetchone()
        if spans > self._timeline_rows_max:
            with self._transaction():
                self.connection.execute(
                    "DELETE FROM gpu_timeline WHERE rowid IN "
                    "(SELECT rowid FROM gpu_timeline ORDER BY begin_ns LIMIT ?)",
                    (spans - self._timeline_rows_max * 3 // 4,),
                )
        (ops,) = self.connection.execute("SELECT count(*) FROM op_profile").fetchone()
        if ops > OP_ROWS_MAX:
            (before,) = self.connection.execute(
                "SELECT step FROM op_profile ORDER BY step LIMIT 1 OFFSET ?", (ops - OP_ROWS_MAX * 3 // 4,)
            ).fetchone()
            self.connection.execute("DELETE FROM op_profile WHERE step < ?", (before,))

    def _add_up(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Add steps to `step_chunks`: of each process those before a step, which begins a chunk."""
        first = f"step / {CHUNK_STEPS} * {CHUNK_STEPS}"
        sums = ", ".join(f"sum({name})" for name in SUMMED_COLUMNS)
        where = "is_summed = 0 AND incarnation_id = ? AND step < ?"
        self.connection.executemany(
            f"INSERT INTO step_chunks ({_CHUNK_COLUMNS}, activation_bytes) "
            f"SELECT incarnation_id, {first}, rank, count(*), min(begin_ns), max(wall_ns), {sums}, "
            f"max(activation_bytes) FROM step_timing WHERE {where} GROUP BY incarnation_id, {first}, rank "
            f"ON CONFLICT DO UPDATE SET {_ADD_CHUNK}, activation_bytes = nullif("
            "max(coalesce(activation_bytes, -1), coalesce(excluded.activation_bytes, -1)), -1)",
            chunks,
        )
        self.connection.executemany(f"UPDATE step_timing SET is_summed = 1 WHERE {where}", chunks)

    def _forget_oldest(self, rows: int) -> None:
        """Keep in `step_history` alone the steps before the one that the `rows`-th oldest row is of."""
        (before,) = self.connection.execute(
            "SELECT step FROM step_timing ORDER BY step LIMIT 1 OFFSET ?", (rows,)
        ).fetchone()
        before = before // CHUNK_STEPS * CHUNK_STEPS
        numbers = self.connection.execute("SELECT incarnation_id FROM incarnations").fetchall()
        self._add_up([(number, before) for (number,) in numbers])
        self.connection.execute(
            f"INSERT INTO step_history ({_CHUNK_COLUMNS}) SELECT {_CHUNK_COLUMNS} FROM step_chunks "
            f"WHERE first_step < ? ON CONFLICT DO UPDATE SET {_ADD_CHUNK}",
            (before,),
        )
        self.connection.execute("DELETE FROM step_chunks WHERE first_step < ?", (before,))
        self.connection.execute("DELETE FROM step_timing WHERE step < ?", (before,))

    @contextmanager
    def _transaction(self) -> Generator[None]:
        """Write all of the block or nothing; waits for another writer."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")


def _launch_rows(launch: Launch) -> Iterator[Row]:
    """Yield rows of `events`: deaths with their causes, hangs, and how the launch ended."""
    name = f"{launch.began.host} {launch.began.unix_ns}"
    for line in launch.lines:
        rank: int | None
        number: int | None
        match line:
            case RankEnded() if not line.normal and not line.expected:
                identity = f"death {line.rank}#{line.incarnation}"
                said = f": {line.words[-1]}" if line.words and line.code > 0 else ""
                text = f"rank {line.rank} died: {line.reason}{said}"
                kind, rank, number = "death", line.rank, line.incarnation
            case HangFound():
                kind = "hang_over" if line.over else "hang"
                identity, text = f"{kind} {name} {line.at_ns}", line.text
                rank, number = next(iter(line.ranks), None), None
            case LaunchEnded():
                identity, kind, rank, number = f"end {name}", "end", None, None
                why = f": {line.reason}" if line.reason else ""
                text = f"{line.outcome}, exit code {line.exit_code}{why}"
            case _:
                continue
        yield (identity, line.at_ns + launch.shift_ns, kind, rank, number, line.step, None, text)


def _of_series(one: SeriesLine) -> Row:
    labels, is_histogram = msgspec.json.encode(one.labels).decode(), one.kind == "histogram"
    bounds, counts = (msgspec.json.encode(each).decode() for each in (one.bounds, one.counts))
    parts = (bounds, counts) if is_histogram and len(one.counts) == len(one.bounds) + 1 else (None, None)
    return (one.name, labels, one.kind, one.about, one.value, *parts)


def _step_row(here: _Incarnation, line: StepLine) -> Row:
    overlap, held = line.overlap, line.held
    return (
        here.number,
        line.step,
        line.begin_ns + here.shift_ns,
        here.rank,
        line.wall_ns,
        *(line.ns.get(phase, 0) for phase in PHASES),
        line.flops,
        line.hardware_flops,
        0 if overlap is None else overlap.under_way_ns,
        0 if overlap is None else overlap.waited_ns,
        0 if overlap is None else overlap.hidden_ns,
        None if held is None else held.nbytes,
    )


def _timeline_rows(spans: Spans, records: Any, number: int, shift_ns: int) -> Iterator[tuple[Row, int]]:
    """Yield rows of `gpu_timeline`, each with the ns that its span took by itself."""
    units = tuple(unit.name for unit in spans.run.units)
    for record in records.tolist():
        begin_ns, end_ns, amount, step, _, unit, group, category, track, _, _ = record
        duration_ns = end_ns - begin_ns
        if track == TRACK_STEP:
            kind, where, nbytes, own_ns = CATEGORIES[category], "step", None, amount
            name = kind if unit < 0 or unit >= len(units) else f"{kind} {units[unit]}"
        else:
            is_op = track == TRACK_OP
            kind, where = ("op", "ops") if is_op else ("operation", f"group {spans.groups[group].channel}")
            nbytes, own_ns = (None, amount) if is_op else (amount, duration_ns)
            name = spans.operations[category] if category < len(spans.operations) else kind
        place = (number, spans.run.rank, step, where, name, kind)
        yield (*place, begin_ns + shift_ns, duration_ns, nbytes), own_ns
