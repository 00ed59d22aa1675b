"""Damage is found: by the rehearsal after a checkpoint, and before a run resumes from it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from zbmd.tools.entry import zbmd as cli
from zbmd.training.autograd.parameter_layout import flat_slice
from zbmd.training.checkpoint import writer
from zbmd.training.checkpoint.blocks import BLOCK_BYTES, Codec, Shard
from zbmd.training.checkpoint.index import Retention, is_index, is_shard
from zbmd.training.checkpoint.sharded import Piece, read_names, write_alone
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


RANKS, BLOCKS = 3, 8


def write(out: Path, version: int, codec: Codec = Codec.NONE) -> Path:
    """Write a checkpoint of `BLOCKS` blocks; return its shard."""
    numbers = np.arange(BLOCKS * BLOCK_BYTES // 4, dtype=np.float32) + version
    piece = Piece("x", flat_slice(numbers.size, 0, numbers.size), (numbers,), names=("weights",))
    write_alone(out, [piece], version=version, plan="any", retention=Retention(9), codec=codec)
    return of_version(out, version, "shard")


class Voting:
    """The vote of threads, each of which is a rank; and the blocks that each of them reads."""

    def __init__(self) -> None:
        self.votes = [0] * RANKS
        self.rounds = threading.Barrier(RANKS)

    def found(self, out: Path) -> list[Path | UserError]:
        """Return what each rank finds."""
        with ThreadPoolExecutor(RANKS) as ranks:
            return list(ranks.map(lambda place: self._found(out, place), range(RANKS)))

    def _found(self, out: Path, place: int) -> Path | UserError:
        def vote(at: int) -> list[int]:
            self.votes[place] = at
            self.rounds.wait()
            votes = [*self.votes]
            self.rounds.wait()
            return votes

        try:
            return newest_whole(out, vote, place=place, places=RANKS)
        except UserError as error:
            return error


def test_ranks_verify_disjoint_parts_that_are_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, parts = Shard.verify, list[Sequence[tuple[str, int]]]()

    def verify(self: Shard, blocks: Any = None) -> None:
        parts.append(blocks)
        read(self, blocks)

    monkeypatch.setattr(Shard, "verify", verify)
    write(tmp_path, 1)
    found = Voting().found(tmp_path)
    assert {str(each) for each in found} == {str(of_version(tmp_path, 1, "index"))}
    assert sorted(block for part in parts for block in part) == [("weights.x", at) for at in range(BLOCKS)]
    assert max(map(len, parts)) == -(-BLOCKS // RANKS)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_byte_that_one_rank_finds_damaged_makes_all_fall_back(
    tmp_path: Path, codec: Codec, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last three checkpoints are damaged, each in the part of another rank."""
    for version in range(1, 5):
        shard = write(tmp_path, version, codec)
        if version > 1:
            damage(shard, -(version - 1) * shard.stat().st_size // BLOCKS + 99)
    found = Voting().found(tmp_path)
    assert {str(each) for each in found} == {str(of_version(tmp_path, 1, "index"))}
    told = capfd.readouterr().err
    assert told.count("left out: ") == 3 and told.count("going on from the checkpoint of step 1") == 1
    assert read_names(tmp_path).version == 1
    damage(of_version(tmp_path, 1, "shard"))
    errors = [str(each) for each in Voting().found(tmp_path) if isinstance(each, UserError)]
    assert len(errors) == RANKS and all("is whole" in each for each in errors)
    assert sum("checksum mismatch" in each or "decompressed" in each for each in errors) >= 1
