"""Measure recovery with large state: from SIGKILL to the next committed step, in real ranks of one host.

    python -m zbmd.tools.lab.bench.training.recovery             100 M parameters, 2 ranks: dp and ZeRO-3
    python -m zbmd.tools.lab.bench.training.recovery --width 256 --layers 2 --kinds dp --kills 5
    python -m zbmd.tools.lab.bench.training.recovery --width 256 --layers 2 --spare-ranks 1 --imports 2
    python -m zbmd.tools.lab.bench.training.recovery --all       all ranks are killed at once

Each kind of run trains, loses a rank by SIGKILL at a random moment, or all of them, and trains on; that is
repeated `--kills` times in one run. With `--spare-ranks` each kill waits until so many spares wait for a
rank. `--imports` has the script take so many seconds before it trains, as one that imports PyTorch does.
`beyond` is the recovery less an undisturbed step; the phases of a recovery, in their order, are medians: the
kernel has ended the last killed process, the last new one is started, all are in a view, the last of them has
the state, verified and agreed on, and the first step is committed. A process that is started before the last
one has ended waits for it. What the first step of replacements takes by category is the median of their
profiles. The page cost is that of the first and of the second write of a new 1 GiB memfd: on a virtual
machine whose hypervisor has not backed the memory yet, recoveries are as slow as its pages.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import (
    HostEvent,
    RankDown,
    RankReport,
    RankStarted,
    SpareLost,
    SpareReady,
    ViewChanged,
)
from zbmd.actors.process.log import log_to_stderr
from zbmd.actors.process.output import OutputLine
from zbmd.actors.rank.environment import SPARE_RANKS_VARIABLE
from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.train.command import recipe_of
from zbmd.training.profiler.lines import read_profiles
from zbmd.transport.errors import UserError
from zbmd.transport.memory.memfd import available_memory, create_memfd
from zbmd.transport.native._native import Mapping

KINDS = {
    **{"dp": (), "zero1": ("--zero", "1"), "zero2": ("--zero", "2"), "zero3": ("--zero", "3")},
    **{
        mesh: ("--mesh", mesh)
        for mesh in ("dp=2", "pp=2", "tp=2", "dp=4", "pp=4", "tp=4", "dp=2,pp=2", "dp=2,tp=2", "pp=2,tp=2")
    },
    **{
        f"zero{stage} {mesh}": ("--zero", str(stage), "--mesh", mesh)
        for mesh in ("dp=2,pp=2", "dp=2,tp=2", "dp=2,fsdp=2")
        for stage in (1, 3)
    },
}
"""Options of `zbmd train`. A mesh says its ranks."""
GIB = 1 << 30
STEPS_BEFORE = 4
"""Undisturbed steps before each kill, of which the median counts."""
LINES_KEPT = 40
PHASES = ("ended", "started", "in a view", "has the state", "stepped")
SCRIPT = """import runpy, sys, time
time.sleep(float(sys.argv.pop()))
runpy.run_module("zbmd.training.sharded", run_name="__main__")
"""
"""Of a run with `--imports`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCost:
    """The kills of one run. Seconds; `free_bytes`: memory available before the run."""

    kind: str
    ranks: int
    killed: int
    spares: int
    imports_s: float
    parameters: int
    step_s: float
    recoveries_s: tuple[float, ...]
    beyond_s: tuple[float, ...]
    phases_s: dict[str, float]
    first_step_s: dict[str, float]
    page_first_s: float
    page_again_s: float
    free_bytes: int


def page_costs() -> tuple[float, float]:
    """Return the seconds of the first and the second write of a new memfd of 1 GiB, allocation included."""
    began = time.perf_counter()
    fd = create_memfd("page-costs", GIB)
    mapping = Mapping(fd, GIB, GIB)
    os.close(fd)
    words = np.frombuffer(mapping.view(0, GIB, writable=True), np.uint64)
    words[:] = 1
    first = time.perf_counter() - began
    began = time.perf_counter()
    words[:] = 2
    return first, time.perf_counter() - began


def first_steps_s(directory: Path) -> dict[str, float]:
    """Return what the first step of a replacement takes by category, the median of all, in seconds.

    Raises `UserError` without a profile.
    """
    lives = read_profiles(directory)
    found = [life.steps[0].ns for life in lives if life.run.incarnation > 1 and life.steps]
    names = sorted({name for one in found for name in one})
    return {name: statistics.median(one.get(name, 0) for one in found) / 1e9 for name in names}


@dataclass(slots=True)
class _Killer:
    """Observer and output of a run: kills a rank again and again, and times what follows."""

    ranks: int
    kills: int
    rng: random.Random
    spares: int = 0
    at_once: bool = False
    host: Host | None = None
    lines: list[str] = field(default_factory=list[str])
    steps_s: list[float] = field(default_factory=list[float])
    recoveries_s: list[float] = field(default_factory=list[float])
    _last: tuple[int, int] = (0, 0)
    """Epoch and time of the last committed step."""
    _calm: int = 0
    _killed_ns: int = 0
    _ends: dict[str, int] = field(default_factory=dict[str, int])
    """When the phases of the recovery under way have ended."""
    phases_s: list[list[float]] = field(default_factory=list[list[float]])
    """Their durations, in the order of `PHASES`, for each recovery."""
    _waiting: int = 0
    """Spares that wait for a rank."""

    async def write_line(self, line: OutputLine) -> None:
        """Keep a rank's line, in case the run fails."""
        self.lines = [*self.lines[1 - LINES_KEPT :], line.text.decode(errors="replace")]

    async def __call__(self, event: HostEvent) -> None:
        """Take a committed step: it ends a recovery, or it is one before the next kill."""
        self._waiting += isinstance(event, SpareReady)
        self._waiting -= isinstance(event, SpareLost) or (isinstance(event, RankStarted) and event.was_spare)
        if self._killed_ns:
            self._note(event)
        if not isinstance(event, RankReport) or event.payload.get("kind") != "step":
            return
        epoch, at_ns = int(event.payload["epoch"]), int(event.payload["at_ns"])
        if self._killed_ns:
            if epoch > self._last[0]:
                self.recoveries_s.append((at_ns - self._killed_ns) / 1e9)
                self._ends["stepped"] = at_ns
                self.phases_s.append(self._phases())
                shown = ", ".join(
                    f"{name} {s:.2f}" for name, s in zip(PHASES, self.phases_s[-1], strict=True)
                )
                print(f"recovery {self.recoveries_s[-1]:.2f} s: {shown}", file=sys.stderr, flush=True)
                self._killed_ns, self._calm = 0, 0
        elif self._last[1]:
            self._calm += 1
            if self._calm > 1:  # the first step after a recovery is part of it
                self.steps_s.append((at_ns - self._last[1]) / 1e9)
        self._last = epoch, at_ns
        if not self._killed_ns and self._calm >= STEPS_BEFORE and self._waiting >= self.spares:
            self._calm = 0
            if len(self.recoveries_s) == self.kills:
                assert self.host is not None
                self.host.stop("all kills are measured")
                return
            later_s = self.rng.random() * statistics.median(self.steps_s)
            asyncio.get_running_loop().call_later(later_s, self._kill)
            self._calm = -sys.maxsize

    def _note(self, event: HostEvent) -> None:
        """Take the end of a phase: the last such event before the first step counts."""
        match event:
            case RankDown(confirmed_ns=at_ns):
                self._ends["ended"] = at_ns
            case RankStarted(at_ns=at_ns):
                self._ends["started"] = at_ns
            case ViewChanged(at_ns=at_ns):
                self._ends["in a view"] = at_ns
            case RankReport(payload={"kind": "adopted", "at_ns": int(at_ns)}):
                self._ends["has the state"] = max(at_ns, self._ends.get("has the state", 0))
            case _:
                pass

    def _phases(self) -> list[float]:
        found, last_ns = list[float](), self._killed_ns
        for name in PHASES:
            at_ns = max(last_ns, self._ends.get(name, last_ns))
            found.append((at_ns - last_ns) / 1e9)
            last_ns = at_ns
        return found

    def _kill(self) -> None:
        assert self.host is not None
        self._killed_ns, self._ends = time.monotonic_ns(), {}
        for rank in range(self.ranks) if self.at_once else [self.rng.randrange(self.ranks)]:
            self.host.send_signal(rank, signal.SIGKILL)


async def measure(
    directory: Path,
    *,
    kind: str,
    ranks: int,
    kills: int,
    seed: int,
    shape: Sequence[str],
    parameters: int,
    spares: int = 0,
    imports_s: float = 0.0,
    at_once: bool = False,
) -> RecoveryCost:
    """Train, kill a rank or all of them at once, and measure. Raises `UserError` if the run fails."""
    free_bytes, (first_s, again_s) = available_memory().nbytes, page_costs()
    killer = _Killer(ranks, kills, random.Random(seed), spares, at_once)
    killed = ranks if at_once else 1
    data = write_text(directory / "text")
    arguments = [*shape, *KINDS[kind], "--steps", "9999"]
    arguments += ["--data", str(data), "--out", str(directory / "run")]
    arguments += ["--checkpoint-every", "0", "--evaluate-every", "0"]
    recipe = recipe_of(arguments, ranks=ranks).encode()
    script = directory / "script.py"
    script.write_text(SCRIPT)
    config = HostConfig(
        target=str(script) if imports_s else "zbmd.training.sharded",
        is_module=not imports_s,
        arguments=(recipe, *([str(imports_s)] if imports_s else [])),
        environment={SPARE_RANKS_VARIABLE: str(spares)},
        world_size=ranks,
        max_restarts=kills * killed,
        restart_window_s=3600.0,
        preload=("zbmd.training.sharded.run",),
    )
    host = killer.host = Host(config, output=killer, observer=killer)
    ended = await host.run()
    if len(killer.recoveries_s) != kills:
        raise UserError(f"{kind} did not end well: {ended.reason}\n" + "\n".join(killer.lines))
    step_s = statistics.median(killer.steps_s)
    return RecoveryCost(
        kind=kind,
        ranks=ranks,
        killed=killed,
        spares=spares,
        imports_s=imports_s,
        parameters=parameters,
        step_s=step_s,
        recoveries_s=tuple(killer.recoveries_s),
        beyond_s=tuple(recovery - step_s for recovery in killer.recoveries_s),
        phases_s=dict(zip(PHASES, map(statistics.median, zip(*killer.phases_s, strict=True)), strict=True)),
        first_step_s=first_steps_s(directory / "run"),
        page_first_s=first_s,
        page_again_s=again_s,
        free_bytes=free_bytes,
    )


def _ranks_of(kind: str, ranks: int) -> int:
    """Return the ranks of a mesh, or `ranks` if the kind is none."""
    sizes = [int(size) for _, _, size in (axis.partition("=") for axis in kind.split(",")) if size]
    return math.prod(sizes) if sizes else ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a row for each kind. Exit code 1: a run failed."""
    parser = argparse.ArgumentParser(
        prog="python -m zbmd.tools.lab.bench.training.recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=["dp", "zero3"])
    parser.add_argument("--ranks", type=int, default=2, help="of dp and ZeRO (%(default)s)")
    parser.add_argument("--shards", type=int, default=2, help="logical shards (%(default)s)")
    parser.add_argument("--kills", type=int, default=3, help="in each run (%(default)s)")
    parser.add_argument("--all", action="store_true", help="kill all ranks at once")
    parser.add_argument("--seed", type=int, default=0, help="of the victims and moments (%(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (%(default)s)")
    parser.add_argument("--spare-ranks", type=int, default=0, help="as of zbmd-node run (%(default)s)")
    parser.add_argument("--imports", type=float, default=0.0, help="seconds before it trains (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print a JSON line for each row")
    arguments = parser.parse_args(argv)
    log_to_stderr()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    width, layers = arguments.width, arguments.layers
    parameters = 12 * layers * width * width
    shape = (
        *("--width", str(width), "--layers", str(layers), "--context", "64", "--heads", "8"),
        *("--shards", str(arguments.shards), "--sequences-per-shard", "1"),
    )
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory(prefix="zbmd-recovery-") as scratch:
            run = measure(
                Path(scratch),
                kind=kind,
                ranks=_ranks_of(kind, arguments.ranks),
                kills=arguments.kills,
                seed=arguments.seed,
                shape=shape,
                parameters=parameters,
                spares=arguments.spare_ranks,
                imports_s=arguments.imports,
                at_once=arguments.all,
            )
            try:
                cost = uvloop.run(run)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
        if arguments.json:
            print(msgspec.json.encode(asdict(cost)).decode(), flush=True)
            continue
        print(
            f"{kind}: {parameters / 1e6:.0f} M parameters, {cost.killed} of {cost.ranks} ranks killed, "
            f"{cost.spares} spares, "
            f"step {cost.step_s:.2f} s, "
            f"recovery {', '.join(f'{s:.2f}' for s in cost.recoveries_s)} s, beyond the step "
            f"{', '.join(f'{s:.2f}' for s in cost.beyond_s)} s; "
            f"{', '.join(f'{name} {s:.2f}' for name, s in cost.phases_s.items())} s; "
            f"first step {', '.join(f'{name} {s:.2f}' for name, s in cost.first_step_s.items())} s; "
            f"1 GiB of new pages {cost.page_first_s:.2f}, "
            f"again {cost.page_again_s:.2f} s; {cost.free_bytes / GIB:.1f} GiB free",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
