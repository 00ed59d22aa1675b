"""`zbmd query` and `zbmd export`: a run's database in SQL, as CSV, as Parquet, and as a trace."""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import io
import os
import re
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from zbmd.tools.cli.options import add_command, add_json
from zbmd.tools.runs.profile import write_trace
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.tools.telemetry.schema import TABLES
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

ROWS_SHOWN: Final = 1000
"""`--limit` of a query."""
CELL_CHARACTERS_MAX: Final = 120
BATCH_ROWS: Final = 50_000
FORMATS: Final = ("csv", "parquet", "chrome", "perfetto", "otlp")
ENDPOINT_DEFAULT: Final = "http://127.0.0.1:4318"
FOLLOW_S: Final = 5.0
EXPORTED: Final = tuple(name for name in TABLES if name != "sources")


def add_telemetry(commands: Any) -> None:
    """Add `zbmd query` and `zbmd export`."""
    query = add_command(
        commands,
        "query",
        "ask the database of a run in SQL, also while it runs",
        description="Ask the database of a run in SQL (SQLite). Without a query: its tables and columns.",
        examples=(
            "zbmd query zbmd-runs/demo",
            'zbmd query zbmd-runs/demo "select rank, avg(wall_ns) / 1e6 from step_timing group by rank"',
            'zbmd query zbmd-runs/demo "select at_ns, text from events order by at_ns" --json',
        ),
    )
    query.add_argument("run", type=Path, metavar="RUN", help="directory of the run")
    query.add_argument("sql", nargs="?", metavar="SQL", help="one SELECT; nothing can be changed")
    query.add_argument(
        "--limit", type=int, default=ROWS_SHOWN, metavar="N", help="rows to print (default: %(default)s)"
    )
    query.add_argument("--csv", action="store_true", help="print comma-separated values with a header")
    add_json(query)
    query.set_defaults(run_command=_query)
    export = add_command(
        commands,
        "export",
        "write the database of a run as CSV or Parquet, its spans as a trace, or send all to OpenTelemetry",
        description="Write the tables of a run into a directory, a file each, or its spans as one trace, to "
        "open at https://ui.perfetto.dev; or send its metrics, events and spans to an OpenTelemetry "
        "collector.",
        examples=(
            "zbmd export zbmd-runs/demo --format parquet -o demo.parquet",
            "zbmd export zbmd-runs/demo --format perfetto -o trace.json",
            "zbmd export zbmd-runs/demo --format otlp --endpoint http://collector:4318 --follow",
        ),
    )
    export.add_argument("run", type=Path, metavar="RUN", help="directory of the run")
    export.add_argument("--format", choices=FORMATS, default="csv", help="(default: %(default)s)")
    export.add_argument(
        "-o", "--out", type=Path, metavar="PATH", help="directory, or file of a trace (default: in RUN)"
    )
    of_otlp = export.add_argument_group("with --format otlp")
    of_otlp.add_argument(
        "--endpoint",
        default=os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ENDPOINT_DEFAULT),
        metavar="URL",
        help="collector that receives OTLP over HTTP (default: OTEL_EXPORTER_OTLP_ENDPOINT, or "
        f"{ENDPOINT_DEFAULT})",
    )
    of_otlp.add_argument(
        "--follow", action="store_true", help=f"go on with what is new, every {FOLLOW_S:g} s, until Ctrl-C"
    )
    of_otlp.add_argument(
        "--capture", type=Path, metavar="DIR", help="send the messages in a capture of the run, too"
    )
    export.set_defaults(run_command=_export)


# ---- queries


def _query(arguments: argparse.Namespace) -> int:
    sql: str | None = arguments.sql
    with RunDatabase(arguments.run) as database:
        database.update(spans=sql is None or bool(re.search("op_profile|gpu_timeline", sql, re.IGNORECASE)))
        if sql is None:
            print("\n".join(_described(database.connection)))
            return 0
        names, shown = select(database.connection, sql, rows_max=arguments.limit + 1)
    more = len(shown) > arguments.limit
    shown = shown[: arguments.limit]
    if arguments.json:
        found = [dict(zip(names, row, strict=True)) for row in shown]
        print(msgspec.json.encode({"columns": names, "rows": found, "more": more}).decode())
    elif arguments.csv:
        csv.writer(sys.stdout).writerows([names, *shown])
    else:
        print("\n".join(_table(names, shown)))
    if more and not arguments.json:
        print(f"there are more: --limit {arguments.limit} are shown", file=sys.stderr)
    return 0


def select(connection: sqlite3.Connection, sql: str, *, rows_max: int) -> tuple[list[str], list[Any]]:
    """Return the names of the columns and the rows of a query, which can change nothing.

    Raises `UserError` for one that is no SELECT of these tables.
    """
    connection.execute("PRAGMA query_only = ON")
    try:
        with contextlib.closing(connection.execute(sql)) as cursor:
            if cursor.description is None:
                raise UserError("the query returns no rows: write one SELECT.")
            return [each[0] for each in cursor.description], cursor.fetchmany(rows_max)
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise UserError(
            f"the query failed: {error}. Tables: {', '.join(TABLES)}; zbmd query RUN shows their columns."
        ) from None


def _described(connection: sqlite3.Connection) -> Iterator[str]:
    for name, statement in TABLES.items():
        (rows,) = connection.execute(f"SELECT count(*) FROM {name}").fetchone()
        yield f"{statement.strip()}\n-- {rows:,} rows\n"


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    cells = [[_cell(value) for value in row] for row in rows]
    numbers = [all(isinstance(row[n], int | float | None) for row in rows) for n in range(len(names))]
    widths = [max([len(name), *(len(row[n]) for row in cells)]) for n, name in enumerate(names)]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numbers, strict=True)
        ).rstrip()
        for row in [list(names), *cells]
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= CELL_CHARACTERS_MAX else f"{text[: CELL_CHARACTERS_MAX - 1]}…"


# ---- exports


def _export(arguments: argparse.Namespace) -> int:
    run: Path = arguments.run
    if arguments.format in ("chrome", "perfetto"):
        write_trace([run], arguments.out)
        return 0
    if arguments.format == "otlp":
        return _export_otlp(arguments)
    directory: Path = arguments.out or run / "export"
    write = _write_csv if arguments.format == "csv" else _parquet_writer()
    with RunDatabase(run) as database:
        database.update(spans=True)
        for table in EXPORTED:
            write(database.connection, table, directory / f"{table}.{arguments.format}")
    print(f"{directory}: {len(EXPORTED)} tables")
    return 0


def _export_otlp(arguments: argparse.Namespace) -> int:
    from zbmd.tools.telemetry.otlp import OtlpExport

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM) if arguments.follow else ():
        signal.signal(number, lambda *_: ended.set())
    export = OtlpExport(arguments.run, arguments.endpoint)
    with contextlib.closing(export), RunDatabase(arguments.run) as database:
        database.update(spans=True)
        sent = export.export(database)
        if arguments.capture is not None:
            sent += export.messages(arguments.capture)
        if arguments.follow:
            print(f"{arguments.endpoint}: {sent.spans} spans, {sent.logs} logs; Ctrl-C ends it", flush=True)
        while arguments.follow and not ended.is_set():
            ended.wait(FOLLOW_S)
            database.update(spans=True)
            try:
                sent += export.export(database)
            except UserError as error:  # it may be back the next time
                print(f"zbmd: {error} It is tried again.", file=sys.stderr, flush=True)
    print(f"{arguments.endpoint}: {sent.spans} spans, {sent.logs} logs, {sent.metrics} values of metrics")
    return 0


def _write_csv(connection: sqlite3.Connection, table: str, path: Path) -> None:
    cursor = connection.execute(f"SELECT * FROM {table}")

    def write(file: Any) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text)
        writer.writerow([each[0] for each in cursor.description])
        writer.writerows(cursor)
        text.detach()

    write_atomically(path, write)


def _parquet_writer() -> Any:
    """Return the function that writes a table as Parquet. Raises `UserError` without pyarrow."""
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError('Parquet needs pyarrow: pip install "zbmd[telemetry]".') from error
    types = {"INTEGER": arrow.int64(), "REAL": arrow.float64(), "TEXT": arrow.string()}

    def write_table(connection: sqlite3.Connection, table: str, path: Path) -> None:
        columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
        schema = arrow.schema([(name, types[kind]) for _, name, kind, *_ in columns])
        cursor = connection.execute(f"SELECT * FROM {table}")

        def write(file: Any) -> None:
            with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
                while rows := cursor.fetchmany(BATCH_ROWS):
                    values = [list(column) for column in zip(*rows, strict=True)]
                    writer.write_table(arrow.table(values, schema=schema))

        write_atomically(path, write)

    return write_table
