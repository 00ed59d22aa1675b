"""Collect the evidence of a run from what it left: a directory, the record of a launch, a capture, a log."""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from zbmd.actors.cluster.local_deaths import boot_id, started
from zbmd.collectives.group.flight_dump import Operation, flight_directory
from zbmd.tools.replay.hang import find_hang
from zbmd.tools.replay.players import secrets_for
from zbmd.tools.replay.run import open_logs
from zbmd.tools.replay.story import clock_offsets
from zbmd.tools.runs.flights import FAILED, RUNNING, read_dumps
from zbmd.tools.runs.launches import (
    HangFound,
    Launch,
    LaunchBegan,
    LaunchEnded,
    Noted,
    RankBegan,
    RankEnded,
    RanksMet,
    RunFound,
    launch_files,
    launches_of_user,
    read_launch,
    read_launches,
)
from zbmd.tools.telemetry.diagnosis.cluster import find_job
from zbmd.tools.telemetry.diagnosis.evidence import (
    Death,
    Evidence,
    Hang,
    Launcher,
    Missing,
    NotFinite,
    Slow,
    Waits,
    failure_of,
    place_of,
)
from zbmd.tools.telemetry.diagnosis.log_text import read_log_text
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.training.job.records import METRICS_NAME
from zbmd.training.profiler.lines import PROFILE_DIRECTORY
from zbmd.transport.errors import UserError, ZbmdError

OVERLAP_NS: Final = 60_000_000_000
"""Launches of one run begin and end within so much of each other."""
RUNS_READ_MAX: Final = 4
_STRAGGLER: Final = re.compile(r"straggler(?:_over)? (\d+) (\w+) (\d+)")


@dataclass(slots=True)
class _Gathered:
    """The evidence so far."""

    launches: list[Launch] = field(default_factory=list[Launch])
    slow: list[Slow] = field(default_factory=list[Slow])
    not_finite: NotFinite | None = None
    missing: list[Missing] = field(default_factory=list[Missing])
    waits: Waits | None = None
    unusual: frozenset[int] = frozenset()
    """Processes whose last operation was unlike all before it."""
    sources: list[str] = field(default_factory=list[str])

    def read(self, source: Path) -> None:
        name = str(source)
        if name not in self.sources:
            self.sources.append(name)


def evidence_of(target: str | None, *, at: str | None = None) -> Evidence:
    """Return the evidence of a directory, a file, a launch of this user's, or a job of a cluster.

    target: a directory of a run, of logs or of a capture; a file; a launcher's process id or script; the name
    or script of a job of the cluster; None for the user's latest launch, or with `at` the latest job. at: a
    node of the cluster, which is asked for jobs alone. Raises `UserError` if there is nothing of that name,
    or nothing to read.
    """
    if at is not None:
        found = _Gathered()
        _job(target, at, found)
        return _finished(target, found)
    path = None if target is None else Path(target)
    if path is not None and path.is_file() and path.suffix != ".jsonl":
        return read_log_text(path)
    found = _Gathered()
    if path is not None and path.is_dir():
        _directory(path, found)
    elif path is not None and path.is_file():
        launch = read_launch(path)
        if launch is None:
            raise UserError(f"{path} is no record of a launch.")
        found.launches = [launch]
        found.read(path)
    elif launches := _launches_named(target):
        found.launches = launches
        home = launches_of_user()
        assert home is not None
        found.sources += [str(file) for file in launch_files(home) if _is_of(file, found.launches)]
    else:
        _job(target, None, found)
    return _finished(target, found)


def _finished(target: str | None, found: _Gathered) -> Evidence:
    _follow(found)
    if not found.sources:
        raise UserError(
            f"{target} holds no record of a launch, profile, dump or capture: give the directory of a run, "
            "what --log-dir or --capture was given, or a file with what the launcher printed."
        )
    return _evidence(found)


def _job(name: str | None, at: str | None, found: _Gathered) -> None:
    """Read a job of the cluster. Raises `UserError` if there is no such job, and no launch of that name."""
    if (job := find_job(name, at)) is None:
        what = "no launch of this user is recorded" if name is None else f"there is no {name}"
        raise UserError(
            f"{what}: give a directory of a run, a file with what the launcher printed, a launcher's process "
            "id or script, or a job of the cluster."
        )
    found.launches, found.sources = list(job.launches), list(job.sources)


def _launches_named(target: str | None) -> list[Launch]:
    home = launches_of_user()
    launches = [] if home is None else read_launches(home)
    if target is not None:
        launches = [one for one in launches if target in (str(one.began.pid), *one.began.command)]
    return _latest(launches) if launches else []


def _latest(launches: Sequence[Launch]) -> list[Launch]:
    """Return the latest launch, and those of other nodes of the same run."""
    last = launches[-1]
    begin_ns = last.began.unix_ns - OVERLAP_NS
    if last.began.nodes < 2:
        return [last]
    return [
        one
        for one in launches
        if (one.began.command, one.began.job) == (last.began.command, last.began.job)
        and (one.last_ns >= begin_ns or one is last)
    ]


def _directory(path: Path, found: _Gathered) -> None:
    if any(path.glob("*#*")):
        _capture(path, found)
    if launches := read_launches(path):
        found.launches = _latest(launches)
        for file in launch_files(path):
            if _is_of(file, found.launches):
                found.read(file)
    _profile(path, found)


def _is_of(file: Path, launches: Sequence[Launch]) -> bool:
    return any(
        file.name.startswith(f"{one.began.unix_ns:019d}-") and file.stem.endswith(f"-{one.began.pid}")
        for one in launches
    )


def _follow(found: _Gathered) -> None:
    """Read what launches name: the directories of their runs, captures, and dumps of their ranks."""
    runs = dict.fromkeys(
        line.directory for launch in found.launches for line in launch.lines if isinstance(line, RunFound)
    )
    for directory in list(runs)[-RUNS_READ_MAX:]:
        if str(Path(directory) / PROFILE_DIRECTORY) not in found.sources and Path(directory).is_dir():
            _profile(Path(directory), found)
    for launch in found.launches:
        if launch.began.capture and found.waits is None and Path(launch.began.capture).is_dir():
            _capture(Path(launch.began.capture), found)
    _flights(found)


def _profile(path: Path, found: _Gathered) -> None:
    if not (path / PROFILE_DIRECTORY).is_dir() and not (path / METRICS_NAME).exists():
        return
    with RunDatabase(path) as database:
        database.update()
        rows = database.connection.execute(
            "SELECT identity, at_ns, kind, text FROM events WHERE kind LIKE 'straggler%' ORDER BY at_ns"
        ).fetchall()
        bad = database.connection.execute(
            "SELECT name, step FROM metrics WHERE value IS NULL ORDER BY step LIMIT 1"
        ).fetchone()
    found.read(path / PROFILE_DIRECTORY)
    for identity, at_ns, kind, text in rows:
        if (named := _STRAGGLER.match(identity)) is not None:
            found.slow.append(
                Slow(
                    rank=int(named[1]),
                    cause=named[2],
                    step=int(named[3]),
                    at_ns=at_ns,
                    text=text,
                    over=kind == "straggler_over",
                )
            )
    if bad is not None:
        found.not_finite = NotFinite(metric=bad[0], step=bad[1])


def _capture(path: Path, found: _Gathered) -> None:
    """Read a capture; one that cannot be read says so in its place."""
    try:
        logs, problems = open_logs(path, [])
        hang, _ = find_hang(logs, clock_offsets(logs), secrets_for(None))
    except ZbmdError as error:
        found.waits = Waits(first=(), lines=(f"the capture {path} cannot be read: {error}",))
        return
    found.read(path)
    first = [name for root in hang.roots for name in (root.whom or (root.process,))]
    first += [] if hang.roots else [idle.process for idle in hang.idle]
    lines = tuple(line.strip() for line in (*hang.lines()[1:], *problems))
    found.waits = Waits(first=tuple(dict.fromkeys(first)), lines=lines if hang.waits else ())


def _flights(found: _Gathered) -> None:
    """Read the dumps of these launches' ranks: an operation that some of them never entered."""
    ours = [one for one in found.launches if one.is_live is None or one.began.boot_id == boot_id()]
    pids = {line.pid for launch in ours for line in launch.lines if isinstance(line, RankBegan)}
    begun_ns = min((launch.began.unix_ns for launch in found.launches), default=0)
    folders = [Path(source).parent.parent / "flights" for source in found.sources]
    with contextlib.suppress(UserError):
        folders.append(flight_directory())
    files = {
        file: None
        for folder in folders
        for pid in pids
        if (file := folder / f"flight-{pid}.json").is_file() and file.stat().st_mtime_ns >= begun_ns
    }
    if not files:
        return
    dumps = read_dumps(files)
    for file in files:
        found.read(file)
    found.unusual = frozenset(
        dump.pid for dump in dumps for group in dump.groups if _ends_unusually(group.operations)
    )
    last: dict[tuple[int, int, tuple[int, ...]], list[tuple[int, int, bool, str]]] = {}
    for dump in dumps:
        for group in dump.groups:
            for one in group.operations[-1:]:
                key = (group.epoch, group.channel, group.members)
                state = (group.rank, one.sequence, one.state == RUNNING, one.operation)
                last.setdefault(key, []).append(state)
    for (_, _, members), states in last.items():
        newest = max(sequence for _, sequence, _, _ in states)
        waiting = [(rank, name) for rank, sequence, runs, name in states if sequence == newest and runs]
        behind = [members[rank] for rank, sequence, _, _ in states if sequence < newest]
        if waiting and behind:
            operation = f"{waiting[0][1]} #{newest}"
            inside = tuple(members[rank] for rank, _ in waiting)
            found.missing.append(Missing(operation=operation, ranks=tuple(sorted(behind)), waiting=inside))


def _ends_unusually(operations: Sequence[Operation]) -> bool:
    """Whether the last operation, which failed, has a name and size that none before it had."""
    if len(operations) < 2 or operations[-1].state != FAILED:
        return False
    last = (operations[-1].operation, operations[-1].nbytes)
    return all((one.operation, one.nbytes) != last for one in operations[:-1])


# ---- from records to evidence


def _evidence(found: _Gathered) -> Evidence:
    launchers = [_launcher(launch) for launch in found.launches]
    deaths = [death for launch in found.launches for death in _deaths(launch, found.unusual)]
    hangs = [hang for launch in found.launches for hang in _hangs(launch)]
    return Evidence(
        launchers=tuple(launchers),
        deaths=tuple(sorted(deaths, key=lambda death: death.at_ns)),
        hangs=tuple(sorted(hangs, key=lambda hang: hang.at_ns)),
        begins=tuple(sorted(begin for launch in found.launches for begin in _begins(launch))),
        missing=tuple(found.missing),
        waits=found.waits,
        slow=tuple(sorted(found.slow, key=lambda one: one.at_ns)),
        not_finite=found.not_finite,
        sources=tuple(found.sources),
    )


def _launcher(launch: Launch) -> Launcher:
    began, end = launch.began, launch.end
    alive, rebooted = _is_alive(began) if launch.is_live is None else (launch.is_live, False)
    steps = [line.step for line in launch.lines if isinstance(line, RankEnded | HangFound | LaunchEnded)]
    known = Launcher(
        host=began.node or began.host,
        job=began.job,
        pid=began.pid,
        command=shlex.join(began.command),
        began_ns=began.unix_ns,
        last_ns=launch.last_ns,
        ranks=began.ranks,
        nodes=began.nodes,
        step=max((step for step in steps if step is not None), default=None),
        alive=alive if end is None else False,
        rebooted=rebooted and end is None,
        notes=tuple(line.text for line in launch.lines if isinstance(line, Noted) and line.rank is None),
    )
    if end is None:
        return known
    return replace(
        known,
        outcome=end.outcome,
        reason=end.reason,
        cause=end.cause,
        exit_code=end.exit_code,
        records=end.records,
        restarts=end.restarts,
    )


def _is_alive(began: LaunchBegan) -> tuple[bool | None, bool]:
    """Return whether its process is there, None if that is unknown, and whether its host has booted since."""
    if began.host != socket.gethostname() or not began.boot_id:
        return None, False
    if began.boot_id != boot_id():
        return False, True
    return bool(began.process_ticks) and started(began.pid) == began.process_ticks, False


def _begins(launch: Launch) -> Iterable[tuple[int, int, str]]:
    """Yield when each rank began, and where."""
    began = launch.began
    named = began.node in ("", began.host)
    where = began.host if named else f"{began.node} ({began.host})"
    for line in launch.lines:
        if isinstance(line, RankBegan):
            yield line.at_ns + launch.shift_ns, line.rank, where


def _deaths(launch: Launch, unusual: frozenset[int]) -> Iterable[Death]:
    batch, met = 0, set[int]()  # of views: their epochs, which all nodes of a job have in common
    for line in launch.lines:
        match line:
            case RanksMet():
                batch, met = line.epoch, set(line.ranks)
            case RankEnded():
                yield Death(
                    rank=line.rank,
                    incarnation=line.incarnation,
                    at_ns=line.at_ns + launch.shift_ns,
                    code=line.code,
                    reason=line.reason,
                    next_step=line.next_step,
                    normal=line.normal,
                    expected=line.expected,
                    no_memory=line.no_memory,
                    failure=failure_of(line.words, line.cause) if line.code > 0 or line.cause else None,
                    words=line.words,
                    step=line.step,
                    batch=batch,
                    met=line.rank in met,
                    unusual=line.pid in unusual,
                    host=launch.began.node or launch.began.host,
                )
            case _:
                pass


def _hangs(launch: Launch) -> Iterable[Hang]:
    for line in launch.lines:
        if isinstance(line, HangFound):
            yield Hang(
                at_ns=line.at_ns + launch.shift_ns,
                text=line.text,
                ranks=line.ranks,
                stack=tuple(place for frame in line.stack if (place := place_of(frame)) is not None),
                process=line.process,
                over=line.over,
                step=line.step,
            )
