"""Kill a rank of a small training job at every point that it passes: the weights must stay the same.

    python -m zbmd.tools.chaos.sweep                              three ranks, each with the whole state
    python -m zbmd.tools.chaos.sweep --second                     and a second kill in the recovery
    python -m zbmd.tools.chaos.sweep --zero 3                     the job with its state shared out
    python -m zbmd.tools.chaos.sweep --mesh dp=2,pp=2             a run on a mesh
    python -m zbmd.tools.chaos.sweep --every --second --ledger FILE --minutes 60
                                                                 all of ZeRO and meshes, an hour of it; again,
                                                                 and it goes on from where it was
    python -m zbmd.tools.chaos.sweep --list                       the points, in words

Each case is one run of the job under a host, with `ZBMD_FAULT` naming who dies where. Which points a rank
passes, and how often, is counted in a run that nothing disturbs. The points inside collectives are those of
the programs: `collective.point:N` is the N-th instruction boundary passed. A ledger keeps what was found;
cases are ordered so that whatever part of them was run is spread over all. `--table` prints a ledger.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from zbmd.tools.chaos.small_job import RANKS_DEFAULT, write_text
from zbmd.tools.chaos.sweep.cases import (
    COLLECTIVE,
    Setting,
    every_setting,
    in_order,
    merged,
    second_kills,
    single_kills,
)
from zbmd.tools.chaos.sweep.ledger import CaseVerdict, Ledger, table
from zbmd.tools.chaos.sweep.passes import Passes, read_passes
from zbmd.tools.chaos.sweep.worker import CaseResult, JobCase, Worker
from zbmd.tools.cli.options import script_parser
from zbmd.training.optim import OPTIMIZERS
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

WORKERS_MAX: Final = 16


class Sweep:
    """Runs cases in `workers` processes at a time, and keeps what became of them in `ledger`."""

    def __init__(self, ledger: Ledger, scratch: Path, *, workers: int, until_s: float) -> None:
        self.ledger = ledger
        self._scratch, self._until_s = scratch, until_s
        self._data = write_text(scratch / "text")
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._idle: deque[Worker] = deque()
        self._pool = ThreadPoolExecutor(workers)
        self._names = iter(range(sys.maxsize))

    def close(self) -> None:
        """End the workers; each is done with its case."""
        self._pool.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def calm(self, settings: Sequence[Setting]) -> list[list[Passes]]:
        """Run each setting undisturbed: how often each rank passes each point. Raises `UserError`."""

        def count(setting: Setting) -> list[Passes]:
            counts = self._scratch / f"counts-{setting}"
            counts.mkdir()
            ended = self._run(setting, counts=counts)
            if ended.outcome is None:
                raise UserError(f"{setting} does not end without a fault either: {ended.error}")
            with self._lock:
                self.ledger.begin(str(setting), ended.outcome.digest)
            return read_passes(counts, setting.ranks)

        return list(self._pool.map(count, settings))

    def run(self, cases: Sequence[tuple[Setting, str]]) -> None:
        """Run those that have not ended well before, until the time is up; a line for each."""
        left = [case for case in cases if not self.ledger.is_done(str(case[0]), case[1])]
        print(f"{len(cases)} cases, {len(cases) - len(left)} of them done before", flush=True)
        for _ in self._pool.map(lambda case: self._case(*case), left):
            pass

    def _case(self, setting: Setting, fault: str) -> None:
        began_s = time.monotonic()
        if began_s > self._until_s:
            return
        ended = self._run(setting, fault)
        finding = _finding(setting, fault, self.ledger.calm[str(setting)], ended, time.monotonic() - began_s)
        with self._lock:
            self.ledger.add(finding)
        reached = "" if finding.reached else ", NOT REACHED"
        told = "" if finding.verdict == "same bits" else f"\n{finding.told}"
        print(f"{setting} {fault}: {finding.verdict}{reached}, {finding.took_s:.1f} s{told}", flush=True)

    def _run(self, setting: Setting, fault: str = "", *, counts: Path | None = None) -> CaseResult:
        with self._lock:
            name = str(next(self._names))
            worker = self._idle.pop() if self._idle else self._start()
        out = self._scratch / name
        case = JobCase(
            out=out,
            data=self._data,
            fault=fault,
            ranks=setting.ranks,
            zero=setting.zero,
            mesh=setting.mesh,
            optimizer=setting.optimizer,
            counts=counts,
        )
        ended = worker.run(case)
        shutil.rmtree(out, ignore_errors=True)
        with self._lock:
            self._idle.append(worker)
        return ended

    def _start(self) -> Worker:
        worker = Worker()
        self._workers.append(worker)
        return worker


def _finding(setting: Setting, fault: str, calm: str, ended: CaseResult, took_s: float) -> CaseVerdict:
    outcome = ended.outcome
    if outcome is None:
        return CaseVerdict(
            setting=str(setting), fault=fault, verdict="failed", reached=True, took_s=took_s, told=ended.error
        )
    same = outcome.digest == calm
    return CaseVerdict(
        setting=str(setting),
        fault=fault,
        verdict="same bits" if same else "other bits",
        reached=outcome.deaths >= len(faults.parse(fault)),
        took_s=took_s,
        told="" if same else outcome.told,
    )


def _parser() -> argparse.ArgumentParser:
    parser = script_parser("chaos.sweep", __doc__)
    parser.add_argument("--second", action="store_true", help="also a second kill during the recovery")
    parser.add_argument("--only", default="", help="only cases that contain this text")
    parser.add_argument("--list", action="store_true", help="print the points and end")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="stage; 0: none")
    parser.add_argument("--mesh", default="", help="of a run of zbmd train, such as dp=2,pp=2")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw", help="(%(default)s)")
    parser.add_argument("--every", action="store_true", help="every stage of ZeRO, and five meshes")
    parser.add_argument("-n", type=int, help=f"ranks ({RANKS_DEFAULT}, or those of the mesh)")
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="keep what was found, and go on from it")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="cases at a time (%(default)s)")
    parser.add_argument("--minutes", type=float, default=1e6, metavar="M", help="begin no case after that")
    parser.add_argument("--table", action="store_true", help="print what the ledger holds, as a table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep. Exit code 1: a run ended with other weights, or not at all."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.workers <= WORKERS_MAX:
        parser.error(f"--workers is 1 to {WORKERS_MAX}")
    if arguments.list:
        for point, description in sorted(faults.declared().items()):
            print(f"{point:20} {description}")
        return 0
    try:
        ledger = Ledger(arguments.ledger)
        if arguments.table:
            print(table(ledger.found.values(), []))
        else:
            _sweep(arguments, ledger)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 1 if ledger.wrong else 0


def _sweep(arguments: argparse.Namespace, ledger: Ledger) -> None:
    one = Setting.of(
        zero=arguments.zero, mesh=arguments.mesh, ranks=arguments.n, optimizer=arguments.optimizer
    )
    settings = every_setting() if arguments.every else [one]
    until_s = time.monotonic() + 60.0 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="zbmd-sweep-") as scratch:
        sweep = Sweep(ledger, Path(scratch), workers=arguments.workers, until_s=until_s)
        try:
            passed = sweep.calm(settings)
            cases = [
                case
                for case in _cases(settings, passed, second=arguments.second)
                if arguments.only in case[1]
            ]
            sweep.run(cases)
        finally:
            sweep.close()
    print(table(ledger.found.values(), [(str(setting), fault) for setting, fault in cases]))
    missed = sorted(
        faults.declared().keys() - {one.point for _, fault in cases for one in faults.parse(fault)}
    )
    print(f"declared, and passed by none of these: {', '.join(missed) or 'none'}")


def _cases(
    settings: Sequence[Setting], passed: Sequence[list[Passes]], *, second: bool
) -> list[tuple[Setting, str]]:
    """First passes of named points first, then second kills at them, then the rest in turn."""
    found: list[tuple[Setting, list[list[str]]]] = []
    for setting, passes in zip(settings, passed, strict=True):
        first, later, inside = single_kills(passes)
        again, again_inside = second_kills(setting) if second else ([], [])
        found.append((setting, [first, again, merged([later, inside, again_inside])]))
        boundaries = [passed.get(COLLECTIVE, 0) for passed in passes]
        print(f"{setting}: {boundaries} instruction boundaries in collectives, by rank", flush=True)
    return list(in_order(found))


if __name__ == "__main__":
    sys.exit(main())
