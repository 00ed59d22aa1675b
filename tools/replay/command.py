"""`zbmd replay`: play a captured run again, say whether it is the same, and tell its story."""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec
import rich.console
import rich.progress

from zbmd.actors.replay.machine import allow_modules
from zbmd.tools.replay.hang import Hang, find_hang
from zbmd.tools.replay.players import HELLO, secrets_for
from zbmd.tools.replay.run import (
    ProcessReplay,
    Replay,
    is_of_group,
    open_logs,
    records_of,
    replay_capture,
    write_test,
)
from zbmd.tools.replay.story import clock_lines, clock_offsets, clock_time, story, story_text
from zbmd.tools.replay.trace import write_trace
from zbmd.transport.capture import (
    ClockSkew,
    Divergence,
    Entry,
    Filter,
    Identical,
    Incomplete,
    ProcessLog,
    merged,
)
from zbmd.transport.capture.records import EventTaken
from zbmd.transport.errors import UserError

EXAMPLES = """examples:
  zbmd-node run --capture run.zlog train.py       record a run
  zbmd replay run.zlog                            is it the same when played again?
  zbmd replay run.zlog --until hang               who waits for whom at its end, and for what
  zbmd replay run.zlog --around 103 --show        what happened around step 103, on all ranks
  zbmd replay run.zlog --rank 2 --group group0/3  one rank's part in the group of epoch 3
  zbmd replay run.zlog --as-test tests/test_vote_lost.py
  zbmd replay run.zlog --export perfetto run.json

exit code: 0 the same, 1 something differs or is damaged, 2 nothing that can be replayed
"""

BAR_RECORDS_MIN = 200_000
"""A replay of fewer records is over before a bar could be read."""
AROUND_STEPS = 1
"""`--around` tells this many steps before and after."""
NOT_REPLAYED = "not replayed: that needs the job's cookie (--cookie FILE)"
SUMMED_KINDS = frozenset({HELLO.name})
"""Machines of which a process has many, told in one line if all are well."""

_TIME = re.compile(r"(\d\d):(\d\d):(\d\d)(\.\d{1,9})?\Z")
_AFTER = re.compile(r"\+(\d+(?:\.\d+)?)s?\Z")


def add_replay(commands: Any) -> None:
    """Add the command to those of `zbmd`; `commands`: what `add_subparsers` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="play a captured run again and compare",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("capture", type=Path, metavar="DIR", help="what --capture was given")
    parser.add_argument(
        "--rank",
        action="append",
        default=[],
        metavar="R",
        help="only this rank (2), or one life of it (2#1), or the host (node); may be repeated",
    )
    parser.add_argument("--group", metavar="NAME/EPOCH", help="only this group's operations, while it lived")
    parser.add_argument(
        "--around", type=int, metavar="STEP", help="up to this step, and tell what is near it"
    )
    parser.add_argument(
        "--until",
        metavar="WHEN",
        help="`hang`: where it hangs; an event, such as PeerEnded: its first; a time: 12:03:10.5 or +2.5s",
    )
    parser.add_argument("--show", action="store_true", help="print the story, one line an event")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--as-test", type=Path, metavar="FILE.py", help="write a pytest regression test")
    parser.add_argument(
        "--export", nargs=2, metavar=("perfetto", "FILE"), help="write a trace for ui.perfetto.dev"
    )
    parser.add_argument(
        "--cookie", type=Path, metavar="FILE", help="the job's cookie, to replay its hellos too"
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this module, which holds actors of the job, to replay them; may be repeated",
    )
    parser.set_defaults(run_command=run_replay)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """Scope of a replay: the logs, their clocks, and the requested time range."""

    logs: list[ProcessLog]
    offsets: dict[str, ClockSkew]
    since_ns: int | None
    until_ns: int | None
    group: str | None
    bound: str
    """The end in words, if it is not the log's."""

    def told(self) -> Iterator[Entry]:
        """The entries of the story, in causal order."""
        wanted = Filter(since_ns=self.since_ns, until_ns=self.until_ns)
        for entry in merged(self.logs, wanted):
            declared = entry.log.streams.get(entry.record.stream)
            if self.group is None or (declared is not None and is_of_group(declared.name, self.group)):
                yield entry


def run_replay(arguments: argparse.Namespace) -> int:
    """`zbmd replay`. Raises `UserError` for what cannot be asked for, `NotACapture` if there is none."""
    if arguments.export is not None and arguments.export[0] != "perfetto":
        raise UserError(f"--export {arguments.export[0]} is not known. Say --export perfetto FILE.")
    allow_modules(*arguments.allow)
    logs, problems = open_logs(arguments.capture, [_process_name(rank) for rank in arguments.rank])
    secrets = secrets_for(arguments.cookie)
    offsets = clock_offsets(logs)
    hang: Hang | None = None
    if arguments.until == "hang":
        hang, until_ns = find_hang(logs, offsets, secrets)
        scope = _Scope(
            logs=logs,
            offsets=offsets,
            since_ns=None,
            until_ns=until_ns + 1,
            group=arguments.group,
            bound="the hang",
        )
    else:
        scope = _scope(logs, offsets, arguments)
    with _progress(records_of(logs)) as on_progress:
        found = replay_capture(
            arguments.capture,
            logs,
            Filter(until_ns=scope.until_ns),
            stream=arguments.group,
            secrets=secrets,
            on_progress=on_progress,
        )
    found.problems += problems
    if arguments.as_test is not None:
        fixture = write_test(arguments.as_test, logs, found, kinds_left_out=SUMMED_KINDS)
        print(f"wrote {arguments.as_test} and {fixture}", file=sys.stderr)
    if arguments.export is not None:
        path = Path(arguments.export[1])
        flows = write_trace(path, scope.told(), logs, offsets)
        print(f"wrote {path}, {flows} messages: open it in https://ui.perfetto.dev", file=sys.stderr)
    if arguments.json:
        print(msgspec.json.encode(_document(found, scope, hang, show=arguments.show)).decode())
    else:
        _print(found, scope, hang, show=arguments.show, out=sys.stdout)
    return found.exit_code


# ---- what was asked for


def _process_name(rank: str) -> str:
    return f"rank{rank}" if rank[:1].isdecimal() else rank


def _scope(logs: list[ProcessLog], offsets: dict[str, ClockSkew], arguments: argparse.Namespace) -> _Scope:
    since_ns: int | None = None
    until_ns: int | None = None
    bound = ""
    if arguments.group is not None:
        since_ns, until_ns = _life_of(arguments.group, logs)
    if arguments.around is not None:
        since_ns, until_ns = _times_around(arguments.around, logs)
        bound = f"step {arguments.around + AROUND_STEPS}"
    if arguments.until is not None:
        until_ns, bound = _until(arguments.until, logs)
    return _Scope(
        logs=logs,
        offsets=offsets,
        since_ns=since_ns,
        until_ns=until_ns,
        group=arguments.group,
        bound=bound,
    )


def _life_of(group: str, logs: Sequence[ProcessLog]) -> tuple[int, int | None]:
    """When the group was made; it has no end of its own."""
    times: list[int] = []
    known: set[str] = set()
    for log in logs:
        anchor = log.segments[0].header.anchor
        for declared in log.streams.values():
            known.add(declared.name)
            if is_of_group(declared.name, group):
                times.append(declared.at_ns + anchor.wall_ns - anchor.monotonic_ns)
    if not times:
        groups = ", ".join(sorted(name for name in known if name.startswith(("group", "elastic")))) or "none"
        raise UserError(f"there is no group {group} in the capture. There are: {groups}.")
    return min(times), None


def _times_around(step: int, logs: Sequence[ProcessLog]) -> tuple[int, int | None]:
    """From the beginning of the step before to the end of the step after, by those that mark steps."""
    since: list[int] = []
    until: list[int] = []
    for log in logs:
        steps = log.steps
        if steps is None or not steps[0] - AROUND_STEPS <= step <= steps[1] + AROUND_STEPS:
            continue
        since += _begin_of(log, max(step - AROUND_STEPS, steps[0]))
        until += _begin_of(log, step + AROUND_STEPS + 1)
    if not since:
        marked = [log.steps for log in logs if log.steps is not None]
        low, high = min((s[0] for s in marked), default=0), max((s[1] for s in marked), default=0)
        told = f"It has steps {low} to {high}." if marked else "No process in it marks steps."
        raise UserError(f"step {step} is not in the capture. {told}")
    return min(since), max(until) if until else None


def _begin_of(log: ProcessLog, step: int) -> list[int]:
    place = log.find_step(step)
    if place is None:
        return []
    return [next(entry.wall_ns for entry in log.entries(place) if entry.number == place.number)]


def _until(when: str, logs: Sequence[ProcessLog]) -> tuple[int, str]:
    """The end that was asked for, ns since 1970, and in words."""
    first_ns = min(log.segments[0].header.anchor.wall_ns for log in logs)
    after = _AFTER.match(when)
    if after is not None:
        return first_ns + round(float(after[1]) * 1e9), f"{after[1]} s after the beginning"
    found = _TIME.match(when)
    if found is not None:
        day = datetime.datetime.fromtimestamp(first_ns / 1e9).replace(microsecond=0)
        at = day.replace(hour=int(found[1]), minute=int(found[2]), second=int(found[3]))
        if at < day:
            at += datetime.timedelta(days=1)  # the run went on past midnight
        return round(at.timestamp()) * 10**9 + round(float(found[4] or 0) * 1e9), when
    for entry in merged(logs):
        if isinstance(entry.record, EventTaken) and entry.record.tag == when:
            return entry.wall_ns + 1, f"the first {when}, of {entry.log.name} at {clock_time(entry.wall_ns)}"
    tags = {e.record.tag for e in merged(logs) if isinstance(e.record, EventTaken)}
    raise UserError(
        f"--until {when} is no time (12:03:10.5, +2.5s), and no event of the capture. "
        f"It has: {', '.join(sorted(tags))}."
    )


# ---- what is printed


class _progress:
    """A bar on a terminal, for a long log; `with` gives what to call as records are read."""

    def __init__(self, records: int) -> None:
        self._records = records
        self._bar: rich.progress.Progress | None = None

    def __enter__(self) -> Callable[[int], None]:
        if not sys.stderr.isatty() or self._records < BAR_RECORDS_MIN:
            return lambda _: None
        bar = self._bar = rich.progress.Progress(
            rich.progress.TextColumn("replaying"),
            rich.progress.BarColumn(bar_width=30),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeRemainingColumn(),
            console=rich.console.Console(stderr=True),
            transient=True,
        )
        task = bar.add_task("", total=self._records)
        bar.start()
        return lambda records: bar.advance(task, records)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _print(found: Replay, scope: _Scope, hang: Hang | None, *, show: bool, out: TextIO) -> None:
    if show:
        print(*clock_lines(scope.logs, scope.offsets), sep="\n", file=out)
        for line in story_text(story(scope.told(), scope.logs, scope.offsets)):
            print(line, file=out)
        print(file=out)
    steps = [process.steps for process in found.processes if process.steps is not None]
    told_steps = f", steps {min(s[0] for s in steps)} to {max(s[1] for s in steps)}" if steps else ""
    records = sum(process.records for process in found.processes)
    bound = f", up to {scope.bound}" if scope.bound else ""
    print(
        f"{found.path}: {_count(len(found.processes), 'process')}, {records:,} records, {found.ran_s:.2f} s"
        f"{told_steps}{bound}",
        file=out,
    )
    for process in found.processes:
        for text in _process_lines(process):
            print(text, file=out)
    for problem in found.problems:
        print(problem, file=out)
    for divergence in found.divergences:
        print(*_divergence_lines(divergence), sep="\n", file=out)
    for incomplete in found.incomplete:
        if incomplete.story:
            print(*_incomplete_lines(incomplete), sep="\n", file=out)
    print(_summary(found), file=out)
    if hang is not None:
        print(*hang.lines(), sep="\n", file=out)


def _process_lines(process: ProcessReplay) -> Iterator[str]:
    counted: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for found in process.verdicts:
        verdict = found.verdict
        if found.kind in SUMMED_KINDS and isinstance(verdict, Identical):
            counted[found.kind] += 1
            events[found.kind] += verdict.events
            continue
        if found.kind in SUMMED_KINDS and isinstance(verdict, Incomplete):
            counted[f"{found.kind} {NOT_REPLAYED}"] += 1
            continue
        yield f"  {process.process:8} {verdict.stream:24} {_verdict_text(verdict)}"
    for kind, count in counted.items():
        name = kind.partition(" ")[0]
        told = f"identical ({events[kind]} events)" if name == kind else NOT_REPLAYED
        yield f"  {process.process:8} {f'{count} of {name}':24} {told}"
    if process.records_before:
        yield f"  {process.process:8} {process.records_before:,} records before these are no longer there"
    if process.damage:
        yield f"  {process.process:8} {process.damage}"
    elif process.ending:
        yield f"  {process.process:8} {process.ending}"


def _verdict_text(verdict: Identical | Divergence | Incomplete) -> str:
    changed = "; its code looks otherwise now" if verdict.code_changed else ""
    match verdict:
        case Identical():
            since = f", from its state in record {verdict.begun_at} on" if verdict.begun_at else ""
            return f"identical ({verdict.events} events{since}){changed}"
        case Incomplete():
            return f"identical as far as it goes ({verdict.events} events): {verdict.reason}{changed}"
        case Divergence():
            step = "" if verdict.step is None else f" in step {verdict.step}"
            return f"DIVERGES{step}, at record {verdict.number}"


def _divergence_lines(divergence: Divergence) -> Iterator[str]:
    step = "before the first step" if divergence.step is None else f"step {divergence.step}"
    yield ""
    yield f"{divergence.process} {divergence.stream} diverges: {step}, record {divergence.number}"
    yield f"  event       {divergence.event}"
    yield f"  expected    {divergence.expected}"
    yield f"  actual      {divergence.actual}"
    yield f"  difference  {divergence.difference}"
    yield "  the story before it"
    for line in divergence.story:
        yield f"    {line}"


def _incomplete_lines(incomplete: Incomplete) -> Iterator[str]:
    yield ""
    yield f"{incomplete.process} {incomplete.stream} cannot be replayed any further: {incomplete.reason}"
    yield "  the story before it"
    for line in incomplete.story:
        yield f"    {line}"


def _summary(found: Replay) -> str:
    identical, events = len(found.identical), sum(verdict.events for verdict in found.identical)
    speed = f"{found.ran_s / found.took_s:.0f}x as fast as it ran" if found.took_s > 0 else ""
    more = len(found.incomplete)
    rest = f"; {more} could not be replayed to their end" if more else ""
    if found.divergences:
        different = len(found.divergences)
        return f"DIFFERENT: {different} of {identical + more + different} machines{rest}"
    took_ms = found.took_s * 1e3
    machines = _count(identical, "machine")
    return f"identical: {machines}, {events:,} events, in {took_ms:,.0f} ms, {speed}{rest}"


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


def _document(found: Replay, scope: _Scope, hang: Hang | None, *, show: bool) -> dict[str, Any]:
    """The JSON of everything that would be printed."""
    document: dict[str, Any] = {
        "capture": str(found.path),
        "exit_code": found.exit_code,
        "took_s": found.took_s,
        "ran_s": found.ran_s,
        "problems": found.problems,
        "processes": [
            {
                **{key: value for key, value in asdict(process).items() if key != "verdicts"},
                "verdicts": [
                    {
                        "kind": item.kind,
                        "verdict": type(item.verdict).__name__.lower(),
                        **asdict(item.verdict),
                    }
                    for item in process.verdicts
                ],
            }
            for process in found.processes
        ],
        "clocks": [asdict(skew) for skew in scope.offsets.values()],
    }
    if hang is not None:
        document["hang"] = asdict(hang)
    if show:
        document["story"] = [asdict(line) for line in story(scope.told(), scope.logs, scope.offsets)]
    return document
