"""Figures: one JSON object for each measured number, in `docs/results/*.jsonl`.

`zbmd bench … --record FILE` appends them; `zbmd.tools.dev.bench_docs` renders `docs/BENCHMARKS.md` from them.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import msgspec

import zbmd
from zbmd.transport.errors import UserError

FORMAT: Final = "zbmd.figure/1"
GIB: Final = 1 << 30
Layer = Literal["transport", "collectives", "actors", "training", "cluster", "simulation and replay"]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine of a figure; None for what was not noted."""

    cpu: str
    cores: int
    memory_gib: int | None = None
    kernel: str | None = None


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured number."""

    layer: Layer
    what: str
    command: str
    value: float
    unit: str
    peer: str | None = None
    """The best peer of the run, with its version where it is known."""
    peer_value: float | None = None
    ratio: float | None = None
    """Factor by which zbmd is better than the peer: above 1, zbmd is ahead."""
    goal: str | None = None
    met: bool | None = None
    machine: Machine
    date: str
    version: str
    commit: str | None = None
    load: float | None = None
    """The load average of the minute before."""
    shown: bool = True
    """Whether the page has a row of it: of many like it, some do."""
    format: str = FORMAT


def machine() -> Machine:
    """Return a description of this machine."""
    return Machine(
        cpu=cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB),
        kernel=platform.release(),
    )


def new_figure(
    layer: Layer,
    what: str,
    command: str,
    *,
    value: float,
    unit: str,
    peer: str | None = None,
    peer_value: float | None = None,
    ratio: float | None = None,
) -> Figure:
    """Return a figure of this machine, this version and this moment."""
    return Figure(
        layer=layer,
        what=what,
        command=command,
        value=value,
        unit=unit,
        peer=peer,
        peer_value=peer_value,
        ratio=ratio,
        machine=machine(),
        date=datetime.now(UTC).date().isoformat(),
        version=zbmd.__version__,
        commit=_commit(),
        load=round(os.getloadavg()[0], 2),
    )


def append_figures(path: Path, figures: Iterable[Figure]) -> None:
    """Append one line for each figure. Raises `UserError` if the file cannot be written."""
    lines = b"".join(msgspec.json.encode(figure) + b"\n" for figure in figures)
    try:
        with path.open("ab") as file:
            file.write(lines)
    except OSError as error:
        raise UserError(f"--record {path}: cannot be written: {error.strerror}") from None


def read_figures(path: Path) -> list[Figure]:
    """Read a file of figures. Raises `UserError` that names the line that is not one."""
    found: list[Figure] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=Figure))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: expected a figure ({FORMAT}): {error}") from None
    return found


def cpu_name() -> str:
    """Return the model of the processor, as Linux names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def add_record(options: argparse.ArgumentParser) -> None:
    """Add `--record` to a benchmark."""
    options.add_argument(
        "--record", type=Path, metavar="FILE", help="append one JSON line for each figure to FILE"
    )


def _commit() -> str | None:
    """Return the commit of the checkout that this package lies in; None for an installed wheel."""
    command = ["git", "-C", str(Path(zbmd.__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
