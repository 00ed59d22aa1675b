"""The database of a run: all that its ranks measured, once, however often and by how many it is filled."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import PROGRAMS
from support.jobs.profiles import WALL, S, encoded, life, step
from support.jobs.two_ranks import killed_run

from zbmd.tools.entry import zbmd as cli
from zbmd.tools.lab.bench.training.database import measured
from zbmd.tools.telemetry.ingest import Added, RunDatabase
from zbmd.tools.telemetry.schema import CHUNK_STEPS, DATABASE_NAME, PHASE_COLUMNS, SUMMED_COLUMNS, TABLES
from zbmd.tools.telemetry.tail import Position, new_lines
from zbmd.training.job.records import METRICS_NAME
from zbmd.training.profiler.lines import CutLine, Death, lines_path, old_path, read_profiles
from zbmd.training.sharded.samples import SAMPLES_NAME, read_samples
from zbmd.transport.errors import UserError


def one(database: RunDatabase, sql: str, *values: object) -> tuple[object, ...]:
    found: tuple[object, ...] = database.connection.execute(sql, values).fetchone()
    return found


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed_run(tmp_path_factory.mktemp("killed"))


def test_a_run_with_a_kill(killed: Path) -> None:
    profiles = read_profiles(killed)
    with RunDatabase(killed) as database:
        database.update(spans=True)
        assert database.update(spans=True) == Added()
        lines = [line for profile in profiles for line in profile.steps]
        walls, flops = sum(line.wall_ns for line in lines), sum(line.flops for line in lines)
        assert one(database, "SELECT count(*), sum(wall_ns), sum(flops) FROM step_timing") == (
            len(lines),
            walls,
            flops,
        )
        phases = " + ".join(PHASE_COLUMNS)
        assert one(database, f"SELECT count(*) FROM step_timing WHERE {phases} != wall_ns") == (0,)
        kinds = dict(
            database.connection.execute("SELECT kind, count(*) FROM events GROUP BY kind").fetchall()
        )
        assert kinds == {"start": 3, "death": 1, "cut": 1, "recovered": 1}
        assert one(database, "SELECT rank, incarnation FROM events WHERE kind = 'death'") == (1, 1)
        order = "SELECT kind FROM events WHERE kind != 'start' ORDER BY at_ns"
        assert [kind for (kind,) in database.connection.execute(order)] == ["death", "cut", "recovered"]
        (took,) = one(database, "SELECT duration_ns FROM events WHERE kind = 'recovered'")
        assert isinstance(took, int) and took > 0
        assert one(database, "SELECT count(*), max(step) FROM metrics WHERE name = 'loss'") == (6, 6)
        for kind in ("span", "op"):
            asked = "SELECT count(*) > 0 FROM op_profile WHERE op LIKE 'all_%' AND bytes > 0 AND kind = ?"
            assert one(database, asked, kind) == (1,)
        ops = {(line.step, row.op) for profile in profiles for line in profile.ops for row in line.ops}
        rows = database.connection.execute("SELECT DISTINCT step, op FROM op_profile WHERE kind = 'op'")
        assert set(rows.fetchall()) == ops
        assert {step for step, _ in ops} >= {2, 4, 6}
        assert {"linear", "causal_attention", "update", "global_norm"} <= {op for _, op in ops}
        assert one(database, "SELECT sum(flops) FROM op_profile WHERE step = 4") == one(
            database, "SELECT sum(hardware_flops) FROM step_timing WHERE step = 4"
        )
        assert one(database, "SELECT count(*) FROM gpu_timeline WHERE track = 'ops'")[0] != 0
        assert one(database, "SELECT count(*) FROM step_timing WHERE sample_gen_ns > 0")[0] != 0
        beside = "SELECT count(*) FROM gpu_timeline WHERE duration_ns < 0 OR begin_ns < ?"
        assert one(database, beside, profiles[0].run.unix_ns - 60 * S) == (0,)


def test_the_model_has_written_texts(killed: Path) -> None:
    assert [one.step for one in read_samples(killed / SAMPLES_NAME)] == [3, 6]
    assert all(one.text for one in read_samples(killed / SAMPLES_NAME))


def test_the_database_follows_a_run_that_goes_on(tmp_path: Path) -> None:
    cut = CutLine(at_ns=17 * S, deaths=(Death(1, 1, 16 * S),))
    lines = encoded(life(0, [step(1, 5, 12), step(2, 12, 25), step(3, 25, 31)], cuts=(cut,)))
    path = lines_path(tmp_path, 0, 1)
    path.parent.mkdir()
    seen = []
    for line in lines:
        with path.open("ab") as file:
            file.write(line[:9])
        with RunDatabase(tmp_path) as database:  # another process each time
            seen.append(database.update().steps)
        with path.open("ab") as file:
            file.write(line[9:])
    with RunDatabase(tmp_path) as database:
        seen.append(database.update().steps)
        assert seen == [0, 0, 1, 0, 1, 1]
        found = "SELECT at_ns, duration_ns, step FROM events WHERE kind = 'recovered'"
        assert one(database, found) == (WALL + 25 * S, 8 * S, 2)


@given(
    st.lists(
        st.one_of(
            st.integers(1, 60).map(lambda size: ("write", size)), st.just(("rotate", 0)), st.just(("read", 0))
        ),
        max_size=40,
    )
)
def test_every_line_is_read_once_or_its_file_is_counted_as_lost(
    tmp_path_factory: pytest.TempPathFactory, deeds: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "lines"
    old = path.with_suffix(".old")
    path.write_bytes(b"the first\n")
    position, number, pending, lost = Position(), 0, b"", 0
    written: list[bytes] = [b"the first"]
    found: list[bytes] = []
    for deed, size in [("read", 0), *deeds, ("read", 0)]:
        if deed == "write":  # so many bytes, which may end within a line
            while len(pending) < size:
                written.append(b"line %d" % number)
                pending += written[-1] + b"\n"
                number += 1
            with path.open("ab") as file:
                file.write(pending[:size])
            pending = pending[size:]
        elif deed == "rotate":  # between two lines, as writers do
            with path.open("ab") as file:
                file.write(pending)
            pending = b""
            path.replace(old)
            path.touch()
        else:
            for lines in new_lines(path, old, position, line_bytes_max=100):
                found += lines.lines
                position, lost = lines.position, lost + lines.files_lost
    complete = written[: len(written) - pending.count(b"\n")]
    assert [line for line in complete if line in found] == found, "in order, and none twice"
    assert lost or found == complete


def test_lines_that_are_too_long_or_none_of_a_profile_are_counted(tmp_path: Path) -> None:
    good = encoded(life(0, [step(1, 5, 12), step(2, 12, 25)]))
    path = lines_path(tmp_path, 0, 1)
    path.parent.mkdir()
    path.write_bytes(
        b"".join([good[0], b"{}\n", good[1], b"x" * (3 << 20) + b"\n", b"[" * 9000 + b"\n", good[2]])
    )
    with RunDatabase(tmp_path) as database:
        assert database.update() == Added(steps=2, damaged=2)


def test_a_profile_of_another_format_is_refused(tmp_path: Path) -> None:
    path = lines_path(tmp_path, 0, 1)
    path.parent.mkdir()
    path.write_bytes(encoded(life(0, []))[0].replace(b'"version":1', b'"version":7'))
    with RunDatabase(tmp_path) as database, pytest.raises(UserError, match="has format 7"):
        database.update()


def test_files_that_were_replaced_before_they_were_read_are_told_of(tmp_path: Path) -> None:
    lines = encoded(life(0, [step(n, 10 * n, 10 * n + 9) for n in range(1, 5)]))
    path = lines_path(tmp_path, 0, 1)
    path.parent.mkdir()

    def replace(number: int) -> None:
        if path.exists():
            path.replace(old_path(path))
        path.write_bytes(lines[0] + lines[number])  # it may get the inode of one that is gone

    with RunDatabase(tmp_path) as database:
        replace(1)
        assert database.update() == Added(steps=1)
        replace(2)
        assert database.update() == Added(steps=1)
        replace(3)
        replace(4)
        assert database.update() == Added(steps=2, files_lost=1), "the second may have got more lines"
        assert one(database, "SELECT count(*) FROM events WHERE kind = 'lost_lines'") == (1,)


def test_old_steps_are_added_up_and_nothing_is_lost(tmp_path: Path) -> None:
    steps = [step(n, n, n + 1, comm=n % 2) for n in range(1, 2001)]
    path = lines_path(tmp_path, 0, 1)
    path.parent.mkdir()
    lines = encoded(life(0, steps))
    with RunDatabase(tmp_path, step_rows_max=500) as database:
        for part in range(0, len(lines), 300):
            with path.open("ab") as file:
                file.writelines(lines[part : part + 300])
            database.update()
        rows, comm = one(database, "SELECT count(*), sum(comm_ns) FROM step_timing")
        past, history, past_comm = one(
            database, "SELECT count(*), sum(steps), sum(comm_ns) FROM step_history"
        )
        assert isinstance(rows, int) and isinstance(history, int)
        assert isinstance(comm, int) and isinstance(past_comm, int)
        assert rows <= 500 and rows + history == 2000 and comm + past_comm == 1000 * S
        assert past == -(-history // CHUNK_STEPS)
        first, last = one(database, "SELECT min(step), max(step) FROM step_timing")
        assert (first, last) == (2001 - rows, 2000)


@given(
    of_ranks=st.lists(st.lists(st.integers(1, 350), max_size=4), min_size=1, max_size=2),
    updates=st.integers(1, 4),
    rows_max=st.sampled_from([120, 300, 10_000]),
)
def test_sums_of_chunks_are_those_of_steps(
    tmp_path_factory: pytest.TempPathFactory, of_ranks: list[list[int]], updates: int, rows_max: int
) -> None:
    """Whatever ranks repeat, and however often the database is brought up to date."""
    directory = tmp_path_factory.mktemp("run")
    lines: list[list[bytes]] = []
    for rank, turns in enumerate(of_ranks):
        path = lines_path(directory, rank, 1)
        path.parent.mkdir(exist_ok=True)
        # The rank goes on from step 300 for so many steps, and then goes back to there.
        numbers = [300 + n for turn in turns for n in range(turn)]
        steps = [step(number, at, at + 1, comm=number % 2) for at, number in enumerate(numbers, 1)]
        lines.append(encoded(life(rank, steps)))
    columns = ", ".join(f"sum({name})" for name in ("steps", *SUMMED_COLUMNS))
    chunks: list[tuple[int, ...]] = []
    with RunDatabase(directory, step_rows_max=rows_max) as database:
        for part in range(updates):
            for rank, mine in enumerate(lines):
                with lines_path(directory, rank, 1).open("ab") as file:
                    file.writelines(mine[len(mine) * part // updates : len(mine) * (part + 1) // updates])
            database.update()
            by_rank = f"SELECT rank, {columns} FROM {{}} GROUP BY rank ORDER BY rank"
            chunks, steps_of = (
                database.connection.execute(by_rank.format(view)).fetchall()
                for view in ("chunk_sums", "step_sums")
            )
            assert chunks == steps_of
        assert sum(row[1] for row in chunks) == sum(sum(turns) for turns in of_ranks)
        (rows,) = one(database, "SELECT count(*) FROM chunk_sums")
        assert isinstance(rows, int) and rows <= len(lines) * (2 * CHUNK_STEPS + 20) + sum(
            len(turns) * CHUNK_STEPS for turns in of_ranks
        )


def test_the_benchmark_finds_every_row_and_asks_all_that_pages_ask(tmp_path: Path) -> None:
    found = measured(tmp_path, steps=300, ranks=2)
    assert found.rows == 600 and found.rows_per_s > 0 and found.mebibytes > 0
    assert found.slowest_s >= 0 and {"summary", "waterfall", "events"} <= found.query_s.keys()


def test_several_processes_may_fill_it_at_once(tmp_path: Path) -> None:
    path = lines_path(tmp_path, 0, 1)
    path.parent.mkdir()
    path.write_bytes(b"".join(encoded(life(0, [step(n, n, n + 1) for n in range(1, 20_001)]))))
    command = [
        sys.executable,
        "-m",
        "zbmd",
        "query",
        str(tmp_path),
        "select count(*) n from step_timing",
        "--csv",
    ]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in started:
        out, _ = process.communicate(timeout=180)
        assert process.returncode == 0 and int(out.split()[1]) <= 20_000
    with RunDatabase(tmp_path) as database:
        database.update()
        assert one(database, "SELECT count(*), sum(wall_ns) FROM step_timing") == (20_000, 20_000 * S)


def test_metrics_of_steps_that_a_resumed_run_repeats_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    path.write_text('{"step":1,"loss":3.0}\n{"step":2,"loss":2.0}\n{"step":3,"loss":null,"grad_norm":1.0}\n')
    with RunDatabase(tmp_path) as database:
        database.update()
        every = "SELECT step, value FROM metrics WHERE name = 'loss' ORDER BY step"
        assert database.connection.execute(every).fetchall() == [(1, 3.0), (2, 2.0), (3, None)]
        fresh = tmp_path / "fresh"
        fresh.write_text('{"step":1,"loss":3.0}\n{"step":2,"loss":1.5}\nnonsense\n')
        os.replace(fresh, path)
        database.update()
        assert database.connection.execute(every).fetchall() == [(1, 3.0), (2, 1.5)]
        assert one(database, "SELECT damaged_lines FROM sources") == (1,)


# ---- commands


def test_queries_in_every_form(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "select rank, count(*) as steps, avg(wall_ns) as ns from step_timing group by rank"
    assert cli.main(["query", str(killed), sql]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["rank", "steps", "ns"] and len(rows) == 2
    assert cli.main(["query", str(killed), sql, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["columns"] == ["rank", "steps", "ns"] and found["more"] is False
    assert [row["rank"] for row in found["rows"]] == [0, 1]
    assert cli.main(["query", str(killed), "select step from step_timing", "--csv", "--limit", "2"]) == 0
    told = capsys.readouterr()
    assert len(told.out.split()) == 3 and "there are more" in told.err
    assert cli.main(["query", str(killed)]) == 0
    told = capsys.readouterr()
    assert all(f"CREATE TABLE {name}" in told.out for name in TABLES)


@pytest.mark.parametrize(
    ("sql", "complaint"),
    [
        ("delete from events", "readonly"),
        ("select step from steps", "no such table: steps. Tables: runs, incarnations"),
        ("select 1; select 2", "one statement at a time"),
        ("pragma query_only = off", "returns no rows"),
    ],
)
def test_queries_that_cannot_be(
    killed: Path, sql: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["query", str(killed), sql]) == 2
    assert complaint in capsys.readouterr().err
    with sqlite3.connect(killed / DATABASE_NAME) as connection:
        assert connection.execute("SELECT count(*) FROM events").fetchone() == (6,)


def test_a_csv_export_holds_every_row(killed: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(killed), "-o", str(tmp_path / "out")]) == 0
    with RunDatabase(killed) as database:
        for table in set(TABLES) - {"sources"}:
            with (tmp_path / "out" / f"{table}.csv").open(newline="") as file:
                found = list(csv.DictReader(file))
            assert (len(found),) == one(database, f"SELECT count(*) FROM {table}"), table
            if table == "step_timing":
                walls = sum(int(row["wall_ns"]) for row in found)
                assert (walls,) == one(database, "SELECT sum(wall_ns) FROM step_timing")


def test_a_parquet_export_holds_every_row(killed: Path, tmp_path: Path) -> None:
    """In processes of their own: pyarrow's threads live as long as their process."""
    if importlib.util.find_spec("pyarrow") is None:
        pytest.skip("pyarrow is not installed")
    export = ["-m", "zbmd", "export", str(killed), "--format", "parquet", "-o", str(tmp_path / "out")]
    subprocess.run([sys.executable, *export], check=True, timeout=180)
    read = [sys.executable, str(PROGRAMS / "tools" / "read_parquet.py"), str(tmp_path / "out")]
    told = subprocess.run(read, check=True, timeout=180, capture_output=True, text=True).stdout
    with RunDatabase(killed) as database:
        expected: list[str] = []
        for table in sorted(set(TABLES) - {"sources"}):
            (rows,) = one(database, f"SELECT count(*) FROM {table}")
            has_walls = table in ("step_timing", "step_chunks", "step_history")
            walls = one(database, f"SELECT coalesce(sum(wall_ns), 0) FROM {table}")[0] if has_walls else 0
            expected.append(f"{table} {rows} {walls}")
        assert told.splitlines() == expected


def test_a_trace_is_that_of_zbmd_trace(killed: Path, tmp_path: Path) -> None:
    for name in ("chrome", "perfetto"):
        assert cli.main(["export", str(killed), "--format", name, "-o", str(tmp_path / name)]) == 0
    assert cli.main(["trace", str(killed), "-o", str(tmp_path / "trace")]) == 0
    assert (tmp_path / "chrome").read_bytes() == (tmp_path / "perfetto").read_bytes()
    assert (tmp_path / "trace").read_bytes() == (tmp_path / "chrome").read_bytes()


# ---- what cannot be opened


def test_a_directory_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["query", str(tmp_path)]) == 2
    assert "it is not the directory of a run" in capsys.readouterr().err
    assert cli.main(["query", str(tmp_path / "nothing")]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err


def test_a_file_that_is_no_database_or_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_NAME
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match="is no database of a run"):
        RunDatabase(tmp_path)
    path.unlink()
    RunDatabase(tmp_path).connection.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(UserError, match="has version 99"):
        RunDatabase(tmp_path)


def test_where_nothing_can_be_written_it_is_made_in_memory(tmp_path: Path) -> None:
    (tmp_path / DATABASE_NAME).mkdir()  # as root, no directory is read-only
    path = lines_path(tmp_path, 0, 1)
    path.parent.mkdir()
    path.write_bytes(b"".join(encoded(life(0, [step(1, 5, 12)]))))
    with RunDatabase(tmp_path) as database:
        assert database.update() == Added(steps=1)
