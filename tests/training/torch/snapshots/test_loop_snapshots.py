"""Resilient loops whose ranks are all killed at once go on in memory, with the bits of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest
from support.jobs.held_loops import (
    DDP,
    DEVICES,
    FSDP,
    RANKS,
    check_bits,
    command,
    end_of,
    holders,
    told_in,
    variables,
    whole_at,
)
from support.jobs.held_runs import HOLDER, damage, kill_all, started
from support.processes.launch_fixtures import launcher, template

from zbmd.actors.snapshots.client import find_holders
from zbmd.tools.runs.commands import audit_run

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

__all__ = ["holders", "launcher", "template"]

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional


async def test_all_is_killed_at_once_and_a_damaged_step_is_told_and_passed_over(launcher: Launcher) -> None:
    out = launcher.directory / "run"
    fault = ",".join(f"rank{rank}:loop.prepared:9" for rank in range(RANKS))  # in step 7
    with started(launcher, *command(DDP), **variables(fault, out)) as running:
        await asyncio.to_thread(running.until, r"rank \d stands", RANKS)
        holder = (await whole_at(6, {0}))[0]  # one rank of a host keeps what all have alike
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


async def test_a_state_on_devices_is_copied_beside_the_next_step(launcher: Launcher) -> None:
    """The device would raise if a step wrote what is being copied."""
    out, fault = launcher.directory / "run", "rank0:loop.prepared:6,rank1:loop.prepared:6"
    with started(launcher, *command(DEVICES), **variables(fault, out)) as running:
        await asyncio.to_thread(running.until, r"rank \d stands", RANKS)
        await whole_at(5, {0})
        kill_all(running)
        end_of(running, -signal.SIGKILL)
    with started(launcher, *command(DEVICES), **variables(out=out)) as again:
        text = end_of(again)
    assert "resumed step 5 from the memory of rank 0" in text, text
    check_bits(launcher, DEVICES, text)


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


@pytest.mark.parametrize(
    ("fault", "killed"),
    [
        ("rank0:loop.prepared:3,rank1:loop.prepared:3", 2),  # a rank and its buddy
        ("rank1:loop.held:4", 1),  # as it copies a step: the update after the one before is made again
    ],
)
async def test_a_lost_shard_is_made_again_of_what_its_rank_has_left(
    launcher: Launcher, fault: str, killed: int
) -> None:
    preload = ("--preload", "torch,torch._dynamo,zbmd.training.torch.resilient")
    run = ("run", "-n", "3", *preload, str(FSDP))
    with started(launcher, *run, ZBMD_SNAPSHOTS="off", **variables()) as running:
        wanted = told_in(await asyncio.to_thread(end_of, running))
    with started(launcher, *run, **variables(fault)) as running:
        text = await asyncio.to_thread(end_of, running)
    told = told_in(text)
    assert text.count("SIGKILL") >= killed, text
    assert {name for name in wanted if "final" in name or name.endswith("rank 2")} <= told.keys(), text
    assert {name: wanted.get(name) for name in told} == told, text
