"""Damage is found: by the rehearsal after a checkpoint, and before a run resumes from it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from zbmd.tools.entry import zbmd as cli
from zbmd.training.checkpoint import writer
from zbmd.training.checkpoint.index import Retention, is_index, is_shard
from zbmd.training.checkpoint.sharded import read_names
from zbmd.training.checkpoint.storage import Directory
from zbmd.training.checkpoint.verified import newest_whole
from zbmd.training.job.data_parallel import DataParallelTask, State, run_task
from zbmd.transport.errors import UserError

NUMBERS = 1000


class Mean(DataParallelTask):
    """Finds the mean of numbers."""

    steps, examples, shards, samples, name = 40, 40, 4, 3, "Mean"

    def initial(self) -> dict[str, np.ndarray]:
        return {"mean": np.zeros(NUMBERS, np.float32)}

    def gradient(self, state: State, ids: np.ndarray) -> tuple[float, State]:
        error = state["mean"] - np.float32(ids.mean())
        return float((error**2).mean()), {"mean": 2 * error}

    def update(self, old: State, new: State, gradient: State, step: int) -> None:
        new["mean"][:] = old["mean"] - np.float32(0.1) * gradient["mean"]


def damage(path: Path, at: int = -9) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def of_version(out: Path, version: int, what: str) -> Path:
    is_one = is_index if what == "index" else is_shard
    begins = f"checkpoint-{version}-"
    return next(path for path in out.iterdir() if path.name.startswith(begins) and is_one(path.name))


async def kept(out: Path) -> str:
    """Run to the end, stopping for a checkpoint at three versions; return the digest of the state."""
    result = None
    for steps in (10, 20, 30):
        task = Mean()
        task.steps = steps
        resume = None if steps == 10 else out
        result = await run_task(task, out=out, retention=Retention(3), resume=resume)
    assert result is not None
    return result.state_sha256


async def test_a_run_resumes_from_the_newest_one_that_is_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of the last one is damaged, the index of the one before, and both are named."""
    monkeypatch.setattr(Mean, "plan", "any number of steps")
    out = tmp_path / "run"
    wanted = await kept(out)
    damage(of_version(out, 30, "shard"))
    damage(of_version(out, 20, "index"), at=20)
    capfd.readouterr()
    task = Mean()
    task.steps = 30
    again = await run_task(task, out=out, resume=out, retention=Retention(3))
    told = capfd.readouterr().err
    assert again is not None and again.state_sha256 == wanted
    assert told.count("left out: ") == 2 and "checksum mismatch in block 0 of weights.mean" in told
    assert of_version(out, 30, "shard").name.partition("-")[0] in told
    assert "going on from the checkpoint of step 10" in told
    assert read_names(out).version == 30
    newest = newest_whole(out)
    assert is_index(newest.name) and not capfd.readouterr().err, "nothing is damaged any more"


async def test_without_a_whole_one_each_problem_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Mean, "plan", "any number of steps")
    await kept(tmp_path)
    capsys.readouterr()
    assert cli.main(["snapshots", str(tmp_path), "--json"]) == 0
    shown = msgspec.json.decode(capsys.readouterr().out)["checkpoints"]
    assert [(each["version"], each["state"]) for each in shown] == [(at, "whole") for at in (30, 20, 10)]
    for version in (10, 20, 30):
        damage(of_version(tmp_path, version, "shard"))
    with pytest.raises(UserError) as caught:
        newest_whole(tmp_path)
    assert all(str(of_version(tmp_path, version, "shard")) in str(caught.value) for version in (10, 20, 30))
    assert cli.main(["snapshots", str(tmp_path)]) == 1
    assert "checksum mismatch in block 0" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match="there is no checkpoint at"):
        await run_task(Mean(), out=tmp_path / "run", resume=tmp_path / "none")


async def test_a_rehearsal_finds_what_is_damaged_and_another_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first shard is damaged between its publication and its rehearsal."""
    rehearse, damaged = writer.rehearse, list[str]()

    def damaging(storage: object, name: str, digest: str) -> str:
        if not damaged:
            damaged.append(name)
            damage(tmp_path / name)
        return rehearse(Directory(tmp_path), name, digest)

    monkeypatch.setattr(writer, "rehearse", damaging)
    task = Mean()
    task.steps = 400
    await run_task(task, out=tmp_path, checkpoint_every=10)
    told = capfd.readouterr().err
    assert told.count("is damaged: ") == 1 and "checksum mismatch in block 0" in told
    assert damaged[0] in told and "Another one is written" in told
