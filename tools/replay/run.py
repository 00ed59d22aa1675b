"""Replaying a whole capture: a verdict for every machine, and how far each process's log goes."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zbmd.transport.capture import (
    CaptureDamaged,
    DiskLimits,
    Divergence,
    Ending,
    Entry,
    Filter,
    Identical,
    Incomplete,
    ProcessLog,
    StepPlace,
    Verdict,
    open_log,
    replay_process,
)
from zbmd.transport.capture.files import LogFiles
from zbmd.transport.capture.format import BlockInfo
from zbmd.transport.capture.reader import LogSegment
from zbmd.transport.capture.records import (
    ActionsGiven,
    EndRecord,
    EventTaken,
    Lost,
    Mark,
    Raised,
    RawRecord,
    Record,
    StateTaken,
    StreamDeclared,
)
from zbmd.transport.errors import UserError

TOLD_EVERY = 4096
"""Records between two reports of how far a replay has come."""

OnProgress = Callable[[int], None]
"""Takes how many records more have been read."""


class CountedLog(ProcessLog):
    """A process's log that tells how far it has been read, and keeps what was damaged in it."""

    def __init__(self, log: ProcessLog, on_progress: OnProgress) -> None:
        super().__init__(log.path, log.segments)
        self.damage: CaptureDamaged | None = None
        self.first_ns = 0
        self.last_ns = 0
        self.records = 0
        self._on_progress = on_progress

    def entries(
        self, start: StepPlace | None = None, wanted: Callable[[LogSegment, BlockInfo], bool] | None = None
    ) -> Iterator[Entry]:
        """As `ProcessLog.entries`; also counts."""
        count = 0
        try:
            for entry in super().entries(start, wanted):
                if not count:
                    self.first_ns = entry.wall_ns
                count += 1
                self.last_ns = max(self.last_ns, entry.wall_ns)
                if count % TOLD_EVERY == 0:
                    self._on_progress(TOLD_EVERY)
                yield entry
        except CaptureDamaged as damage:
            self.damage = damage
            raise
        finally:
            self.records = count
            self._on_progress(count % TOLD_EVERY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamVerdict:
    """A machine's verdict, and what kind of machine it is."""

    kind: str
    verdict: Verdict


@dataclass(slots=True, kw_only=True)
class ProcessReplay:
    """Replay of one process's log. ending: how the log ends; times: ns since 1970."""

    process: str
    ending: str
    damage: str
    records: int
    records_before: int
    steps: tuple[int, int] | None
    first_ns: int
    last_ns: int
    verdicts: list[StreamVerdict] = field(default_factory=list[StreamVerdict])


@dataclass(slots=True, kw_only=True)
class Replay:
    """Replay of a capture. problems: logs that could not be opened; took_s: the replay alone."""

    path: Path
    processes: list[ProcessReplay]
    problems: list[str]
    took_s: float

    @property
    def divergences(self) -> list[Divergence]:
        """Of all processes, the one that came first in time first."""
        return [v for v in self._verdicts() if isinstance(v, Divergence)]

    @property
    def identical(self) -> list[Identical]:
        """The machines that answered as recorded."""
        return [v for v in self._verdicts() if isinstance(v, Identical)]

    @property
    def incomplete(self) -> list[Incomplete]:
        """The machines that could not be replayed to their end."""
        return [v for v in self._verdicts() if isinstance(v, Incomplete)]

    @property
    def ran_s(self) -> float:
        """From the first record of all to the last."""
        times = [(p.first_ns, p.last_ns) for p in self.processes if p.records]
        return (max(t[1] for t in times) - min(t[0] for t in times)) / 1e9 if times else 0.0

    @property
    def exit_code(self) -> int:
        """0 if nothing differs and no log is damaged; a machine without beginning or secret is no fault."""
        damaged = self.problems or any(process.damage for process in self.processes)
        return 1 if self.divergences or damaged or not self.identical else 0

    def _verdicts(self) -> Iterator[Verdict]:
        for process in self.processes:
            for found in process.verdicts:
                yield found.verdict


def records_of(logs: Sequence[ProcessLog]) -> int:
    """Return the number of records in the logs, from their indexes."""
    return sum(block.records for log in logs for segment in log.segments for block in segment.index.blocks)


def is_of_group(stream: str, group: str) -> bool:
    """Whether a stream of this name is a group's: what it has beside its operations is `<group>.<what>`."""
    return stream == group or stream.startswith(f"{group}.")


def replay_capture(
    path: Path,
    logs: Sequence[ProcessLog],
    wanted: Filter,
    *,
    stream: str | None = None,
    secrets: Mapping[str, Any],
    on_progress: OnProgress = lambda _: None,
) -> Replay:
    """Replay the wanted machines of these logs; `stream`: only those of that group."""
    began_s = time.perf_counter()
    processes: list[ProcessReplay] = []
    for log in logs:
        counted = CountedLog(log, on_progress)
        kinds = {declared.name: declared.machine for declared in log.streams.values()}
        verdicts = [
            StreamVerdict(kind=kinds.get(verdict.stream, ""), verdict=verdict)
            for verdict in replay_process(counted, wanted, secrets=secrets)
            if stream is None or is_of_group(verdict.stream, stream)
        ]
        processes.append(
            ProcessReplay(
                process=log.name,
                ending=_ending(log),
                damage="" if counted.damage is None else str(counted.damage),
                records=counted.records,
                records_before=log.records_before,
                steps=log.steps,
                first_ns=counted.first_ns,
                last_ns=counted.last_ns,
                verdicts=verdicts,
            )
        )
    return Replay(path=path, processes=processes, problems=[], took_s=time.perf_counter() - began_s)


def _ending(log: ProcessLog) -> str:
    try:
        ending = log.ending
    except CaptureDamaged:
        return "damaged"
    return "" if ending is Ending.CLOSED else ending.value


def open_logs(path: Path, ranks: Sequence[str]) -> tuple[list[ProcessLog], list[str]]:
    """The logs of a capture, of these processes if any are named, and why others cannot be opened.

    Raises `NotACapture`, and `UserError` if there is no such process.
    """
    capture = open_log(path)
    wanted = Filter(processes=frozenset(ranks) if ranks else None)
    logs = [log for log in capture.processes if wanted.takes_process(log.origin)]
    if not logs:
        known = ", ".join(log.name for log in capture.processes)
        raise UserError(f"{path} has no log of {', '.join(ranks)}. It has: {known}.")
    return logs, [str(problem) for problem in capture.problems]


# ---- a captured run as a regression test: a pytest file, and beside it what it replays

FIXTURE_SUFFIX = ".zlog"
RECORDS_PER_WRITE = 4096

_KEPT = (StreamDeclared, StateTaken, EventTaken, ActionsGiven, Raised, Mark, Lost, EndRecord)

_TEST = '''\
"""What {source} recorded must be answered in the same way: written by `zbmd replay --as-test`."""

from __future__ import annotations

from pathlib import Path

from zbmd.tools.replay import players as replay_kinds
from zbmd.transport.capture import Identical, replay_log

CAPTURE = Path(__file__).with_name("{fixture}")
MACHINES = {machines}


def test_{name}_is_answered_as_recorded() -> None:
    verdicts = list(replay_log(CAPTURE, secrets=replay_kinds.secrets_for(None)))
    different = [verdict for verdict in verdicts if not isinstance(verdict, Identical)]
    assert not different, different
    assert len(verdicts) == MACHINES
'''


def write_test(
    path: Path, logs: Sequence[ProcessLog], found: Replay, *, kinds_left_out: frozenset[str]
) -> Path:
    """Write the test to `path`, and the machines that were replayed to a directory beside it; return that.

    Kinds in `kinds_left_out` are left out, for they need what no file may hold. Raises `UserError` if a file
    is in the way, or nothing was replayed.
    """
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UserError(f"{path} is no name for a test: give one like tests/test_vote_lost.py.")
    fixture = path.with_suffix(FIXTURE_SUFFIX)
    for taken in (path, fixture):
        if taken.exists():
            raise UserError(f"{taken} is there already: give another name, or remove it.")
    machines = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        for log, process in zip(logs, found.processes, strict=True):
            names = {
                v.verdict.stream
                for v in process.verdicts
                if v.kind not in kinds_left_out and _was_replayed(v.verdict)
            }
            machines += _write_fixture(fixture, log, names)
    except BaseException:
        shutil.rmtree(fixture, ignore_errors=True)
        raise
    if not machines:
        shutil.rmtree(fixture, ignore_errors=True)
        raise UserError(f"nothing in {found.path} can be replayed, so there is nothing to test.")
    name = re.sub(r"\W", "_", path.stem.removeprefix("test_"))
    text = _TEST.format(source=found.path.name, fixture=fixture.name, machines=machines, name=name)
    path.write_text(text, encoding="utf-8")
    return fixture


def _was_replayed(verdict: object) -> bool:
    return isinstance(verdict, Identical | Divergence)


def _write_fixture(directory: Path, log: ProcessLog, names: set[str]) -> int:
    """Write the machines of one process that have these names; returns how many they are."""
    streams = {number for number, declared in log.streams.items() if declared.name in names}
    if not streams:
        return 0
    anchor = log.segments[0].header.anchor
    files = LogFiles(directory, log.origin, DiskLimits(), lambda: anchor)
    waiting: list[RawRecord] = []
    declared: set[int] = set()
    try:
        for entry in log.entries():
            record = entry.record
            if record.stream not in streams or not isinstance(record, _KEPT):
                continue
            if isinstance(record, StreamDeclared):
                if record.stream in declared:
                    continue
                declared.add(record.stream)
            waiting.append(_raw(record))
            if len(waiting) >= RECORDS_PER_WRITE:
                files.write(waiting)
                waiting = []
    except CaptureDamaged:
        pass  # what is before the damage is tested
    finally:
        files.write(waiting)
        files.close()
    return len(streams)


def _raw(record: Record) -> RawRecord:
    fields: list[Any] = [getattr(record, name) for name in record.__struct_fields__]
    return (int(record.kind), *fields)
