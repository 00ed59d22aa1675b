"""Writes a captured run down as a regression test: a pytest file, and beside it what it replays."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zbmd.tools.replay.run import Replay
from zbmd.transport.capture import CaptureDamaged, DiskLimits, Divergence, Identical, ProcessLog
from zbmd.transport.capture.files import LogFiles
from zbmd.transport.capture.records import (
    ActionsGiven,
    End,
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

FIXTURE_SUFFIX = ".zlog"
RECORDS_PER_WRITE = 4096

_KEPT = (StreamDeclared, StateTaken, EventTaken, ActionsGiven, Raised, Mark, Lost, End)

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
