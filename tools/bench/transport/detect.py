"""`zbmd bench detect`: how soon a SIGKILL is noticed, and how soon this kernel could tell of it at all.

Each trial kills a fresh victim; the time runs from just before kill(2), in the process that kills, to what
the survivor took down, on the one CLOCK_MONOTONIC of the host. A trial of the floor (peers/notice_floor.c),
with its own victim of as much memory, follows each of ours while the survivor goes on with what it does.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zbmd.tools.bench.peer_catalogue import NOTICE_FLOOR, compile_floor
from zbmd.tools.bench.result import Contestant, Measurement
from zbmd.tools.bench.run import progress
from zbmd.tools.bench.stats import OURS, Ratio, median, percentile, ratio_of_medians
from zbmd.tools.bench.transport.deaths import READY
from zbmd.tools.bench.workers import CONTROL, ContenderFailed, Workers
from zbmd.transport.native._native import now_ns

DEATHS: Final = "zbmd.tools.bench.transport.deaths"
NOTICES: Final = (OURS, "zbmd-wait", "zbmd-loop", "zbmd-eof")
FLOORS: Final = ("floor-futex", "floor-pidfd", "floor-eof")
LOADS: Final = ("training", "idle")
JITTER_S: Final = 0.03
"""Kills come at random moments within this, so that they meet a training step anywhere."""
TRIALS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectPlan:
    """Run `trials` kills for each size of victim, inside a training step and idle."""

    sizes: tuple[int, ...]
    trials: int

    @property
    def total(self) -> int:
        """Kills, those of the floor included."""
        return 2 * len(LOADS) * len(self.sizes) * self.trials


def detect(plan: DetectPlan) -> tuple[list[Measurement], list[Contestant]]:
    """Run it. Raises `PeerMissing` if the floor cannot be compiled, `ContenderFailed`."""
    with contextlib.ExitStack() as stack:
        tell = stack.enter_context(progress(plan.total))
        with tempfile.TemporaryDirectory(prefix="zbmd-bench-") as scratch:
            program = compile_floor(Path(scratch))
            floor = stack.enter_context(Workers(NOTICE_FLOOR, [[str(program), CONTROL]], ranks=1))
        ours = _Ours(stack)
        rows: list[Measurement] = []
        for load in LOADS:
            ours.set_load(load == "training")
            for nbytes in plan.sizes:
                found: dict[str, list[float]] = {name: [] for name in (*NOTICES, *FLOORS)}
                for _ in range(plan.trials):
                    tell(f"{load} {nbytes} {OURS}")
                    _take_down(found, NOTICES, ours.trial(nbytes))
                    tell(f"{load} {nbytes} floor")
                    _take_down(found, FLOORS, floor.ask("floor", nbytes, 1)[0])
                rows += rows_of(f"detect-{load}", nbytes, found)
        return rows, []


def rows_of(case: str, nbytes: int, found: dict[str, list[float]]) -> list[Measurement]:
    """A row for each kind of notice, with the ratio of our native one to each floor; of ours, odd to even."""
    ours = found[OURS]
    rows: list[Measurement] = []
    for name, times_ns in found.items():
        ratio: Ratio | None = None
        if name in FLOORS:
            ratio = ratio_of_medians(ours, times_ns)
        elif name == OURS and len(ours) > 1:
            pairs = len(ours) // 2
            ratio = ratio_of_medians(ours[1 : 2 * pairs : 2], ours[0 : 2 * pairs : 2])
        times_us = [ns / 1e3 for ns in times_ns]
        rows.append(
            Measurement(
                case=case,
                who=name,
                size_bytes=nbytes,
                samples=len(times_us),
                time_us_p50=median(times_us),
                time_us_p99=percentile(times_us, 0.99),
                time_ratio=ratio,
            )
        )
    return rows


def _take_down(found: dict[str, list[float]], names: Sequence[str], times_ns: Sequence[float]) -> None:
    for name, time_ns in zip(names, times_ns, strict=True):
        found[name].append(time_ns)


class _Ours:
    """A survivor, and its victims one after the other."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._address = f"zbmd-bench-{os.getpid()}-{secrets.token_hex(8)}"
        command = [sys.executable, "-m", DEATHS, "--control", CONTROL]
        environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._survivor = stack.enter_context(
            Workers("survivor", [[*command, "--address", self._address]], ranks=1, environment=environment)
        )
        self._incarnation = 0
        self._random = random.Random(0)

    def set_load(self, on: bool) -> None:
        """Put the survivor inside a training step, or leave it idle."""
        self._survivor.ask("load", int(on), 1)

    def trial(self, nbytes: int) -> list[float]:
        """Kill one victim; nanoseconds to each of `NOTICES`."""
        self._incarnation += 1
        number = str(self._incarnation)
        command = [sys.executable, "-m", DEATHS, "--address", self._address]
        command += ["--incarnation", number, "--bytes", str(nbytes)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as victim:
            try:
                assert victim.stdout is not None
                said = victim.stdout.readline().decode()
                if said != READY:
                    raise ContenderFailed(f"a victim of {nbytes} bytes did not come up: it said {said!r}")
                self._survivor.ask("watch", self._incarnation, 1)
                time.sleep(self._random.random() * JITTER_S)
                killed_ns = now_ns()
                os.kill(victim.pid, signal.SIGKILL)
                victim.wait()  # and so keep off the cores until it is over
                (noticed_ns,) = self._survivor.ask("notice", self._incarnation, 1)
            finally:
                victim.kill()
        return [at_ns - killed_ns for at_ns in noticed_ns]
