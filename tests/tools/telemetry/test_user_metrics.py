"""`zbmd.metrics`: what a program counts reaches the run's database, also from ranks that are killed."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from programs import PROGRAMS

import zbmd
from zbmd.tools.dashboard.queries import user_metrics
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.tools.telemetry.measures import Counts, RunMeasures
from zbmd.tools.telemetry.schema import DATABASE_NAME, SCHEMA_VERSION
from zbmd.training.profiler import metrics
from zbmd.training.profiler.metrics import NAMES_MAX, SERIES_MAX, Registry, decode_metrics, metrics_path
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from support.processes.launcher import Launcher


def shown(database: RunDatabase) -> dict[str, float | Counts]:
    """The values by name and labels, but for the run."""
    return {
        " ".join((one.name.removeprefix("zbmd_user_"), *(f"{k}={v}" for k, v in labels[1:]))): value
        for one in RunMeasures("run", database.directory).collect(database.connection)
        if one.name.startswith("zbmd_user_")
        for labels, value in one.samples
    }


def test_a_rank_counts_and_when_it_is_killed_the_next_goes_on_from_what_it_had_written(
    launcher: Launcher,
) -> None:
    ended = launcher.run("run", "-n", "1", str(PROGRAMS / "node" / "counts.py"))
    assert ended.code == 0, str(ended)
    with RunDatabase(launcher.directory / "run") as database:
        database.update()
        assert shown(database) == {
            "rows_read rank=0 source=web": 10 + 11,
            "depth rank=0": 2,
            "fetch_seconds rank=0": Counts((0.5, 1.0), (2, 2, 2), 8.5),
        }
        rows = {
            row["name"]: (row["value"], row["count"]) for row in user_metrics(database.connection)["rows"]
        }
        assert rows == {"rows_read": (21, None), "depth": (2, None), "fetch_seconds": (8.5 / 6, 6)}
        before = database.connection.total_changes
        database.update()
        assert database.connection.total_changes == before, "a file that is read is not read again"


def test_a_thread_writes_what_changes_and_a_fork_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "tools" / "counts_and_forks.py"), str(tmp_path)]
    path = metrics_path(tmp_path, 3, 1)
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("ZBMD_")}, "RANK": "3"},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"counted\n"
        looking = threading.Event()
        while not path.exists() or decode_metrics(path.read_bytes()).series[0].value != 2:
            assert not looking.wait(0.02) and process.poll() is None
        process.communicate(b"")
    assert process.returncode == -9
    with RunDatabase(tmp_path) as database:
        database.update()
        assert shown(database) == {"rows rank=3": 2}


def test_what_one_process_may_have_is_bounded(tmp_path: Path) -> None:
    registry = Registry()
    for n in range(NAMES_MAX + 50):
        registry.get(metrics.Counter(), f"name_{n}", "", None, ()).add()
    for n in range(SERIES_MAX + 50):
        registry.get(metrics.Counter(), "name_0", "", {"n": str(n)}, ()).add()
    registry.record_to(tmp_path, 0, 1)
    registry.stop()
    written = decode_metrics(metrics_path(tmp_path, 0, 1).read_bytes()).series
    assert len(written) == SERIES_MAX and len({one.name for one in written}) == NAMES_MAX


def test_the_same_arguments_are_the_same_instrument_in_all_threads() -> None:
    def count() -> None:
        for _ in range(1000):
            zbmd.metrics.counter("test_shared", labels={"a": "1"}).add(2)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert zbmd.metrics.counter("test_shared", labels={"a": "1"})._total == 8000


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: zbmd.metrics.counter("rows read"), "expected a letter"),
        (lambda: zbmd.metrics.counter("a" * 129), "expected a letter"),
        (lambda: zbmd.metrics.counter("a", labels={"rank": "1"}), "not one of le, rank, run"),
        (lambda: zbmd.metrics.counter("a", labels={"b": "x" * 257}), "at most 256 characters"),
        (lambda: zbmd.metrics.gauge("a", labels={f"l{n}": "" for n in range(9)}), "8 labels"),
        (lambda: zbmd.metrics.histogram("a", buckets=(2, 1)), "growing bounds"),
        (lambda: zbmd.metrics.histogram("a", buckets=()), "growing bounds"),
        (lambda: zbmd.metrics.histogram("a", buckets=(1, float("inf"))), "growing bounds"),
        (lambda: zbmd.metrics.counter("test_up").add(-1), "Use a gauge"),
        (lambda: [zbmd.metrics.counter("test_k"), zbmd.metrics.gauge("test_k")], "it is a counter already"),
    ],
)
def test_what_cannot_be_counted(wrong: object, words: str) -> None:
    assert callable(wrong)
    with pytest.raises(UserError, match=words):
        wrong()


def test_a_damaged_file_is_left_out_and_a_value_that_is_not_finite_shows_nothing(tmp_path: Path) -> None:
    registry = Registry()
    registry.get(metrics.Gauge(), "good", "", None, ()).set(1)
    registry.get(metrics.Gauge(), "bad", "", None, ()).set(float("nan"))
    registry.record_to(tmp_path, 0, 1)
    registry.stop()
    metrics_path(tmp_path, 1, 1).write_bytes(b'{"rank":1')
    with RunDatabase(tmp_path) as database:
        database.update()
        assert shown(database) == {"good rank=0": 1}
        assert database.connection.execute("SELECT sum(damaged_lines) FROM sources").fetchone() == (1,)


OPS_OF_VERSION_2 = (
    "CREATE TABLE op_profile (incarnation_id INTEGER NOT NULL, step INTEGER NOT NULL, op TEXT NOT NULL, "
    "rank INTEGER NOT NULL, calls INTEGER NOT NULL, execute_ns INTEGER NOT NULL, bytes INTEGER NOT NULL, "
    "PRIMARY KEY (incarnation_id, step, op)) WITHOUT ROWID"
)


def downgrades(version: int) -> list[str]:
    """Return the statements that make a new file one of an earlier version."""
    of_version_4 = [
        "DROP VIEW chunk_sums",
        "DROP TABLE step_chunks",
        "DROP INDEX step_timing_unsummed",
        "ALTER TABLE step_timing DROP COLUMN is_summed",
    ]
    ops = "INSERT INTO op_profile (incarnation_id, step, op, rank, calls, execute_ns, bytes) "
    if version == 4:
        return [*of_version_4, f"{ops} VALUES (1, 2, 'comm', 0, 3, 4, 5)"]
    if version == 3:
        return [
            *of_version_4,
            "ALTER TABLE op_profile DROP COLUMN enqueue_ns",
            f"{ops} VALUES (1, 2, 'comm', 0, 3, 4, 5)",
        ]
    return [
        *of_version_4,
        "DROP TABLE op_profile",
        OPS_OF_VERSION_2,
        "INSERT INTO op_profile VALUES (1, 2, 'comm', 0, 3, 4, 5)",
        "ALTER TABLE incarnations DROP COLUMN peak_bytes",
        "DROP VIEW step_sums",
        "ALTER TABLE step_timing DROP COLUMN sample_gen_ns",
        "ALTER TABLE step_history DROP COLUMN sample_gen_ns",
        "CREATE VIEW step_sums AS SELECT step FROM step_timing",
        *(["DROP TABLE user_metrics"] if version == 1 else []),
    ]


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_database_of_an_earlier_version_is_added_to(tmp_path: Path, version: int) -> None:
    with RunDatabase(tmp_path) as new:
        wanted = shape_of(new.connection)
    with sqlite3.connect(tmp_path / DATABASE_NAME) as connection:
        for statement in (*downgrades(version), f"PRAGMA user_version = {version}"):
            connection.execute(statement)
    connection.close()
    with RunDatabase(tmp_path) as database:
        assert shape_of(database.connection) == wanted
        assert database.connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        found = database.connection.execute(
            "SELECT kind, op, calls, execute_ns, bytes, flops, enqueue_ns FROM op_profile"
        )
        assert found.fetchall() == [("span", "comm", 3, 4, 5, 0, 0)]


def shape_of(connection: sqlite3.Connection) -> dict[str, set[str]]:
    """The columns of each table and view."""
    names = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
    return {name: {row[1] for row in connection.execute(f"PRAGMA table_info({name})")} for (name,) in names}
