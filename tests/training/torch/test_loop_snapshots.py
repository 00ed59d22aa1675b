"""Resilient loops whose ranks are all killed at once go on in memory, with the bits of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from programs import PROGRAMS
from support.jobs.held_runs import HOLDER, damage, kill_all, started
from support.processes.launch_fixtures import launcher, template
from support.processes.polling import until

from zbmd.actors.snapshots.client import HolderAddress, drop, find_holders
from zbmd.tools.runs.commands import audit_run
from zbmd.tools.runs.snapshots import WHOLE, held_runs

if TYPE_CHECKING:
    from support.processes.launcher import Launcher, Running

__all__ = ["launcher", "template"]

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

DDP, FSDP = PROGRAMS / "training/resilient_ddp.py", PROGRAMS / "torch/resilient_fsdp.py"
RANKS = 2


@pytest.fixture(autouse=True)
def holders(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Nothing is held of any loop afterwards."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(launcher.directory / "cookie"))
    yield
    for holder in find_holders():
        drop(holder.name)


def command(program: Path, ranks: int = RANKS) -> tuple[str, ...]:
    """The command line of a loop, whose ranks stand still where they are to be killed."""
    preload = "torch,torch._dynamo,zbmd.training.torch.resilient"
    script = PROGRAMS / "launched/stands.py"
    return ("run", "-n", str(ranks), "--preload", preload, str(script), str(program))


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


async def whole_at(step: int, ranks: set[int]) -> HolderAddress:
    """Wait until the step is whole in the memory of these ranks; return the process that holds it."""

    def is_whole() -> bool:
        held = [one for run in held_runs(find_holders(), None) for one in run.versions]
        return ranks <= {one.rank for one in held if (one.version, one.state) == (step, WHOLE)}

    await until(is_whole)
    (holder,) = find_holders()
    return holder


def end_of(running: Running, code: int = 0) -> str:
    assert running.end() == code, running.text
    return running.text


async def test_all_is_killed_at_once_and_a_damaged_step_is_told_and_passed_over(launcher: Launcher) -> None:
    out = launcher.directory / "run"
    fault = ",".join(f"rank{rank}:loop.prepared:9" for rank in range(RANKS))  # in step 7
    with started(launcher, *command(DDP), **variables(fault, out)) as running:
        await asyncio.to_thread(running.until, r"rank \d stands", RANKS)
        holder = await whole_at(6, {0})  # one rank of a host keeps what all have alike
        kill_all(running)
        end_of(running, -signal.SIGKILL)
    assert damage(holder, 0, newest=True) == [6]
    with started(launcher, *command(DDP, 1), **variables(out=out)) as other:
        await asyncio.to_thread(other.until, "are not used: these snapshots are of another ranks")
        kill_all(other)
    with started(launcher, *command(DDP), **variables(out=out)) as again:
        text = end_of(again)
    assert re.search("the state in memory is damaged, and is not used.*version=6", text), text
    assert "resumed step 5 from the memory of rank 0" in text, text
    check_bits(launcher, DDP, text)
    assert audit_run(out).is_whole
    assert not find_holders()


async def test_shards_of_one_step_are_found_although_a_copy_of_the_next_is_torn(launcher: Launcher) -> None:
    out, fault = launcher.directory / "run", "rank0:loop.prepared:5,rank1:loop.held:4"  # both in step 5
    with started(launcher, *command(FSDP), **variables(fault, out)) as running:
        await asyncio.to_thread(running.until, r"rank \d stands", RANKS)
        await whole_at(4, {0})
        await whole_at(3, {0, 1})
        kill_all(running)
        end_of(running, -signal.SIGKILL)
    with started(launcher, *command(FSDP), **variables(out=out)) as again:
        text = end_of(again)
    assert "resumed step 3 from the memory of rank 0, 1" in text, text
    check_bits(launcher, FSDP, text)
    assert audit_run(out).is_whole


async def test_all_ranks_are_killed_at_once_and_their_launcher_lives(launcher: Launcher) -> None:
    """The snapshot process is killed with them: the launcher has the memory, too."""
    fault = "rank0:loop.prepared:8,rank1:loop.prepared:8"
    with started(launcher, *command(FSDP), **variables(fault)) as running:
        await asyncio.to_thread(running.until, r"rank \d stands", RANKS)
        await whole_at(6, {0, 1})
        for name, pids in running.processes().items():
            if name.startswith("zbmd-rank") or name == HOLDER:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
        text = await asyncio.to_thread(end_of, running)
    assert "resumed step 6 from the memory of rank 0, 1" in text, text
    check_bits(launcher, FSDP, text)
