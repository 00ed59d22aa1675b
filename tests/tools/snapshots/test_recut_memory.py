"""A sharded state that is recut, in the memory of ranks that are not replaced: the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from support.jobs.held_runs import (
    STEPS,
    job,
    kill_all_when_held,
    last_committed,
    open_gate,
    started,
    undisturbed,
    until_held,
    weights_of,
)
from support.processes.launcher import Running
from support.processes.stopping import stop

from zbmd.training.run.ledger import LOG_NAME, read_log

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

RANKS = 3
LOST, KILLED, LOST_AGAIN = 5, 15, 22
"""The gates: before these steps one rank is lost, then all with their launcher, then two ranks.

A step of a sharded state is reported in the next one.
"""


def shrinking() -> tuple[str, ...]:
    command, *rest = job(RANKS, "--zero", "3")
    return (command, "--on-loss", "shrink", *rest)


def kill_ranks(running: Running, *ranks: int) -> None:
    """Kill them at once: none does a step after another one's end."""
    named = running.processes()
    pids = [pid for rank in ranks for pid in named[f"zbmd-rank{rank}"]]
    for pid in pids:
        stop(pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_state_that_is_recut_outlives_its_ranks_and_their_launcher(launcher: Launcher, run: Path) -> None:
    """Three ranks go on from the parts of two: what the third left is too old. Then two are lost at once."""
    calm = undisturbed(launcher)
    with started(launcher, *shrinking(), gates=(LOST, KILLED)) as running:
        running.until(rf"^step {LOST - 2} loss")
        until_held(running, RANKS, run)
        kill_ranks(running, 1)
        open_gate(run, LOST)
        kill_all_when_held(running, RANKS, run, step=LOST + 3)
    committed = last_committed(run)
    assert committed < KILLED
    assert list(read_log(run / LOG_NAME)[1][-1].members) == [0, 2]
    open_gate(run, KILLED)
    with started(launcher, *shrinking(), gates=(LOST_AGAIN,)) as again:
        (found,) = again.until(r"^step (\d+) loss")
        first = int(found[1])
        assert committed <= first <= committed + 2, "what is in the log may not have been reported"
        again.until(rf"^step {LOST_AGAIN - 2} loss")
        kill_ranks(again, 1, 2)
        open_gate(run, LOST_AGAIN)
        assert again.end() == 0, again.text
    assert "holds the memory of rank 0, 1, 2" in again.text
    assert weights_of(again.text) == calm
    records = read_log(run / LOG_NAME)[1]
    assert [one.version for one in records] == list(range(1, STEPS + 1))
    assert (list(records[first].members), list(records[-1].members)) == ([0, 1, 2], [0])
