"""Runs whose checkpoints follow what they measure: all ranks write together, and a resumed run goes on."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.jobs.held_runs import GATED, open_gate, started

from zbmd.training.checkpoint.pace import FIRST_STEPS, PRIOR_MTBF_S
from zbmd.training.checkpoint.sharded import read_names
from zbmd.training.job.paced import require_every
from zbmd.training.job.records import last_values
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

SMALL = (
    *("--context", "8", "--width", "16", "--heads", "2", "--layers", "1", "--shards", "2", "--warmup", "2"),
    *("--sequences-per-shard", "2", "--evaluate-every", "0", "--evaluate-windows", "4"),
    *("--curve", "constant", "--data", "text", "--out", "run"),
)


def paces(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "checkpoint_every" in line]


def unit_interval(pace: dict[str, float]) -> float:
    """Return the seconds between checkpoints over the root of what one stalls, which other work changes."""
    return pace["checkpoint_every"] * pace["step_s"] / math.sqrt(pace["stall_s"])


def text_in(directory: Path) -> None:
    (directory / "text").write_text("".join(f"line {i} of a text\n" for i in range(2000)))


def test_all_ranks_write_when_the_lowest_asks_and_a_loss_of_it_changes_nothing(launcher: Launcher) -> None:
    """Rank 0 is killed while the checkpoint that it asked for is written; its replacement asks again."""
    text_in(launcher.directory)
    out, gate = launcher.directory / "run", FIRST_STEPS + 1
    train = (
        "run",
        "-n",
        "2",
        "--on-loss",
        "replace",
        *GATED,
        "train",
        *SMALL,
        "--mesh",
        "dp=2",
        "--steps",
        "15",
    )
    quiet = {"ZBMD_SNAPSHOTS": "off", "ZBMD_FAULT": "rank0:shards.write:1"}
    with started(
        launcher, *train, gates=(gate,), **quiet
    ) as running:  # steps do not wait for what is written
        running.until(r"rank 0 \(.*\) failed: killed \(SIGKILL\)")
        open_gate(out, gate)
        assert running.end() == 0, running.text
    (pace,) = paces(out)
    assert pace["step"] == gate and pace["failures"] == 0, "memory had the state: no work was lost"
    assert pace["stall_s"] > 0 and pace["step_s"] > 0 and pace["checkpoint_every"] > FIRST_STEPS
    assert pace["mtbf_s"] == pytest.approx(PRIOR_MTBF_S, rel=1e-3)
    told = [line for line in running.text.splitlines() if "checkpoint_every" in line and "stall_s" in line]
    assert len(told) == 1, running.text
    names = read_names(out / "checkpoint.json")
    assert names.version == 15 and len(names.files) == 2


def test_a_run_that_lost_work_counts_a_failure_and_one_that_was_stopped_does_not(launcher: Launcher) -> None:
    text_in(launcher.directory)
    run, out = ("run", "-n", "2", "--on-loss", "stop", "-m", "zbmd", "train"), launcher.directory / "run"
    train, metrics = (*run, *SMALL, "--mesh", "dp=2"), out / "metrics.jsonl"

    def last_step() -> int:
        return int(last_values(metrics, "loss").get("step", 0))

    with launcher.session(*train, "--steps", "100000") as running:
        running.until_holds(lambda: bool(last_values(metrics, "checkpoint_every")), "a checkpoint is written")
        running.until_holds(lambda: last_step() > FIRST_STEPS, "steps came after it")
        for rank in range(2):
            os.kill(running.processes()[f"zbmd-rank{rank}"][0], signal.SIGKILL)
        assert running.end() != 0, running.text
    steps = last_step() + 20
    assert read_names(out / "checkpoint.json").version == FIRST_STEPS
    again = launcher.run(*train, "--steps", str(steps), "--resume", "run")
    assert again.code == 0, again
    first = next(pace for pace in paces(out) if not pace["failures"])
    counted = next(pace for pace in paces(out) if pace["failures"])
    assert (first["step"], counted["step"], counted["failures"]) == (10, 10, 1)
    assert counted["mtbf_s"] < 0.1 * PRIOR_MTBF_S
    assert unit_interval(counted) < unit_interval(first)
    further = launcher.run(*train, "--steps", str(steps + 10), "--resume", "run")
    assert further.code == 0, further
    assert max(pace["failures"] for pace in paces(out)) == 1, (
        "it went on from its last step: nothing was lost"
    )


def test_a_plain_loop_has_a_pace_too(launcher: Launcher) -> None:
    text_in(launcher.directory)
    done = launcher.run("run", "-n", "1", "-m", "zbmd", "train", *SMALL, "--plain", "on", "--steps", "12")
    assert done.code == 0, done
    assert any("checkpoint_every" in line and "step_s" in line for line in done.errors), done


def test_records_of_other_kinds_and_later_steps_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_values(path, "loss") == {}
    lines = [
        {"step": 1, "checkpoint_every": 5, "x": None},
        {"step": 2, "loss": 1},
        {"step": 9, "checkpoint_every": 7},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 10, "checkp')
    assert last_values(path, "checkpoint_every") == {"step": 9, "checkpoint_every": 7}
    assert last_values(path, "checkpoint_every", until=8) == {"step": 1, "checkpoint_every": 5}
    assert last_values(path, "loss", until=1) == {}


def test_an_interval_below_zero_is_refused() -> None:
    with pytest.raises(UserError, match="--checkpoint-every: expected auto or 0 or more steps, got -1"):
        require_every(-1, "--checkpoint-every")
