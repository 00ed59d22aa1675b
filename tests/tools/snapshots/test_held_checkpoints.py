"""Checkpoints that the snapshot process writes: whoever is killed meanwhile, they are whole."""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.jobs.held_runs import HOLDER, job, kill_all, started, undisturbed, weights_of
from support.processes.polling import until

from zbmd.actors.snapshots.client import drop
from zbmd.training.checkpoint.index import SHARDS_NAME, Retention
from zbmd.training.checkpoint.sharded import open_state, read_names
from zbmd.training.checkpoint.storage import Directory
from zbmd.training.job.overwrite import holders_of

if TYPE_CHECKING:
    from support.processes.launcher import Launcher, Running

EVERY = 20
CHECKPOINT_BYTES_MIN = 100_000
LONG = ("--steps", "600")
"""Some seconds, of which the snapshot process writes checkpoints in the later ones."""


def saved_in(run: Path) -> int:
    return read_names(run).version if (run / SHARDS_NAME).exists() else 0


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


def stopped_in_a_checkpoint(running: Running, run: Path, step: int) -> tuple[int, int]:
    """Stop the snapshot process in `step` or later, once it writes checkpoints.

    Return it, and the step of the checkpoint that it is asked for and cannot write now. It is stopped in the
    middle of an interval: all know of the checkpoint before.
    """
    while True:
        running.until(rf"^step {(step := step + 1)} loss")
        found, saved = running.processes().get(HOLDER), saved_in(run)
        if found is None or not has_written(found[0]):
            continue
        running.until(rf"^step {saved + EVERY // 2} loss")
        os.kill(found[0], signal.SIGSTOP)
        if saved_in(run) == saved:
            running.until(rf"^step {saved + EVERY + 1} loss")
            assert saved_in(run) == saved
            return found[0], saved + EVERY
        os.kill(found[0], signal.SIGCONT)


async def test_a_rank_is_killed_while_it_writes(launcher: Launcher, run: Path) -> None:
    calm = undisturbed(launcher, 2, *LONG)
    with started(launcher, *job(2, *LONG, "--checkpoint-every", str(EVERY))) as running:
        holder, begun = stopped_in_a_checkpoint(running, run, 1)
        os.kill(running.processes()["zbmd-rank1"][0], signal.SIGKILL)
        os.kill(holder, signal.SIGCONT)
        await until(lambda: saved_in(run) >= begun)
        assert running.end() == 0, running.text
    assert weights_of(running.text) == calm
    require_whole(run)


async def test_ranks_and_launcher_are_killed_at_once_while_it_writes(launcher: Launcher, run: Path) -> None:
    """Nobody else is left, and the checkpoint that they had asked for is written."""
    calm = undisturbed(launcher, 2, *LONG)
    with started(launcher, *job(2, *LONG, "--checkpoint-every", str(EVERY))) as running:
        holder, begun = stopped_in_a_checkpoint(running, run, 1)
        kill_all(running)
        assert running.end() == -signal.SIGKILL
        assert saved_in(run) < begun
        os.kill(holder, signal.SIGCONT)
        await until(lambda: saved_in(run) == begun)
    for address in holders_of(run):
        assert drop(address.name) == ""
    require_whole(run)
    with started(launcher, *job(2, *LONG, "--resume", "run", out="again")) as again:
        assert again.end() == 0, again.text
    assert weights_of(again.text) == calm


@pytest.mark.parametrize(
    "points", [("shards.staged", "shards.write"), ("shards.written", "shards.index")], ids=["copy", "write"]
)
def test_the_process_is_killed_and_the_ranks_write_another_one(
    launcher: Launcher, run: Path, points: tuple[str, ...]
) -> None:
    calm = undisturbed(launcher, 2, *LONG)
    fault = ",".join(f"snapshots#{number}:{point}:2" for number, point in enumerate(points, 1))
    with started(launcher, *job(2, *LONG, "--checkpoint-every", "5"), ZBMD_FAULT=fault) as running:
        assert running.end() == 0, running.text
    lost = re.findall(r"the snapshot process \d+ is lost, killed \(SIGKILL\)", running.text)
    assert len(lost) == len(points), running.text
    assert weights_of(running.text) == calm
    require_whole(run)
    assert "could not be written" not in running.text, running.text
