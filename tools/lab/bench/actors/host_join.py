"""Measure what a joining host costs the members of a running job: the longest gap between steps, by cause.

    python -m zbmd.tools.lab.bench.actors.host_join [--hosts N] [--joins K] [--json] [-- ARGUMENT ...]

The nodes of all hosts run on this machine, with one rank each, linked by TCP as between hosts. The last
host's node is killed with its rank; the others go on. Then it is started again and joins the running job.
That is done `--joins` times. The times are those of the step-commit machines, from their captures: one
monotonic clock for all. Arguments behind `--` are those of `python -m zbmd.training`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from zbmd.tools.bench.stats import median
from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.tools.lab.hosts.job import MODEL, JobDemo, Layout
from zbmd.transport.capture.reader import ProcessLog, open_log
from zbmd.transport.capture.records import EventTaken, NoteRecord, StreamDeclared
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_NS_DEFAULT
from zbmd.transport.errors import UserError

STEPS: Final = 1_000_000
"""More than are taken: the job is ended when all joins are done."""
HOSTS_MAX: Final = 8
JOINS_MAX: Final = 100
STEPS_AROUND: Final = 15
"""Steps before and behind a join in which its gap is looked for, and which say what an ordinary one takes."""
STEPS_JOINING: Final = 2
"""Of these, the newcomer's first without and with a part of the work."""
STEP_COMMIT: Final = "step-commit"


@dataclass(frozen=True, slots=True)
class LoopbackHost:
    """A host that is none: its processes run on this machine, and reach the others by TCP."""

    name: str
    address: str
    home: Path
    captures: Path

    def popen(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """See `zbmd.tools.lab.hosts.netns.LabHost`."""
        own = {
            "ZBMD_COOKIE_FILE": str(self.home / "cookie"),
            "XDG_RUNTIME_DIR": str(self.home),
            "ZBMD_LINKS": "tcp",
            "ZBMD_CAPTURE": str(self.captures),
        }
        return subprocess.Popen(command, env={**os.environ, **own, **(environment or {})}, **options)


@dataclass(slots=True)
class CommitTimeline:
    """Events of one process's step-commit machine, ns (CLOCK_MONOTONIC)."""

    rank: int
    incarnation: int
    epochs: dict[int, dict[str, int]] = field(default_factory=lambda: defaultdict(dict[str, int]))
    """By epoch, when it was first `ready`, `entered`, `grouped`, `met`, `agreed`, `pulled` and `computed`."""
    commits: dict[int, int] = field(default_factory=dict[int, int])
    """By version, when the last thing came that its commit takes."""
    epoch_of: dict[int, int] = field(default_factory=dict[int, int])


def story_of(log: ProcessLog) -> CommitTimeline:
    """Read one process's log."""
    name, _, incarnation = log.name.partition("#")
    story = CommitTimeline(int(name.removeprefix("rank")), int(incarnation))
    streams: set[int] = set()
    for entry in log.entries():
        match entry.record:
            case StreamDeclared(stream=stream, machine=machine) if machine == STEP_COMMIT:
                streams.add(stream)
            case NoteRecord(at_ns=at_ns, text=text):
                _note(story, at_ns, text)
            case EventTaken(stream=stream, at_ns=at_ns, tag=tag, fields=fields) if stream in streams:
                _event(story, at_ns, tag, msgspec.msgpack.decode(fields))
            case _:
                pass
    return story


def _note(story: CommitTimeline, at_ns: int, text: str) -> None:
    words = text.split()
    if text.startswith("entered the view of epoch "):
        story.epochs[int(words[5].rstrip(":"))]["entered"] = at_ns
    elif text.startswith("made the group of epoch "):
        story.epochs[int(words[5])]["grouped"] = at_ns


def _event(story: CommitTimeline, at_ns: int, tag: str, fields: dict[str, Any]) -> None:
    epoch = fields.get("epoch", 0)
    moments = story.epochs[epoch]
    match tag:
        case "EpochReady":
            moments["ready"] = at_ns
        case "EpochInstalled":
            moments["met"] = at_ns
        case "ReportReceived":
            moments["agreed"] = at_ns
        case "FetchEnded":
            moments["pulled"] = at_ns
        case "StepEnded" | "VoteReceived":
            if tag == "StepEnded":
                moments.setdefault("computed", at_ns)
            version = fields["version"]
            if story.epoch_of.get(version, 0) <= epoch:
                story.commits[version], story.epoch_of[version] = at_ns, epoch
        case _:
            pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """One join. `phases`: what of the gap at its boundary went where, ms, in order of time.

    gap_ms: the longest between two steps from the join on; calm_gap_ms: of as many before, so that what a
    busy machine does is seen beside it; step_ms, step_after_ms: an ordinary step before and afterwards.
    """

    gap_ms: float
    calm_gap_ms: float
    step_ms: float
    step_after_ms: float
    phases: dict[str, float]

    @property
    def steps(self) -> float:
        """The longest gap, in ordinary steps."""
        return self.gap_ms / self.step_ms

    @property
    def calm_steps(self) -> float:
        """The longest gap before it, in ordinary steps."""
        return self.calm_gap_ms / self.step_ms


def join_of(old: CommitTimeline, new: CommitTimeline) -> Joined | None:
    """Return what the join of `new` cost `old`, an earlier member; None if they never stepped together."""
    epoch = next((e for e in sorted(new.epochs) if "computed" in new.epochs[e]), None)
    if epoch is None or "computed" not in old.epochs.get(epoch, {}):
        return None
    first = min(version for version, of in old.epoch_of.items() if of == epoch)
    before = _gaps_ms(old, range(first - 1 - STEPS_AROUND, first))
    behind = _gaps_ms(old, range(first - 1, first + STEPS_AROUND))
    began, here, there = old.commits[first - 1], old.epochs[epoch], new.epochs[epoch]
    moments = {
        "old: view entered": here.get("entered"),
        "old: group made": here.get("grouped"),
        "old: epoch began": here.get("met"),
        "old: reports are in": here.get("agreed"),
        "old: its step computed": here.get("computed"),
        "old: first step committed": old.commits[first],
        "new: could enter": there.get("ready"),
        "new: view entered": there.get("entered"),
        "new: group made": there.get("grouped"),
        "new: epoch began": there.get("met"),
        "new: reports are in": there.get("agreed"),
        "new: state pulled": there.get("pulled"),
        "new: its step computed": there.get("computed"),
        "old: second step committed": old.commits.get(first + 1),
    }
    phases = {what: (at_ns - began) / 1e6 for what, at_ns in moments.items() if at_ns is not None}
    return Joined(
        gap_ms=max(behind),
        calm_gap_ms=max(before),
        step_ms=median(before),
        step_after_ms=median(behind[STEPS_JOINING:]),
        phases=phases,
    )


def _gaps_ms(story: CommitTimeline, versions: range) -> list[float]:
    times = [story.commits[version] for version in versions if version in story.commits]
    return [(b - a) / 1e6 for a, b in pairwise(times)]


def joins_of(captures: Path) -> list[Joined]:
    """All joins into the job that was running, from the captures of all ranks."""
    lives: dict[int, list[CommitTimeline]] = defaultdict(list)
    for log in open_log(captures).processes:
        story = story_of(log)
        lives[story.rank].append(story)
    (first, *_) = (stories[0] for _, stories in sorted(lives.items()) if len(stories) == 1)
    newcomers = [story for stories in lives.values() if len(stories) > 1 for story in stories]
    found = [join_of(first, story) for story in sorted(newcomers, key=lambda s: s.incarnation)[1:]]
    return [joined for joined in found if joined is not None]


def run(hosts: int, joins: int, arguments: Sequence[str]) -> list[Joined]:
    """Form a cluster, have its last host join `joins` times. Raises `ZbmdError`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zbmd-bench-")))
        places: list[LoopbackHost] = []
        for number in range(hosts):
            home = folder / f"host{number}"
            home.mkdir(mode=0o700)
            places.append(LoopbackHost(f"host{number}", _address(number), home, folder / "captures"))
        layout = Layout(ranks_per_node=1, nodes_min=hosts - 1, nodes_max=hosts)
        demo = JobDemo(places, STEPS, layout, RECOVERY_BUDGET_NS_DEFAULT, arguments)
        stack.callback(demo.close)
        demo.start(folder / "run")
        for _ in range(joins):
            demo.kill_and_start()
        demo.close()
        return joins_of(folder / "captures")


def _address(number: int) -> str:
    """A loopback address at which the demo's port is free."""
    return f"127.77.{os.getpid() % 250 + 1}.{number + 1}"


def table(found: Sequence[Joined]) -> str:
    """As a person reads it."""
    columns: dict[str, tuple[int, Callable[[Joined], float]]] = {
        "step ms": (1, lambda one: one.step_ms),
        "afterwards": (1, lambda one: one.step_after_ms),
        "longest gap ms": (1, lambda one: one.gap_ms),
        "steps": (2, lambda one: one.steps),
        "steps, before it": (2, lambda one: one.calm_steps),
    }

    def row(name: str, values: Iterable[float]) -> str:
        cells = zip(columns.items(), values, strict=True)
        return f"{name:>6}" + "".join(f"{v:>{len(n) + 3}.{digits}f}" for (n, (digits, _)), v in cells)

    lines = [f"{'join':>6}" + "".join(f"   {name}" for name in columns)]
    lines += [row(str(i), [of(one) for _, of in columns.values()]) for i, one in enumerate(found, 1)]
    lines.append(row("median", [median([of(one) for one in found]) for _, of in columns.values()]))
    lines.append("ms behind the last step without the newcomer, medians:")
    names = list(dict.fromkeys(name for one in found for name in one.phases))
    middles = {name: median([o.phases[name] for o in found if name in o.phases]) for name in names}
    lines += [f"  {name:32}{ms:>9.1f}" for name, ms in sorted(middles.items(), key=lambda item: item[1])]
    return "\n".join(lines)


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = script_parser("lab.bench.actors.host_join", __doc__)
    parser.add_argument("--hosts", type=int, default=3, help="default: 3")
    parser.add_argument("--joins", type=int, default=5, help="default: 5")
    add_json(parser)
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="of the training job")
    given = parser.parse_args(argv)
    if not 2 <= given.hosts <= HOSTS_MAX or not 1 <= given.joins <= JOINS_MAX:
        raise UserError(f"--hosts is 2..{HOSTS_MAX}, --joins 1..{JOINS_MAX}.")
    found = run(given.hosts, given.joins, given.arguments or MODEL)
    if given.json:
        for one in found:
            print(
                json.dumps(
                    {
                        "gap_ms": one.gap_ms,
                        "step_ms": one.step_ms,
                        "steps": one.steps,
                        "step_after_ms": one.step_after_ms,
                        "calm_steps": one.calm_steps,
                        "phases_ms": one.phases,
                    }
                )
            )
    else:
        print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, host {socket.gethostname()}")
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
