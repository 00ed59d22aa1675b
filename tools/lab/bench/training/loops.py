"""Measure resilient loops of PyTorch: the cost of a step, and the time from a kill to the next commit.

    python -m zbmd.tools.lab.bench.training.loops cost        DDP and FSDP2, 2 ranks, 10 M parameters
    python -m zbmd.tools.lab.bench.training.loops cost --held   the same, each step kept beyond the ranks
    python -m zbmd.tools.lab.bench.training.loops recovery    4 ranks, 10 M parameters
    python -m zbmd.tools.lab.bench.training.loops recovery --spare-ranks 1
    python -m zbmd.tools.lab.bench.training.loops recovery --kinds ddp --ranks 2 --width 3072 --layers 9
    python -m zbmd.tools.lab.bench.training.loops recovery --kinds fsdp2 --ranks 2 --width 3072 --layers 19

The last two have 1 GiB of state a rank: 12 bytes a parameter, float32 with two moments, all on each rank or a
half. `cost` makes steps of the same model without and with `zbmd.torch.resilient` in turns, in the same
processes, and says what the parts of a resilient one take. `recovery` kills a rank again and again in one
run, each time after some steps, and with `--spare-ranks` once so many spares wait, and says what the phases
between took.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import uvloop

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankDown, RankStarted, SpareLost, SpareReady
from zbmd.actors.process.log import log_to_stderr
from zbmd.actors.process.output import OutputLine
from zbmd.actors.rank.environment import SPARE_RANKS_VARIABLE
from zbmd.actors.view import Outcome
from zbmd.tools.lab.bench.training.loop_parts import Parts, table
from zbmd.tools.node.run import snapshot_keeper
from zbmd.transport.errors import UserError

MODULE: Final = "zbmd.tools.lab.bench.training.loops"
KINDS: Final = ("ddp", "fsdp2")
PRELOAD: Final = ("torch", "torch._dynamo", "zbmd.training.torch.resilient", "zbmd.tools.node.run")
"""What `zbmd.torch.run` imports before it forks ranks, and what this module imports."""
RANK_VARIABLE: Final = "ZBMD_LOOPS_RANK"
"""It is set where this module is to be a rank."""
STEPS_BEFORE: Final = 4
"""Undisturbed steps before each kill."""
WARMUP: Final = 3
LAST_PHASE: Final = "step"
HELD_S: Final = 60.0
"""The time for which the state outlives a run that fails."""


# ---- in the ranks


class Trained:
    """A model of `layers` linear layers of `width`, its optimizer, and a step."""

    def __init__(self, kind: str, width: int, layers: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.manual_seed(0)
        nn = self._torch.nn
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        _passed("model")
        if kind == "ddp":
            self.model = importlib.import_module("torch.nn.parallel").DistributedDataParallel(model)
        else:
            fsdp: Any = importlib.import_module("torch.distributed.fsdp")
            meshes: Any = importlib.import_module("torch.distributed.device_mesh")
            dist: Any = importlib.import_module("torch.distributed")
            mesh = meshes.init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in model:
                fsdp.fully_shard(layer, mesh=mesh)
            self.model = fsdp.fully_shard(model, mesh=mesh)
        self.optimizer = self._torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._x = self._torch.randn(64, width)
        _passed(kind)

    def step(self) -> None:
        """Make a step."""
        self.optimizer.zero_grad()
        self.model(self._x).square().mean().backward()
        self.optimizer.step()


def rank_main() -> None:
    """Run a rank: kind, what, width, layers, turns, steps."""
    kind, what, *numbers = sys.argv[1:]
    width, layers, turns, steps = map(int, numbers)
    _passed("begun")
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    loops: Any = importlib.import_module("zbmd.torch")
    torch.set_num_threads(1)
    _passed("imports")
    dist.init_process_group("zbmd")
    _passed("group")
    parts = Parts() if what == "cost" else None
    plain = Trained(kind, width, layers) if what == "cost" else None
    ours = Trained(kind, width, layers)
    run = loops.resilient(ours.model, ours.optimizer)
    _passed("state")
    if plain is None or parts is None:
        continuity: Any = importlib.import_module("zbmd.collectives.torch.continuity").CONTINUITY
        first = run.steps
        while run.steps < steps:
            run.call(ours.step)
            if run.steps == first + 1:
                _passed("step")
            print(f"step {run.steps} {continuity.epoch} {time.monotonic_ns()}", flush=True)
        return
    plain_step, our_step = plain.step, lambda: run.call(ours.step)
    _timed(plain_step, WARMUP)
    _timed(our_step, WARMUP)
    parts.reset()
    for turn in range(turns):
        for name, step in (("plain", plain_step), ("resilient", our_step))[:: 1 if turn % 2 else -1]:
            used = time.process_time_ns()
            took = _timed(step, steps)
            print(f"turn {name} {took} {time.process_time_ns() - used}", flush=True)
    print("\n".join(parts.lines(turns * steps)), flush=True)
    dist.destroy_process_group()


def _passed(phase: str) -> None:
    """Print that a phase of this process has ended: the time, its CPU time (ns) and its page faults."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_ns = round((used.ru_utime + used.ru_stime) * 1e9)
    print(f"phase {os.getpid()} {phase} {time.monotonic_ns()} {cpu_ns} {used.ru_minflt}", flush=True)


def _timed(step: Callable[[], object], steps: int) -> int:
    """Return the nanoseconds of so many steps."""
    began = time.monotonic_ns()
    for _ in range(steps):
        step()
    return time.monotonic_ns() - began


# ---- beside them


@dataclass(slots=True)
class Phases:
    """Phases between a kill and the end of the replacement's first step, one kill after the other."""

    found: dict[str, list[tuple[float, float, int]]] = field(
        default_factory=dict[str, list[tuple[float, float, int]]]
    )
    """Of each phase: seconds, CPU seconds of the replacement, its page faults."""
    _last_ns: int = 0
    _pid: int = 0
    _used: tuple[int, int] = (0, 0)
    """CPU time (ns) and page faults of the replacement by the last phase."""
    _early: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    def begin(self, at_ns: int) -> None:
        """A rank is killed."""
        self._last_ns, self._pid, self._used = at_ns, 0, (0, 0)

    def host(self, phase: str, at_ns: int, pid: int = 0) -> None:
        """Take what the host has seen: the end of a process, or the start of the replacement `pid`."""
        if not self._last_ns:
            return
        self._end(phase, at_ns, 0, 0)
        if pid:
            self._pid = pid
            early, self._early = self._early, []
            for _, line in sorted(early):
                self.rank(line)

    def rank(self, line: str) -> None:
        """Take a line of `_passed`, which may come before the host's report of the process."""
        _, pid, phase, *numbers = line.split()
        at_ns, cpu_ns, faults = map(int, numbers)
        if int(pid) != self._pid:
            self._early.append((at_ns, line))
            return
        (cpu_before, faults_before), self._used = self._used, (cpu_ns, faults)
        if at_ns > self._last_ns > 0:  # a spare has passed some of them before
            self._end(phase, at_ns, cpu_ns - cpu_before, faults - faults_before)
            self._last_ns = 0 if phase == LAST_PHASE else self._last_ns

    def _end(self, phase: str, at_ns: int, cpu_ns: int, faults: int) -> None:
        row = (at_ns - self._last_ns) / 1e9, cpu_ns / 1e9, faults
        self.found.setdefault(phase, []).append(row)
        self._last_ns = max(self._last_ns, at_ns)

    def table(self) -> list[str]:
        """Return a line for each phase: medians of the time, the CPU time, and the page faults."""
        return [
            f"  {phase:8}{took:6.2f} s; the replacement's CPU {cpu:5.2f} s, {faults:9,.0f} page faults"
            for phase, rows in self.found.items()
            for took, cpu, faults in [map(statistics.median, zip(*rows, strict=True))]
        ]


@dataclass(slots=True)
class Watch:
    """The output of a run: it keeps the lines of rank 0, and kills ranks if that is asked for."""

    kills: int = 0
    spares: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    host: Host | None = None
    lines: list[str] = field(default_factory=list[str])
    steps_s: list[float] = field(default_factory=list[float])
    recoveries_s: list[float] = field(default_factory=list[float])
    _last: tuple[int, int] = (0, 0)
    """Epoch and time of the last committed step of a rank."""
    _calm: int = 0
    _killed_ns: int = 0
    _waiting: int = 0
    phases: Phases = field(default_factory=Phases)

    async def observe(self, event: HostEvent) -> None:
        """Note deaths and starts, and count the spares that wait for a rank."""
        if isinstance(event, RankDown):
            self.phases.host("death", event.confirmed_ns)
        if isinstance(event, RankStarted):
            self.phases.host("spare" if event.was_spare else "fork", event.at_ns, event.pid)
        self._waiting += isinstance(event, SpareReady)
        self._waiting -= isinstance(event, SpareLost) or (isinstance(event, RankStarted) and event.was_spare)

    async def write_line(self, line: OutputLine) -> None:
        """Take a line."""
        text = line.text.decode(errors="replace")
        self.lines.append(text)
        if text.startswith("phase "):
            self.phases.rank(text)
        if text.startswith("step ") and self.kills:
            _, _, epoch, at_ns = text.split()
            self._stepped(int(epoch), int(at_ns))

    def _stepped(self, epoch: int, at_ns: int) -> None:
        assert self.host is not None
        if self._killed_ns:
            if epoch > self._last[0]:
                self.recoveries_s.append((at_ns - self._killed_ns) / 1e9)
                self._killed_ns, self._calm = 0, 0
                self._last = epoch, at_ns
            return
        ranks = len(self.host.ranks)
        if epoch == self._last[0] and at_ns > self._last[1]:
            self._calm += 1
            if self._calm % ranks == 0 and self._calm > ranks:
                self.steps_s.append((at_ns - self._last[1]) / 1e9)
        if self._calm % ranks == 0:
            self._last = epoch, at_ns
        if self._calm >= STEPS_BEFORE * ranks and self._waiting >= self.spares:
            if len(self.recoveries_s) == self.kills:
                self.host.stop("all kills are measured")
                self._calm = -sys.maxsize
                return
            self._last = max(self._last, (epoch, at_ns))
            self._killed_ns = time.monotonic_ns()
            self.phases.begin(self._killed_ns)
            os.kill(self.host.ranks[self.rng.randrange(ranks)].pid, signal.SIGKILL)


async def run_of(arguments: argparse.Namespace, kind: str, watch: Watch) -> None:
    """Run the ranks to their end. Raises `UserError` if they fail."""
    steps = arguments.steps if arguments.what == "cost" else 1 << 30
    numbers = (arguments.width, arguments.layers, arguments.turns, steps)
    config = HostConfig(
        target=MODULE,
        is_module=True,
        arguments=(kind, arguments.what, *map(str, numbers)),
        world_size=arguments.ranks or (2 if arguments.what == "cost" else 4),
        arena_bytes=256 << 20,
        max_restarts=arguments.kills,
        restart_window_s=3600.0,
        environment={RANK_VARIABLE: "1", SPARE_RANKS_VARIABLE: str(arguments.spare_ranks)},
        preload=PRELOAD,
    )
    keeper = snapshot_keeper(config, HELD_S, watch.lines.append) if arguments.held else None
    host = watch.host = Host(config, output=watch, observer=watch.observe, snapshots=keeper)
    ended = await host.run()
    if ended.outcome not in (Outcome.SUCCEEDED, Outcome.STOPPED):
        raise UserError(f"{kind} did not end well: {ended.reason}\n" + "\n".join(watch.lines[-20:]))


def cost_of(lines: Sequence[str], steps: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return medians of a step without and with `resilient`, seconds: of its time, and of a rank's CPU."""
    turns: dict[str, list[tuple[float, float]]] = {"plain": [], "resilient": []}
    for line in lines:
        match line.split():
            case ["turn", name, took, used]:
                turns[name].append((int(took) / 1e9 / steps, int(used) / 1e9 / steps))
            case _:
                pass
    plain, ours = ([*map(statistics.median, zip(*rows, strict=True))] for rows in turns.values())
    return (plain[0], ours[0]), (plain[1], ours[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a row for each kind. Exit code 1: a run failed."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("cost", "recovery"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--ranks", type=int, default=0, help="2 of cost, 4 of recovery")
    parser.add_argument("--width", type=int, default=1024, help="of a layer (%(default)s)")
    parser.add_argument("--layers", type=int, default=10, help="of width × width (%(default)s)")
    parser.add_argument("--turns", type=int, default=10, help="of each, in cost (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of a turn, in cost (%(default)s)")
    parser.add_argument("--held", action="store_true", help="keep each step in memory beyond the ranks")
    parser.add_argument("--spare-ranks", type=int, default=0, help="as of zbmd-node run (%(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="in recovery (%(default)s)")
    arguments = parser.parse_args(argv)
    log_to_stderr()
    parameters = arguments.width**2 * arguments.layers
    for kind in arguments.kinds:
        recovers = arguments.what == "recovery"
        watch = Watch(
            kills=arguments.kills if recovers else 0, spares=arguments.spare_ranks if recovers else 0
        )
        try:
            uvloop.run(run_of(arguments, kind, watch))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        words = f"{kind}: {parameters / 1e6:.1f} M parameters{', held' if arguments.held else ''}"
        if arguments.what == "cost":
            (plain_s, ours_s), used_s = cost_of(watch.lines, arguments.steps)
            more = (ours_s / plain_s - 1) * 100
            print(f"{words}, step {plain_s * 1e3:.2f} ms, resilient {ours_s * 1e3:.2f} ms: {more:+.1f} %")
            print(f"  CPU of a rank: {used_s[0] * 1e3:.2f} ms, resilient {used_s[1] * 1e3:.2f} ms")
            print("\n".join(table(watch.lines)), flush=True)
        else:
            step_s = statistics.median(watch.steps_s)
            told = ", ".join(f"{each:.2f}" for each in watch.recoveries_s)
            print(f"{words}, step {step_s:.3f} s, from kill to the next committed step {told} s")
            print("\n".join(watch.phases.table()), flush=True)
    return 0


if __name__ == "__main__":
    if os.environ.get(RANK_VARIABLE):
        rank_main()
    else:
        sys.exit(main())
