"""Every check and benchmark of this project that needs a GPU, and one table of what came of them.

    python -m zbmd.tools.lab.gpu                 all that this machine can run
    python -m zbmd.tools.lab.gpu --only put      those whose names begin so
    python -m zbmd.tools.lab.gpu --list          what there is, and what each would run

A check runs in a process of its own, so that a device's failure is that check's alone, and is ended with
all that it has started at its limit. It fails by what it finds, not by how long something takes; figures
are in the table beside what they are compared with. Exits with 0 if all that ran went well, 1 if one failed,
and 3 if none could run, as without a GPU: then the table says what would run, and why it cannot.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zbmd.tools.cli.options import script_parser
from zbmd.tools.lab.gpu.checks import CHECKS, Check, CheckFailed, Needs
from zbmd.transport.cuda.runtime import visible_devices
from zbmd.transport.errors import UserError
from zbmd.transport.host.topology import read_topology

EXIT_OK, EXIT_FAILED, EXIT_NONE_RAN = 0, 1, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMachine:
    """GPUs and RDMA devices of this machine. why_none: why no GPU can be used, if none can."""

    gpus: int
    rdma_devices: int
    why_none: str = ""

    def lacks(self, needs: Needs) -> str:
        """Why a check with these needs cannot run here; empty if it can."""
        if not self.gpus and self.why_none:
            return self.why_none
        if self.gpus < needs.gpus:
            return f"{self.gpus} of {needs.gpus} GPUs are visible"
        if needs.rdma and not self.rdma_devices:
            return "there is no RDMA device"
        missing = needs.module and importlib.util.find_spec(needs.module) is None
        return f"{needs.module} is not installed" if missing else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """Result of a check: `ok`, `failed` or `not run`."""

    check: Check
    verdict: str
    told: str


def look() -> GpuMachine:
    """Return what this machine has."""
    rdma_devices = len(read_topology().rdma_devices)
    try:
        return GpuMachine(gpus=visible_devices(), rdma_devices=rdma_devices)
    except UserError as error:
        return GpuMachine(gpus=0, rdma_devices=rdma_devices, why_none=str(error))


def in_process(check: Check) -> str:
    """Run it here."""
    return check.run()


def by_itself(check: Check, limit_s: float | None = None) -> str:
    """Run it in a process of its own, for its own limit unless another one is given. Raises `CheckFailed`."""
    limit_s = check.limit_s if limit_s is None else limit_s
    command = [sys.executable, "-m", "zbmd.tools.lab.gpu", "--inside", check.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"it did not end in {limit_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    told = output.strip().splitlines()[-1:]
    if process.returncode or not told:
        raise CheckFailed(" ".join(told) or f"its process ended with {process.returncode}")
    return told[0]


def run_inside(checks: Sequence[Check], name: str) -> int:
    """What `by_itself` runs: one check, whose last line is what it told, or how it failed."""
    check = next(each for each in checks if each.name == name)
    try:
        print(check.run())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is printed
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".replace("\n", " "))
        return EXIT_FAILED
    return EXIT_OK


def run_checks(
    checks: Sequence[Check], here: GpuMachine, call: Callable[[Check], str] = in_process
) -> list[CheckRow]:
    """Run those that can run, each whatever became of the others."""
    rows: list[CheckRow] = []
    for check in checks:
        why = here.lacks(check.needs)
        if why:
            rows.append(CheckRow(check=check, verdict="not run", told=f"would run: {check.would}. But {why}"))
            continue
        try:
            rows.append(CheckRow(check=check, verdict="ok", told=call(check)))
        except Exception as error:  # noqa: BLE001 - one broken check must not keep the others from running
            traceback.print_exc()
            rows.append(CheckRow(check=check, verdict="failed", told=f"{type(error).__name__}: {error}"))
    return rows


def exit_code(rows: Sequence[CheckRow]) -> int:
    """See the module."""
    verdicts = {row.verdict for row in rows}
    if "failed" in verdicts:
        return EXIT_FAILED
    return EXIT_OK if "ok" in verdicts else EXIT_NONE_RAN


def table(rows: Sequence[CheckRow]) -> Table:
    """One row a check."""
    made = Table(title="GPU checks")
    for heading in ("check", "needs", "verdict", "what came of it"):
        made.add_column(heading, overflow="fold")
    for row in rows:
        made.add_row(*(Text(each) for each in (row.check.name, str(row.check.needs), row.verdict, row.told)))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = script_parser("lab.gpu", __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", help="checks whose names begin so")
    parser.add_argument("--list", action="store_true", help="name them, and run none")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        return run_inside(CHECKS, options.inside)
    chosen = [check for check in CHECKS if check.name.startswith(options.only)]
    if not chosen:
        print(f"gpu_check: no check's name begins with {options.only!r}", file=sys.stderr)
        return EXIT_FAILED
    console = Console()
    if options.list:
        console.print(table([CheckRow(check=each, verdict="", told=each.would) for each in chosen]))
        return EXIT_OK
    rows = run_checks(chosen, look(), by_itself)
    console.print(table(rows))
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
