"""Checkpoints beside the steps: killed, refused and repaired, a run has its bits and its last checkpoint."""

from __future__ import annotations

import hashlib
import resource
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.jobs.by_words import plain_by
from support.jobs.writer_work import WriterWork
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.train.command import recipe_of
from zbmd.training.checkpoint import saving
from zbmd.training.checkpoint.index import Retention, candidates
from zbmd.training.checkpoint.sharded import Piece, open_state, read_names
from zbmd.training.checkpoint.storage import Directory
from zbmd.training.checkpoint.writer import CopyRoom
from zbmd.training.job.data_parallel import DataParallelTask, State, run_task
from zbmd.training.model.weights import load_weights
from zbmd.transport import kill_points as faults

SHAPE = ("--width", "16", "--heads", "2", "--layers", "1", "--context", "8", "--shards", "4", "--warmup", "2")
STEPS = ("--sequences-per-shard", "1", "--steps", "12", "--curve", "constant")
KILLS = (
    "rank1:shards.staged:1,rank0:shards.index:1,rank0#2:shards.named:1",
    "rank0:shards.write:2,rank1:shards.written:2,rank0#2:shards.index:1",
)
NUMBERS = 50_000


def require_whole(directory: Path, version: int, plan: str) -> None:
    """All checkpoints there are complete, the last one is of `version`, and nothing else is left."""
    storage = Directory(directory)
    names = read_names(directory)
    assert names.version == version and not Retention().removed(storage.names(), names)
    assert not [path for path in directory.iterdir() if path.name.startswith(".checkpoint")]
    for index in candidates(storage):
        with closing(open_state(directory / index, plan=plan)) as saved:
            saved.verify()


@pytest.mark.parametrize("fault", KILLS)
async def test_ranks_killed_at_any_point_of_a_checkpoint_leave_whole_ones(fault: str, tmp_path: Path) -> None:
    data = str(write_text(tmp_path / "text"))
    wanted = plain_by([*SHAPE, *STEPS, "--data", data, "--out", str(tmp_path / "plain")])
    out, saved = tmp_path / "run", tmp_path / "saved"
    words = (*SHAPE, *STEPS, "--data", data, "--out", str(out), "--checkpoint-to", str(saved))
    options = recipe_of((*words, "--checkpoint-every", "1", "--checkpoint-codec", "zstd"), ranks=2)
    output = Lines()
    config = HostConfig(
        target="zbmd.training.sharded",
        is_module=True,
        arguments=(options.encode(),),
        world_size=2,
        on_loss=OnLoss.REPLACE,
        environment={faults.FAULT_VARIABLE: fault},
        preload=("zbmd.training.sharded.run",),
    )
    ended = await Host(config, output=output).run()
    assert ended.exit_code == 0 and ended.restarts == len(fault.split(",")), "\n".join(output.lines)
    digest = hashlib.sha256(load_weights(out / "weights.safetensors")[0].data).hexdigest()
    assert digest == wanted.weights_sha256
    require_whole(saved, 12, read_names(saved).plan)


class Mean(DataParallelTask):
    """Finds the mean of numbers; the place of its checkpoints can be used from step `repaired` on."""

    steps, examples, shards, samples, name = 60, 40, 4, 3, "Mean"

    def __init__(self, place: Path, repaired: int = 0, work: WriterWork | None = None) -> None:
        self.place, self.repaired, self.work = place, repaired, work
        if repaired:
            place.write_text("a file where a directory should be")

    def initial(self) -> dict[str, np.ndarray]:
        return {"mean": np.zeros(NUMBERS, np.float32)}

    def gradient(self, state: State, ids: np.ndarray) -> tuple[float, State]:
        error = state["mean"] - np.float32(ids.mean())
        return float((error**2).mean()), {"mean": 2 * error}

    def update(self, old: State, new: State, gradient: State, step: int) -> None:
        new["mean"][:] = old["mean"] - np.float32(0.1) * gradient["mean"]
        if step == self.repaired > 0:
            assert self.work is not None
            self.work.until(saving.Failed)
            self.place.unlink()
            self.place.mkdir()


@pytest.mark.parametrize("repaired", [40, 1000])
async def test_a_write_that_fails_ends_no_run(
    repaired: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], work: WriterWork
) -> None:
    """It is reported once, as is the next success; without one the run ends as any other."""
    calm = await run_task(Mean(tmp_path / "calm"), out=tmp_path / "calm", checkpoint_every=20)
    place = tmp_path / "place"
    capfd.readouterr()
    task = Mean(place, repaired, work)
    done = await run_task(task, out=tmp_path / "run", checkpoint_every=20, checkpoint_to=str(place))
    told = capfd.readouterr().err
    assert calm is not None and done is not None and done.state_sha256 == calm.state_sha256
    assert told.count("could not be written") == 1 and "There is none yet; the run goes on" in told
    assert told.count("is written, after failures") == (repaired < 60)
    if repaired < 60:
        require_whole(place, 60, task.plan)


async def test_only_the_update_that_writes_its_slot_waits_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that begins in the second step after it stops no step, and is whole before that one's update."""
    begun, copied, copy = threading.Event(), threading.Event(), CopyRoom.copied

    def late(room: CopyRoom, pieces: Sequence[Piece]) -> list[Piece]:
        assert begun.wait(60), "a step waits for the copy before it computes its gradient"
        found = copy(room, pieces)
        copied.set()
        return found

    class Late(Mean):
        steps, updates, name = 4, 0, "Mean"

        def gradient(self, state: State, ids: np.ndarray) -> tuple[float, State]:
            if self.updates == 3:
                begun.set()
            return super().gradient(state, ids)

        def update(self, old: State, new: State, gradient: State, step: int) -> None:
            assert self.updates < 3 or copied.is_set(), "the slot is written beside its copy"
            super().update(old, new, gradient, step)
            self.updates += 1

    monkeypatch.setattr(CopyRoom, "copied", late)
    saved, task = tmp_path / "saved", Late(tmp_path)
    done = await run_task(task, out=tmp_path / "run", checkpoint_every=2, checkpoint_to=str(saved))
    assert done is not None and task.updates == 4
    require_whole(saved, 4, task.plan)


async def test_the_last_good_one_stays_while_the_disk_is_full(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], work: WriterWork
) -> None:
    """From step 30 on the state alone fits, which is the result, and a checkpoint of it does not.

    That of step 20 is there by then: the votes of the steps in between have it named.
    """

    class Full(Mean):
        name = "Mean"

        def update(self, old: State, new: State, gradient: State, step: int) -> None:
            super().update(old, new, gradient, step)
            if step == 22:
                work.until(saving.Wrote)
            if step == 30:
                work.until(saving.Published)
                resource.setrlimit(resource.RLIMIT_FSIZE, (4 * NUMBERS + 250, before[1]))

    before, saved = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / "saved"
    try:
        done = await run_task(
            Full(saved), out=tmp_path / "run", checkpoint_every=20, checkpoint_to=str(saved)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = capfd.readouterr().err
    assert done is not None and done.steps == 60
    assert told.count("could not be written") == 1 and "the disk is full" in told
    assert f"The last one, {saved / 'checkpoint.json'}, stays" in told
    require_whole(saved, 20, Mean(saved).plan)
