"""Runs the cases of `chaos.sweep` and of tests, one after the other, each in a process of its own.

Everything is imported here once: a case is a fork of this process, and the template of its ranks a fork of
that, so that a run costs no interpreter's start. Cases come on standard input, a JSON object a line, and what
became of each goes to standard output. `Worker` is the other end of both.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import traceback
from pathlib import Path

import msgspec
import uvloop

from zbmd.actors.cluster.jobs.rank_processes import PRELOAD
from zbmd.actors.process.early_template import fork_template
from zbmd.actors.process.exit import describe_exit
from zbmd.actors.process.log import log_to_stderr
from zbmd.actors.view import OnLoss
from zbmd.tools.chaos import loop_case
from zbmd.tools.chaos.growing_case import run_growing
from zbmd.tools.chaos.loop_case import LoopCase, run_loop
from zbmd.tools.chaos.small_job import JobOutcome, run_program, run_small_job
from zbmd.tools.cli.process import run as run_command
from zbmd.training.optim.mixed_precision import Precision
from zbmd.transport.errors import ZbmdError
from zbmd.transport.host.threads import ONE_THREAD


class JobCase(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """What to run; see `run_small_job`. counts: a directory to count passes of points into; variables: more
    of its environment."""

    out: Path
    data: Path
    fault: str
    ranks: int
    zero: int = 0
    offload: Path | None = None
    mesh: str = ""
    precision: Precision = "float32"
    optimizer: str = "adamw"
    on_loss: OnLoss = OnLoss.REPLACE
    links: str = "auto"
    counts: Path | None = None
    variables: dict[str, str] = {}


class ProgramCase(msgspec.Struct, frozen=True, kw_only=True, tag="program"):
    """A program or module on ranks; see `run_program`. variables: more of its environment."""

    program: str
    arguments: tuple[str, ...]
    ranks: int
    on_loss: OnLoss = OnLoss.REPLACE
    variables: dict[str, str] = {}


Case = JobCase | LoopCase | ProgramCase


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a case: an outcome, or an error."""

    outcome: JobOutcome | None = None
    error: str = ""


class Worker:
    """This process's end of one that runs cases. It is started at once; use by one thread at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zbmd.tools.chaos.job_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**ONE_THREAD, **os.environ},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._cases, self._ends = self._process.stdin, self._process.stdout

    def run(self, case: Case) -> CaseResult:
        """Return the result. Raises ValueError if the worker has ended, or has written anything else."""
        self._cases.write(encode(case))
        self._cases.flush()
        return decode_ended(self._ends.readline())

    def close(self) -> None:
        """End it; it is done with its case."""
        self._cases.close()
        self._ends.close()
        self._process.wait()


def _as_text(value: object) -> str:
    return str(value)


def _as_path(kind: type, value: object) -> Path:
    if kind is not Path or not isinstance(value, str):
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return Path(value)


def encode(message: Case | CaseResult) -> bytes:
    """A line of it."""
    return msgspec.json.encode(message, enc_hook=_as_text) + b"\n"


def decode_ended(line: bytes) -> CaseResult:
    """Return the decoded reply of the worker. Raises ValueError for anything else."""
    return msgspec.json.decode(line, type=CaseResult)


def _run(case: Case) -> CaseResult:
    os.environ.update(case.variables)
    if isinstance(case, LoopCase) and case.newcomers:
        try:
            return CaseResult(outcome=run_growing(case))
        except ZbmdError as error:
            return CaseResult(error=str(error))
    template = fork_template(PRELOAD, os.environ)
    try:
        if isinstance(case, LoopCase):
            return CaseResult(outcome=uvloop.run(run_loop(case, template)))
        if isinstance(case, ProgramCase):
            program = run_program(case.program, case.arguments, case.ranks, case.on_loss, template)
            return CaseResult(outcome=uvloop.run(program))
        job = run_small_job(
            case.out,
            case.data,
            fault=case.fault,
            world_size=case.ranks,
            zero=case.zero,
            offload=case.offload,
            mesh=case.mesh,
            precision=case.precision,
            optimizer=case.optimizer,
            on_loss=case.on_loss,
            links=case.links,
            counts=case.counts,
            template=template,
        )
        return CaseResult(outcome=uvloop.run(job))
    except ZbmdError as error:
        return CaseResult(error=str(error))


def main() -> int:
    """Serve until the input ends."""
    log_to_stderr()
    for line in sys.stdin.buffer:
        case = msgspec.json.decode(line, type=Case, dec_hook=_as_path)
        if isinstance(case, LoopCase):
            for module in loop_case.PRELOAD:
                importlib.import_module(module)
        pid = os.fork()
        if pid == 0:
            try:
                answer = encode(_run(case))
            except Exception:  # noqa: BLE001 - told, and the case has failed
                traceback.print_exc()
                os._exit(1)
            os.write(1, answer)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            os.write(1, encode(CaseResult(error=f"the host of the case: {describe_exit(code)}")))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
