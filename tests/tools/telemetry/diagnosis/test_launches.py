"""The record of a launch: it is bounded, survives damage, and each directory has it from its beginning."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zbmd.tools.runs.launches import (
    FILE_BYTES_MAX,
    FILES_MAX,
    VERSION,
    LaunchBegan,
    LaunchEnded,
    LaunchWriter,
    Noted,
    RankEnded,
    cut_lines,
    launch_files,
    launch_path,
    read_launches,
)
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.transport.errors import UserError


def began(number: int = 1, version: int = VERSION) -> LaunchBegan:
    return LaunchBegan(
        version=version,
        host="a/b",
        boot_id="x",
        pid=number,
        process_ticks=1,
        monotonic_ns=5,
        unix_ns=1_000 + number,
        command=("train.py",),
        folder="/",
        ranks=2,
    )


END = LaunchEnded(at_ns=9, outcome="failed", reason="rank1 failed", exit_code=1)
DEATH = RankEnded(
    at_ns=7,
    rank=1,
    incarnation=1,
    pid=9,
    code=1,
    reason="exit code 1",
    cause="ValueError at train.py:3",
    normal=False,
    expected=False,
    no_memory=False,
    words=("Traceback (most recent call last):", "ValueError: bad"),
    next_step="the run ends",
)


def test_directories_that_come_later_have_all_of_it(tmp_path: Path) -> None:
    writer = LaunchWriter(began())
    writer.add(tmp_path / "first")
    writer.put(DEATH)
    writer.add(tmp_path / "second")
    writer.add(tmp_path / "second")
    writer.put(END)
    writer.close()
    for name in ("first", "second"):
        (launch,) = read_launches(tmp_path / name)
        assert launch.lines == (began(), DEATH, END)
        assert launch.end == END and launch.shift_ns == 996


def test_a_full_file_has_its_end_and_the_oldest_files_go(tmp_path: Path) -> None:
    writer = LaunchWriter(began())
    writer.add(tmp_path)
    note = Noted(at_ns=1, text="x" * 500)
    for _ in range(FILE_BYTES_MAX // 500):
        writer.put(note)
    writer.put(END)
    writer.close()
    path = launch_path(tmp_path, began())
    assert path.stat().st_size < FILE_BYTES_MAX + 1000
    assert read_launches(tmp_path)[0].end == END
    for number in range(2, FILES_MAX + 6):
        more = LaunchWriter(began(number))
        more.add(tmp_path)
        more.close()
    assert len(launch_files(tmp_path)) <= FILES_MAX + 1 and not path.exists()


def test_damaged_lines_are_left_out_and_other_versions_are_refused(tmp_path: Path) -> None:
    writer = LaunchWriter(began())
    writer.add(tmp_path)
    writer.put(DEATH)
    writer.close()
    path = launch_path(tmp_path, began())
    with path.open("ab") as file:
        file.write(b'{"kind":"ended","at_ns":-1}\n{"kind":"no')
    (launch,) = read_launches(tmp_path)
    assert launch.lines[1:] == (DEATH,) and launch.end is None
    other = LaunchWriter(began(2, version=VERSION + 1))
    other.add(tmp_path)
    other.close()
    with pytest.raises(UserError, match="format"):
        read_launches(tmp_path)


def test_a_directory_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = LaunchWriter(began())
    writer.add(tmp_path / "file")
    writer.put(END)
    writer.close()
    assert os.listdir(tmp_path) == ["file"]


def test_the_database_has_the_causes_of_deaths(tmp_path: Path) -> None:
    writer = LaunchWriter(began())
    writer.add(tmp_path)
    writer.put(DEATH)
    for end in (None, END):
        if end is not None:
            writer.put(end)
        with RunDatabase(tmp_path) as database:
            database.update()
            database.update()
            rows = database.connection.execute(
                "SELECT kind, rank, text FROM events ORDER BY at_ns"
            ).fetchall()
        deaths = [("death", 1, "rank 1 died: exit code 1: ValueError: bad")]
        ends = [("end", None, "failed, exit code 1: rank1 failed")]
        assert rows == (deaths if end is None else deaths + ends)
    writer.close()


def test_long_reasons_keep_their_beginning_and_end() -> None:
    lines = cut_lines([*(f"line {n}" for n in range(500)), "   ^^^^", "x" * 5000])
    assert lines[0] == "line 0" and lines[-2] == "line 499" and len(lines) < 60
    assert all(len(line) <= 600 for line in lines)
