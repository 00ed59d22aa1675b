"""The tables of a run's database, and how it is opened.

It is `run.db` in the run's directory, an SQLite file in WAL mode, which any tool reads while the run goes on.
All times are ns; those that begin or end something are since 1970, by the clock of the rank's host.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from zbmd.training.autograd._spans import CATEGORIES
from zbmd.training.profiler.lines import IDLE
from zbmd.transport.errors import UserError

DATABASE_NAME: Final = "run.db"
SCHEMA_VERSION: Final = 5
"""`PRAGMA user_version`."""
APPLICATION_ID: Final = 0x7A626D64
"""`PRAGMA application_id`: "zbmd"."""
BUSY_S: Final = 30.0
"""Time for which one writer waits for another."""

PHASES: Final = (*CATEGORIES, IDLE)
"""The parts of a step's time: those of a row add up to its `wall_ns`."""
PHASE_COLUMNS: Final = tuple(f"{phase}_ns" for phase in PHASES)
COUNTED_COLUMNS: Final = ("flops", "hardware_flops", "under_way_ns", "waited_ns", "hidden_ns")
SUMMED_COLUMNS: Final = ("wall_ns", *PHASE_COLUMNS, *COUNTED_COLUMNS)
"""Columns of `step_timing` of which `step_chunks` and `step_history` keep the sum."""
CHUNK_STEPS: Final = 100
"""Steps that a row of `step_chunks` or `step_history` is of."""

_SUMMED: Final = ",\n    ".join(f"{name} INTEGER NOT NULL DEFAULT 0" for name in SUMMED_COLUMNS)

TABLES: Final = {
    "runs": """
CREATE TABLE runs (  -- one row: the run of this directory
    run INTEGER PRIMARY KEY,
    directory TEXT NOT NULL,
    world_size INTEGER NOT NULL,
    began_ns INTEGER NOT NULL
)""",
    "incarnations": """
CREATE TABLE incarnations (  -- one row for each process that was a rank
    incarnation_id INTEGER PRIMARY KEY,
    rank INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    pid INTEGER NOT NULL,
    host TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    began_ns INTEGER NOT NULL,
    clock_shift_ns INTEGER NOT NULL,  -- from CLOCK_MONOTONIC of its host to times since 1970
    processor TEXT NOT NULL,
    dtype TEXT NOT NULL,
    threads INTEGER NOT NULL,
    peak_flops REAL,  -- FLOPs a second of this rank's share of its machine; NULL: never measured
    peak_bytes REAL,  -- bytes a second that its share of the machine's memory reads and writes; as above
    UNIQUE (rank, incarnation, pid, began_ns)
)""",
    "step_timing": f"""
CREATE TABLE step_timing (  -- one row for each step of each rank; a repeated step has several
    incarnation_id INTEGER NOT NULL REFERENCES incarnations,
    step INTEGER NOT NULL,
    begin_ns INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    {_SUMMED},
    activation_bytes INTEGER,
    is_summed INTEGER NOT NULL DEFAULT 0,  -- whether it is part of a row of step_chunks
    PRIMARY KEY (incarnation_id, step, begin_ns)
) WITHOUT ROWID""",
    "step_chunks": f"""
CREATE TABLE step_chunks (  -- sums over steps that are in step_timing, too: for what looks at long runs
    incarnation_id INTEGER NOT NULL REFERENCES incarnations,
    first_step INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    begin_ns INTEGER NOT NULL,
    wall_ns_max INTEGER NOT NULL,
    {_SUMMED},
    activation_bytes INTEGER,  -- the most
    PRIMARY KEY (incarnation_id, first_step)
) WITHOUT ROWID""",
    "step_history": f"""
CREATE TABLE step_history (  -- sums over steps that are too many to be kept one by one
    incarnation_id INTEGER NOT NULL REFERENCES incarnations,
    first_step INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    begin_ns INTEGER NOT NULL,
    wall_ns_max INTEGER NOT NULL,
    {_SUMMED},
    PRIMARY KEY (incarnation_id, first_step)
) WITHOUT ROWID""",
    "op_profile": """
CREATE TABLE op_profile (  -- sums over the calls of a step
    incarnation_id INTEGER NOT NULL REFERENCES incarnations,
    step INTEGER NOT NULL,
    op TEXT NOT NULL,
    rank INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    execute_ns INTEGER NOT NULL,  -- without what is nested in it; of a device by its own clock
    bytes INTEGER NOT NULL,
    kind TEXT NOT NULL DEFAULT 'span',  -- span: layers and collectives of all steps; op: of sampled ones
    pass TEXT NOT NULL DEFAULT '',  -- of an op: forward, backward, …, work, copy or collective
    shape TEXT NOT NULL DEFAULT '',  -- of an op's result and parameters
    dtype TEXT NOT NULL DEFAULT '',
    wait_ns INTEGER NOT NULL DEFAULT 0,  -- of a collective, until all members had come
    flops INTEGER NOT NULL DEFAULT 0,  -- of matrix products
    enqueue_ns INTEGER NOT NULL DEFAULT 0,  -- of an op, for the host to ask for it; on a CPU all of it
    PRIMARY KEY (incarnation_id, step, kind, op, pass, shape, dtype)
) WITHOUT ROWID""",
    "gpu_timeline": """
CREATE TABLE gpu_timeline (  -- spans of a rank's steps and operations, on whatever device they ran
    incarnation_id INTEGER NOT NULL REFERENCES incarnations,
    rank INTEGER NOT NULL,
    step INTEGER NOT NULL,
    track TEXT NOT NULL,  -- "step", or the group of an operation
    name TEXT NOT NULL,
    category TEXT NOT NULL,
    begin_ns INTEGER NOT NULL,
    duration_ns INTEGER NOT NULL,
    bytes INTEGER
)""",
    "events": """
CREATE TABLE events (
    identity TEXT PRIMARY KEY,  -- several ranks notice one death
    at_ns INTEGER NOT NULL,
    kind TEXT NOT NULL,  -- start, death, cut, recovered, straggler, straggler_over, hang, hang_over, end,
    -- lost_lines
    rank INTEGER,
    incarnation INTEGER,
    step INTEGER,
    duration_ns INTEGER,
    text TEXT NOT NULL
) WITHOUT ROWID""",
    "metrics": """
CREATE TABLE metrics (  -- loss, grad_norm, learning_rate, tokens_per_s, …: as metrics.jsonl
    name TEXT NOT NULL,
    step INTEGER NOT NULL,
    value REAL,  -- NULL: not finite
    PRIMARY KEY (name, step)
) WITHOUT ROWID""",
    "user_metrics": """
CREATE TABLE user_metrics (  -- counters, gauges and histograms of zbmd.metrics: the latest of each process
    rank INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    began_ns INTEGER NOT NULL,
    name TEXT NOT NULL,
    labels TEXT NOT NULL,  -- JSON: [[name, value], …]
    kind TEXT NOT NULL,  -- counter, gauge, histogram
    about TEXT NOT NULL,
    value REAL,  -- of a histogram, the sum; NULL: not finite
    bounds TEXT,  -- JSON: of a histogram
    counts TEXT,  -- JSON: of a histogram, one more than bounds
    at_ns INTEGER NOT NULL,
    PRIMARY KEY (rank, incarnation, began_ns, name, labels)
) WITHOUT ROWID""",
    "sources": """
CREATE TABLE sources (  -- the files that were read, and how far
    path TEXT PRIMARY KEY,
    inode INTEGER NOT NULL,
    read_bytes INTEGER NOT NULL,
    mark BLOB NOT NULL,
    incarnation_id INTEGER,
    cut_ns INTEGER,
    damaged_lines INTEGER NOT NULL DEFAULT 0,
    files_lost INTEGER NOT NULL DEFAULT 0  -- are gone, and may have held more lines
) WITHOUT ROWID""",
}
_SUMS: Final = ", ".join(SUMMED_COLUMNS)
# All steps of all ranks, one by one as long as they are kept so.
_STEP_SUMS: Final = (
    "CREATE VIEW step_sums AS SELECT incarnation_id, rank, step AS first_step, 1 AS steps, begin_ns, "
    f"{_SUMS}, activation_bytes FROM step_timing UNION ALL SELECT incarnation_id, rank, first_step, steps, "
    f"begin_ns, {_SUMS}, NULL FROM step_history"
)
# The same in fewer rows: each of up to CHUNK_STEPS steps, but for the latest.
_CHUNK_SUMS: Final = (
    "CREATE VIEW chunk_sums AS SELECT incarnation_id, rank, step AS first_step, 1 AS steps, begin_ns, "
    f"{_SUMS}, activation_bytes FROM step_timing WHERE is_summed = 0 UNION ALL SELECT incarnation_id, rank, "
    f"first_step, steps, begin_ns, {_SUMS}, activation_bytes FROM step_chunks UNION ALL SELECT "
    f"incarnation_id, rank, first_step, steps, begin_ns, {_SUMS}, NULL FROM step_history"
)
_UNSUMMED: Final = (
    "CREATE INDEX step_timing_unsummed ON step_timing (incarnation_id, step) WHERE is_summed = 0"
)
VIEWS_AND_INDEXES: Final = (
    _STEP_SUMS,
    _CHUNK_SUMS,
    _UNSUMMED,
    "CREATE INDEX step_timing_begin ON step_timing (begin_ns)",
    "CREATE INDEX step_timing_step ON step_timing (step)",
    "CREATE INDEX gpu_timeline_begin ON gpu_timeline (begin_ns)",
    "CREATE INDEX gpu_timeline_step ON gpu_timeline (step)",
    "CREATE INDEX events_at ON events (at_ns)",
)


def open_database(directory: Path) -> sqlite3.Connection:
    """Open the database of the run in `directory`, and make it if there is none.

    Where the directory cannot be written it is made in memory. Raises `UserError` for a file of another
    version, or one that is no such database.
    """
    path = directory / DATABASE_NAME
    try:
        connection = _connect(str(path))
    except sqlite3.OperationalError:  # a directory that cannot be written, or a file system without locks
        connection = _connect(":memory:")
    except sqlite3.DatabaseError as error:
        raise UserError(f"{path} is no database of a run ({error}): remove it; it is made again.") from None
    version = _brought_up(connection)
    if version != SCHEMA_VERSION:
        connection.close()
        raise UserError(
            f"{path} has version {version}; this version of zbmd writes {SCHEMA_VERSION}. Remove the file: "
            "it is made again from the run's own files."
        )
    return connection


def _brought_up(connection: sqlite3.Connection) -> int:
    """Add to a file of an earlier version what it has not; return its version."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not 1 <= version < SCHEMA_VERSION:
        return int(version)
    connection.execute("BEGIN IMMEDIATE")  # another process may do the same
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version < 2:
        connection.execute(TABLES["user_metrics"])
    if version < 3:
        for statement in (
            "ALTER TABLE op_profile RENAME TO op_profile_2",
            TABLES["op_profile"],
            "INSERT INTO op_profile (incarnation_id, step, op, rank, calls, execute_ns, bytes) "
            "SELECT incarnation_id, step, op, rank, calls, execute_ns, bytes FROM op_profile_2",
            "DROP TABLE op_profile_2",
            "ALTER TABLE incarnations ADD COLUMN peak_bytes REAL",
            "DROP VIEW step_sums",
            "ALTER TABLE step_timing ADD COLUMN sample_gen_ns INTEGER NOT NULL DEFAULT 0",
            "ALTER TABLE step_history ADD COLUMN sample_gen_ns INTEGER NOT NULL DEFAULT 0",
            _STEP_SUMS,
        ):
            connection.execute(statement)
    elif version < 4:
        connection.execute("ALTER TABLE op_profile ADD COLUMN enqueue_ns INTEGER NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE step_timing ADD COLUMN is_summed INTEGER NOT NULL DEFAULT 0")
    for statement in (TABLES["step_chunks"], _CHUNK_SUMS, _UNSUMMED):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")
    return SCHEMA_VERSION


def _connect(name: str) -> sqlite3.Connection:
    connection = sqlite3.connect(name, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not tables:
            for statement in (*TABLES.values(), *VIEWS_AND_INDEXES):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection
