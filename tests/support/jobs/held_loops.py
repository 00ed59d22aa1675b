"""Runs of resilient loops whose ranks stand still where a test kills them, and what they print."""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from programs import PROGRAMS

from support.jobs.held_runs import started
from support.processes.polling import until
from zbmd.actors.snapshots.client import HolderAddress, drop, find_holders
from zbmd.tools.runs.snapshots import WHOLE, held_runs

if TYPE_CHECKING:
    from support.processes.launcher import Launcher, Running

DDP, FSDP = PROGRAMS / "training/resilient_ddp.py", PROGRAMS / "torch/resilient_fsdp.py"
DEVICES = PROGRAMS / "torch/devices/resilient.py"
RANKS = 2


@pytest.fixture(autouse=True)
def holders(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Nothing is held of any loop afterwards."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(launcher.directory / "cookie"))
    yield
    for holder in find_holders():
        drop(holder.name)


def command(program: Path, ranks: int = RANKS, *more: str) -> tuple[str, ...]:
    """The command line of a loop, whose ranks stand still where they are to be killed."""
    preload = "torch,torch._dynamo,zbmd.training.torch.resilient"
    script = PROGRAMS / "launched/stands.py"
    return ("run", *more, "-n", str(ranks), "--preload", preload, str(script), str(program))


def variables(fault: str = "", out: Path | None = None) -> dict[str, str]:
    more = {"ZBMD_FAULT": fault} if fault else {}
    return {"ZBMD_ARENA": "32MiB", **({} if out is None else {"OUT": str(out)}), **more}


def told_in(text: str) -> dict[str, str]:
    """Return the lines that ranks print of each step, and of their states at the end."""
    return dict(re.findall(r"((?:step \d+|final) rank \d): (.*)", text))


@cache
def _undisturbed() -> dict[Path, dict[str, str]]:
    return {}


def undisturbed(launcher: Launcher, program: Path) -> dict[str, str]:
    if program not in _undisturbed():
        with started(launcher, *command(program), ZBMD_SNAPSHOTS="off", **variables()) as running:
            _undisturbed()[program] = told_in(end_of(running))
            assert "kept in memory" not in running.text
    return _undisturbed()[program]


def check_bits(launcher: Launcher, program: Path, text: str) -> None:
    """All that a run that goes on prints is of the undisturbed run, and all ranks come to its end."""
    told, wanted = told_in(text), undisturbed(launcher, program)
    assert {f"final rank {rank}" for rank in range(RANKS)} <= set(told), text
    assert {name: wanted.get(name) for name in told} == told, text


async def whole_at(step: int, ranks: set[int]) -> dict[int, HolderAddress]:
    """Wait until the step is whole in the memory of these ranks; return the process that holds each."""
    found = dict[int, HolderAddress]()

    def is_whole() -> bool:
        for holder in find_holders():
            held = [one for run in held_runs([holder], None) for one in run.versions]
            found.update(
                {one.rank: holder for one in held if (one.version, one.state) == (step, WHOLE)}  # type: ignore[misc]
            )
        return ranks <= found.keys()

    await until(is_whole)
    return found


def end_of(running: Running, code: int = 0) -> str:
    assert running.end() == code, running.text
    return running.text
