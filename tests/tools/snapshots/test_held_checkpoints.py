"""Checkpoints that the snapshot process writes: whoever is killed meanwhile, they are whole."""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.jobs.held_runs import (
    HOLDER,
    job,
    kill_all,
    open_gate,
    saved_in,
    started,
    undisturbed,
    until_held,
    weights_of,
)
from support.processes.polling import until
from support.processes.stopping import stop

from zbmd.actors.snapshots.client import drop
from zbmd.training.checkpoint.index import Retention
from zbmd.training.checkpoint.sharded import open_state, read_names
from zbmd.training.checkpoint.storage import Directory
from zbmd.training.job.overwrite import holders_of

if TYPE_CHECKING:
    from support.processes.launcher import Launcher, Running

EVERY = 10
CHECKPOINTS = job(2, "--checkpoint-every", str(EVERY))
FIRST, SAVED, BETWEEN, BEYOND = 3, 11, 19, 22
"""The gates: before a checkpoint, after it, at the end of its interval, and after the next one."""
CHECKPOINT_BYTES_MIN = 100_000
OFTEN, LONG = 5, 120
EACH = tuple(range(3, LONG - 2))
"""The gates: before each step, so that a run is no faster than its checkpoints, until enough are written."""


def require_whole(run: Path) -> None:
    """The last checkpoint verifies, and nothing else is left."""
    names = read_names(run)
    with closing(open_state(run, plan=names.plan)) as saved:
        saved.verify()
    assert not Retention().removed(Directory(run).names(), names)
    assert not [path for path in run.iterdir() if path.name.startswith(".checkpoint")]


def has_written(holder: int) -> bool:
    """Return whether a snapshot process has written a checkpoint, not only messages."""
    wrote = re.search(r"wchar: (\d+)", Path(f"/proc/{holder}/io").read_text())
    return wrote is not None and int(wrote[1]) > CHECKPOINT_BYTES_MIN


def stopped_in_a_checkpoint(running: Running, run: Path) -> int:
    """Stop the snapshot process of a run, and have it asked for a checkpoint; return it.

    It is stopped at the end of an interval: all know of the checkpoint before.
    """
    until_held(running, 2, run)
    (holder,) = running.processes()[HOLDER]
    open_gate(run, FIRST)
    running.until(rf"^step {SAVED - 1} loss")
    running.until_holds(lambda: saved_in(run) == EVERY, "the first checkpoint is written")
    assert has_written(holder)
    open_gate(run, SAVED)
    running.until(rf"^step {BETWEEN - 1} loss")
    stop(holder)
    open_gate(run, BETWEEN)
    running.until(rf"^step {BEYOND - 1} loss")
    assert saved_in(run) == EVERY
    return holder


def test_a_rank_is_killed_while_it_writes(launcher: Launcher, run: Path) -> None:
    calm = undisturbed(launcher)
    with started(launcher, *CHECKPOINTS, gates=(FIRST, SAVED, BETWEEN, BEYOND)) as running:
        holder = stopped_in_a_checkpoint(running, run)
        os.kill(running.processes()["zbmd-rank1"][0], signal.SIGKILL)
        os.kill(holder, signal.SIGCONT)
        open_gate(run, BEYOND)
        running.until_holds(lambda: saved_in(run) >= 2 * EVERY, "the second checkpoint is written")
        assert running.end() == 0, running.text
    assert weights_of(running.text) == calm
    require_whole(run)


async def test_ranks_and_launcher_are_killed_at_once_while_it_writes(launcher: Launcher, run: Path) -> None:
    """Nobody else is left, and the checkpoint that they had asked for is written."""
    calm = undisturbed(launcher)
    with started(launcher, *CHECKPOINTS, gates=(FIRST, SAVED, BETWEEN, BEYOND)) as running:
        holder = stopped_in_a_checkpoint(running, run)
        kill_all(running)
        assert running.end() == -signal.SIGKILL
        assert saved_in(run) == EVERY
        os.kill(holder, signal.SIGCONT)
        await until(lambda: saved_in(run) == 2 * EVERY)
    for address in holders_of(run):
        assert drop(address.name) == ""
    require_whole(run)
    with started(launcher, *job(2, "--resume", "run", out="again"), gates=(FIRST,)) as again:
        assert again.end() == 0, again.text
    assert weights_of(again.text) == calm


def lost_in(running: Running) -> list[str]:
    return re.findall(r"the snapshot process \d+ is lost, killed \(SIGKILL\)", running.text)


@pytest.mark.parametrize(
    "points", [("shards.staged", "shards.write"), ("shards.written", "shards.index")], ids=["copy", "write"]
)
def test_the_process_is_killed_and_the_ranks_write_another_one(
    launcher: Launcher, run: Path, points: tuple[str, ...]
) -> None:
    more = ("--steps", str(LONG))
    calm = undisturbed(launcher, *more)
    fault = ",".join(f"snapshots#{number}:{point}:2" for number, point in enumerate(points, 1))
    often = job(2, *more, "--checkpoint-every", str(OFTEN))
    with started(launcher, *often, gates=EACH, ZBMD_FAULT=fault) as running:
        for gate in EACH:
            if len(lost_in(running)) < len(points):
                running.until(rf"^step {gate - 1} loss")
                until_held(running, 2, run)
            open_gate(run, gate)
        assert running.end() == 0, running.text
    assert len(lost_in(running)) == len(points), running.text
    assert weights_of(running.text) == calm
    require_whole(run)
    assert "could not be written" not in running.text, running.text
