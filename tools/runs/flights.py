"""`zbmd flights`: the dumps of flight recorders as text, or as a trace that Perfetto and Chrome open.

`zbmd-node dump` has the ranks of this host write them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from zbmd.collectives.group.flight_dump import (
    FILE_BYTES_MAX,
    Dump,
    GroupFlights,
    Operation,
    flight_directory,
    read_dump,
)
from zbmd.tools.cli.options import add_command
from zbmd.tools.cli.trace_events import TraceEvents, write_trace_file
from zbmd.transport.errors import UserError

LAST_DEFAULT: Final = 8
BAR_CHARS: Final = 40
FILES_READ_MAX: Final = 1024
RUNNING: Final = "running"
FAILED: Final = "failed"


def read_dumps(paths: Iterable[Path]) -> list[Dump]:
    """The dumps in files and directories, by process name. Raises `UserError` if there is none."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("flight-*.json")) if path.is_dir() else [path]
    if not files:
        raise UserError("there is no dump there: `zbmd-node dump` has the ranks of this host write them")
    dumps: list[Dump] = []
    for path in files[:FILES_READ_MAX]:
        try:
            if path.stat().st_size > FILE_BYTES_MAX:
                raise UserError(f"{path} has more than {FILE_BYTES_MAX >> 20} MiB: it is no dump")
            dumps.append(read_dump(path.read_bytes(), str(path)))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return sorted(dumps, key=lambda dump: (dump.name, dump.pid))


def trace(dumps: Sequence[Dump]) -> bytes:
    """The Trace Event Format (Chrome, Perfetto): a process a rank, a thread a group, a slice an operation.

    Within an operation: `wait`, until all members had entered it, and `move`. Times: microseconds of the
    wall clock since the earliest operation, so that hosts can be laid side by side as far as their clocks
    agree.
    """
    offsets = [dump.taken_unix_ns - dump.taken_ns for dump in dumps]
    begins = [
        operation.start_ns + offset
        for dump, offset in zip(dumps, offsets, strict=True)
        for group in dump.groups
        for operation in group.operations
    ]
    origin_ns = min(begins, default=0)
    events = TraceEvents()
    for place, (dump, offset) in enumerate(zip(dumps, offsets, strict=True)):
        name = f"{dump.name} (pid {dump.pid})"
        events.process(place, name)
        for thread, group in enumerate(dump.groups):
            events.thread(place, thread, _group_name(group))
            for operation in group.operations:
                _slices(events, operation, place, thread, dump.taken_ns, offset - origin_ns)
    return events.encode("zbmd flights")


def _slices(
    events: TraceEvents, operation: Operation, pid: int, tid: int, taken_ns: int, shift_ns: int
) -> None:
    def piece(name: str, begin_ns: int, end_ns: int, **told: Any) -> None:
        begin_us, end_us = (begin_ns + shift_ns) / 1e3, (end_ns + shift_ns) / 1e3
        events.slice(pid, tid, name, begin_us, end_us, category=operation.state, told=told)

    end_ns = operation.end_ns or taken_ns
    piece(
        f"{operation.operation} #{operation.sequence}",
        operation.start_ns,
        end_ns,
        algorithm=operation.algorithm,
        bytes=operation.nbytes,
        state=operation.state,
        error=operation.error,
    )
    if operation.met_ns:
        piece("wait", operation.start_ns, operation.met_ns)
        piece("move", operation.met_ns, end_ns)


def text(dumps: Sequence[Dump], *, last: int) -> list[str]:
    """The last operations of every group, a line a rank: when it entered, waited, moved data, and ended.

    `.` not in it; `w` waits for members that have not entered; `#` at work; `>` not over; `x` failed.
    """
    lines = [f"# {dump.name} (pid {dump.pid}): {dump.reason}" for dump in dumps]
    groups: dict[tuple[int, int, tuple[int, ...]], list[tuple[Dump, GroupFlights]]] = {}
    for dump in dumps:
        for group in dump.groups:
            groups.setdefault((group.epoch, group.channel, group.members), []).append((dump, group))
    for key in sorted(groups):
        seen = groups[key]
        lines += ["", _group_name(seen[0][1])]
        numbers = sorted({o.sequence for _, group in seen for o in group.operations})
        for number in numbers[-last:]:
            lines += _operation_lines(number, seen)
    return lines


def _operation_lines(number: int, seen: Sequence[tuple[Dump, GroupFlights]]) -> list[str]:
    rows = [
        (dump, group.rank, operation)
        for dump, group in seen
        for operation in group.operations
        if operation.sequence == number
    ]
    # Clocks of one host are one; those of several are laid side by side by their wall clocks.
    shifts = {(dump.name, dump.pid): dump.taken_unix_ns - dump.taken_ns for dump, _, _ in rows}
    begin = min(o.start_ns + shifts[dump.name, dump.pid] for dump, _, o in rows)
    end = max((o.end_ns or dump.taken_ns) + shifts[dump.name, dump.pid] for dump, _, o in rows)
    first = rows[0][2]
    what = f"#{number} {first.operation} by {first.algorithm}, {first.nbytes} bytes"
    lines = [f"  {what}, {(end - begin) / 1e3:.1f} us"]
    for dump, rank, operation in sorted(rows, key=lambda row: row[1]):
        bar = _bar(operation, dump.taken_ns, begin - shifts[dump.name, dump.pid], max(1, end - begin))
        late_us = (operation.start_ns + shifts[dump.name, dump.pid] - begin) / 1e3
        took_us = ((operation.end_ns or dump.taken_ns) - operation.start_ns) / 1e3
        line = f"    rank {rank:3} |{bar}| +{late_us:.1f} us, {took_us:.1f} us {operation.state}"
        lines.append(f"{line}: {operation.error}" if operation.error else line)
    missing = sorted({g.rank for _, g in seen} - {rank for _, rank, _ in rows})
    if missing and any(operation.state == RUNNING for _, _, operation in rows):
        lines.append(f"    never entered by rank {', '.join(map(str, missing))}")
    return lines


def _bar(operation: Operation, taken_ns: int, begin_ns: int, length_ns: int) -> str:
    def at(time_ns: int) -> int:
        return min(BAR_CHARS, max(0, (time_ns - begin_ns) * BAR_CHARS // length_ns))

    start, end = at(operation.start_ns), at(operation.end_ns or taken_ns)
    met = at(operation.met_ns) if operation.met_ns else start if operation.state != RUNNING else end
    bar = "." * start + "w" * (met - start) + "#" * (end - met)
    if operation.state in (RUNNING, FAILED):
        bar = bar[: max(0, end - 1)] + (">" if operation.state == RUNNING else "x")
    elif end == start:
        bar = bar[:start] + "#"
    return bar.ljust(BAR_CHARS, ".")[:BAR_CHARS]


def _group_name(group: GroupFlights) -> str:
    closed = ", closed" if group.closed else ""
    return f"group {group.channel} of epoch {group.epoch}, ranks {list(group.members)}{closed}"


def show(dumps: Sequence[Dump], *, last: int, trace_to: Path | None) -> None:
    """Print the text, or write the trace. Raises `UserError` if it cannot be written."""
    if trace_to is None:
        print("\n".join(text(dumps, last=last)))
        return
    write_trace_file(trace_to, trace(dumps))
    print(f"{trace_to}: open it at https://ui.perfetto.dev or in chrome://tracing")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options that say how dumps are shown."""
    command.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace for Perfetto instead of text"
    )
    command.add_argument(
        "--last",
        type=int,
        default=LAST_DEFAULT,
        metavar="N",
        help="operations to show of each group (default: %(default)s)",
    )


def add_flights(commands: Any) -> None:
    """Add `zbmd flights`."""
    command = add_command(
        commands,
        "flights",
        "show dumps of flight recorders",
        description=__doc__,
        examples=("zbmd flights", "zbmd flights DIR --last 20 --trace flights.json"),
    )
    command.add_argument(
        "paths",
        type=Path,
        nargs="*",
        metavar="PATH",
        help="files or directories (default: where ranks write dumps)",
    )
    add_options(command)
    command.set_defaults(run_command=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.last < 1:
        raise UserError(f"--last: expected at least 1, got {arguments.last}")
    show(read_dumps(arguments.paths or [flight_directory()]), last=arguments.last, trace_to=arguments.trace)
    return 0
