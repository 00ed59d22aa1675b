"""The hunt behind `zbmd sim hunt`: fresh seeds on all cores, until time is up or one fails.

Each core has a worker process of its own, forked, which reports over a pipe what it does, one JSON line a
message. Worker w of j tries the runs w, w + j, w + 2j, …; run i has the seed `first_seed` + i and the
scenario `names[i % len(names)]`, so a hunt is repeated by its first seed, whatever the number of workers.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NoReturn, Self

import msgspec

from zbmd.tools.sim.scenarios import SCENARIOS, run_once, scenario_named
from zbmd.transport.errors import ZbmdError
from zbmd.transport.host.process import end_with_parent
from zbmd.transport.sim import Options, RunOutcome, ScenarioReport

JOBS_MAX = 1024
RUNS_MAX = 1_000_000_000
RUN_S_MAX = 120.0
"""A run that takes longer hangs: its events are bounded, so some callback of it does not return."""
POLL_S = 0.2
LINE_BYTES_MAX = 1 << 20
READ_BYTES = 1 << 16
TROUBLE_CHARS_MAX = 20_000


class HuntBroken(ZbmdError):
    """A worker ended without a verdict: the scenario or the hunt itself has a bug. Quotes what it said."""


class _Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Report of a worker: it begins run `run`, run `run` failed, or the worker broke (`trouble`)."""

    run: int
    failed: bool = False
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarry:
    """Runs to hunt, from the first seed on. Sizes that are given are not drawn."""

    names: tuple[str, ...]
    first_seed: int
    ranks: int | None = None
    length: int | None = None
    faults: int | None = None

    def name(self, run: int) -> str:
        """The scenario of a run."""
        return self.names[run % len(self.names)]

    def seed(self, run: int) -> int:
        """The seed of a run."""
        return self.first_seed + run

    def options(self, run: int) -> Options:
        """The size of a run."""
        drawn = SCENARIOS[self.name(run)].draw(self.seed(run))
        return Options(
            ranks=drawn.ranks if self.ranks is None else self.ranks,
            length=drawn.length if self.length is None else self.length,
            faults=drawn.faults if self.faults is None else self.faults,
        )

    def try_run(self, run: int) -> ScenarioReport:
        """Do a run, here and now."""
        return run_once(scenario_named(self.name(run)), self.seed(run), self.options(run))

    def command(self, run: int) -> str:
        """The command line of a run that has not come to its report; it draws the same faults again."""
        options = self.options(run)
        return (
            f"zbmd sim run {self.name(run)} --seed {self.seed(run)} --ranks {options.ranks} "
            f"--length {options.length} --faults {options.faults}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Caught:
    """Result of a hunt. `report`: of the run that failed; `hung`: the run that did not end; else neither."""

    runs: int
    report: ScenarioReport | None = None
    hung: int | None = None


@dataclass(slots=True)
class _Worker:
    pid: int
    pipe: int
    run: int = -1
    begun_s: float = 0.0
    unread: bytearray = field(default_factory=bytearray)


class Hunt:
    """The workers of one hunt. Use it with `with`: whatever ends the block ends them, and waits for them."""

    def __init__(self, quarry: Quarry, *, jobs: int, runs_max: int) -> None:
        self._quarry = quarry
        self._jobs = jobs
        self._runs_max = runs_max
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._runs = 0

    def __enter__(self) -> Self:
        # An interrupt that comes inside of fork is raised in a hook of some library, and lost there.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            for number in range(self._jobs):
                self._fork(number)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        except BaseException:
            self._end()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def wait(self, end_s: float, tell: Callable[[int], None]) -> Caught:
        """Hunt until monotonic time `end_s`, all runs are done, or one fails; `tell` the runs so far.

        Raises `HuntBroken` if a worker does.
        """
        while self._workers and time.monotonic() < end_s:
            for key, _ in self._selector.select(POLL_S):
                worker: _Worker = key.data
                failed = self._read(worker)
                if failed is not None:
                    return Caught(runs=self._runs, report=self._quarry.try_run(failed))
            now_s = time.monotonic()
            for worker in self._workers:
                if worker.run >= 0 and now_s - worker.begun_s > RUN_S_MAX:
                    return Caught(runs=self._runs, hung=worker.run)
            tell(self._runs)
        return Caught(runs=self._runs)

    def _read(self, worker: _Worker) -> int | None:
        """Take what a worker says; the run that failed, if one did."""
        data = os.read(worker.pipe, READ_BYTES)
        worker.unread += data
        if len(worker.unread) > LINE_BYTES_MAX:
            raise HuntBroken(f"a worker told more than {LINE_BYTES_MAX} bytes in one line")
        *lines, rest = bytes(worker.unread).split(b"\n")
        worker.unread = bytearray(rest)
        for text in lines:
            line = msgspec.json.decode(text, type=_Line)
            if line.trouble:
                again = self._quarry.command(line.run)
                raise HuntBroken(f"the scenario itself broke: {again}\n{line.trouble}")
            if line.failed:
                return line.run
            self._runs += worker.run >= 0
            worker.run, worker.begun_s = line.run, time.monotonic()
        if not data:
            code = self._reap(worker, kill=False)
            if code != 0:
                again = self._quarry.command(max(0, worker.run))
                raise HuntBroken(f"a worker ended with code {code} in: {again}")
            self._runs += worker.run >= 0
        return None

    def _fork(self, number: int) -> None:
        ours, theirs = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            _work(self._quarry, range(number, self._runs_max, self._jobs), theirs, parent)
        os.close(theirs)
        worker = _Worker(pid, ours)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def _end(self) -> None:
        for worker in list(self._workers):
            self._reap(worker, kill=True)
        self._selector.close()

    def _reap(self, worker: _Worker, *, kill: bool) -> int:
        """Wait for a worker's end and return its exit code. With `kill` it ends at once: it holds nothing."""
        self._workers.remove(worker)
        self._selector.unregister(worker.pipe)
        os.close(worker.pipe)
        if kill:
            os.kill(worker.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])


def _work(quarry: Quarry, runs: Sequence[int], pipe: int, parent: int) -> NoReturn:
    """Run a worker. Never returns, so that no inherited code of its parent runs in it."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
        end_with_parent(parent)
        code = _try_runs(quarry, runs, lambda line: os.write(pipe, msgspec.json.encode(line) + b"\n"))
    finally:
        os._exit(code)


def _try_runs(quarry: Quarry, runs: Sequence[int], say: Callable[[_Line], object]) -> int:
    for run in runs:
        say(_Line(run=run))
        try:
            report = quarry.try_run(run)
        except BaseException:  # noqa: BLE001 (the parent raises it, whatever it is)
            say(_Line(run=run, trouble=traceback.format_exc()[-TROUBLE_CHARS_MAX:]))
            return 1
        if report.outcome is not RunOutcome.OK:
            say(_Line(run=run, failed=True))
            return 0
    return 0
