"""A model of the user's own, `examples/own_model.py`: on any number of ranks, killed, stopped and resumed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.jobs.writer_work import WriterWork
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss
from zbmd.tools.runs.commands import audit_run
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.checkpoint import saving, writer
from zbmd.training.checkpoint.sharded import open_state, read_names
from zbmd.training.checkpoint.storage import Storage
from zbmd.training.job.data_parallel import DataParallelTask, State, TaskResult, run_task
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

EXAMPLE = Path(__file__).parents[3] / "examples/own_model.py"
LINES_MAX = 60
TURNS = 10


async def run(out: Path, ranks: int, *, fault: str = "", on_loss: OnLoss = OnLoss.REPLACE) -> TaskResult:
    output = Lines()
    config = HostConfig(
        target=str(EXAMPLE),
        arguments=(str(out),),
        world_size=ranks,
        on_loss=on_loss,
        environment={faults.FAULT_VARIABLE: fault},
        preload=("zbmd.training.job.data_parallel",),
    )
    ended = await Host(config, output=output).run()
    assert ended.exit_code == 0, "\n".join(output.lines)
    assert len(ended.failures) == len(faults.parse(fault)), ended.failures
    (told,) = re.findall(r"\{.*state_sha256.*\}", "\n".join(output.lines))
    audited = audit_run(out)
    lost = audited.steps_lost + audited.samples_skipped + audited.samples_repeated
    assert (audited.steps, lost) == (600, 0)
    return msgspec.json.decode(told, type=TaskResult)


async def test_kills_leave_no_trace(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= LINES_MAX
    calm = await run(tmp_path / "calm", 1)
    fault = "rank1:job.begin:100,rank0:job.begin:300"
    killed = await run(tmp_path / "killed", 3, fault=fault)
    shrunk = await run(tmp_path / "shrunk", 3, fault="rank0:mirror.commit:200", on_loss=OnLoss.SHRINK)
    assert calm.state_sha256 == killed.state_sha256 == shrunk.state_sha256
    assert (calm.ranks, killed.ranks, shrunk.ranks) == (1, 3, 2) and calm.loss_last < 0.1


class Mean(DataParallelTask):
    """Finds the mean of numbers; `stops` after so many steps, as after a signal."""

    steps, examples, shards, samples = 300, 40, 4, 3

    def __init__(self, stops: int = 0) -> None:
        self.numbers, self.stops = np.linspace(0, 1, self.examples, dtype=np.float32), stops

    def initial(self) -> dict[str, np.ndarray]:
        self.loop = asyncio.get_running_loop()
        return {"mean": np.zeros(1, np.float32), "seen": np.zeros((2, 2), np.float32)}

    parameters = ("mean",)

    def gradient(self, state: State, ids: np.ndarray) -> tuple[float, State]:
        error = state["mean"] - self.numbers[ids]
        return float((error**2).mean()), {"mean": np.array([2 * error.mean()], np.float32)}

    def update(self, old: State, new: State, gradient: State, step: int) -> None:
        new["mean"][:] = old["mean"] - np.float32(0.1) * gradient["mean"]
        new["seen"][:] = old["seen"] + 1
        if step + 1 == self.stops:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(TURNS):  # the loop takes the signal
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result()

    def held_out_loss(self, state: State) -> float:
        return float(abs(state["mean"][0] - 0.5))


async def test_a_run_that_is_stopped_goes_on_from_its_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = await run_task(Mean(), out=tmp_path / "whole")
    assert whole is not None and whole.steps == 300 and 0 < whole.held_out_loss < 0.5
    assert await run_task(Mean(4), out=tmp_path / "run") is None
    saved = re.search(r"step (\d) saved", capfd.readouterr().err)
    version = read_names(tmp_path / "run/checkpoint.json").version
    assert saved is not None and int(saved[1]) == version >= 4
    with pytest.raises(UserError, match="belongs to another run"):
        await run_task(Mean(), out=tmp_path / "run")
    further = await run_task(Mean(), out=tmp_path / "run", resume=tmp_path / "run")
    assert further is not None and further.state_sha256 == whole.state_sha256
    assert audit_run(tmp_path / "run").steps == 300
    other = Mean()
    other.seed = 1
    with pytest.raises(UserError, match=r"order.seed \(0, 1\)"):
        await run_task(other, out=tmp_path / "other", resume=tmp_path / "run")


async def test_a_checkpoint_is_written_beside_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: WriterWork
) -> None:
    """Its shard is held up until the step after it is computed, and has the state before that.

    Later steps wait for it: the next one is due then.
    """
    computed, write = threading.Event(), writer.write_shard_of
    states = dict[int, float]()

    def held_up(storage: Storage, stem: str, *given: Any) -> str:
        if stem.startswith("checkpoint-100-"):
            assert computed.wait(180), "the step waits for the checkpoint"
        return write(storage, stem, *given)

    class Noted(Mean):
        name = "Mean"

        def update(self, old: State, new: State, gradient: State, step: int) -> None:
            super().update(old, new, gradient, step)
            states[step + 1] = float(new["mean"][0])
            if step == 100:
                computed.set()
            if step in (150, 250):
                work.until(saving.Wrote, step // 100)
            if step in (190, 290):
                work.until(saving.Published, step // 100)

    monkeypatch.setattr(writer, "write_shard_of", held_up)
    kept = dict[int, float]()

    def look(storage: Storage, *given: Any, **options: Any) -> None:
        name(storage, *given, **options)
        saved = open_state(storage, plan=Noted().plan)
        slot = ParameterLayout.of({"mean": (1,)}).slots[0]
        kept[saved.version] = float(saved.parameter("weights", slot)[0])
        saved.close()

    name = writer.name_written
    monkeypatch.setattr(writer, "name_written", look)
    await run_task(Noted(), out=tmp_path / "run", checkpoint_every=100)
    assert kept == {version: states[version] for version in (100, 200, 300)}


class Failing(Mean):
    """Computes half of something, and fails, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left = {"gradient": 2, "update": 2}

    def fail(self, what: str) -> None:
        if self.left[what]:
            self.left[what] -= 1
            raise RuntimeError(what)

    def gradient(self, state: State, ids: np.ndarray) -> tuple[float, State]:
        found = super().gradient(state, ids)
        self.fail("gradient")
        return found

    def update(self, old: State, new: State, gradient: State, step: int) -> None:
        new["mean"][:] = np.nan
        self.fail("update")
        super().update(old, new, gradient, step)


async def test_actors_compute_again_what_fails(tmp_path: Path) -> None:
    calm = await run_task(Mean(), out=tmp_path / "calm")
    task = Failing()
    task.name = "Mean"
    failed = await run_task(task, out=tmp_path / "failing", actors=True)
    assert calm is not None and failed is not None
    assert failed.state_sha256 == calm.state_sha256
    assert task.left == {"gradient": 0, "update": 0}
    with pytest.raises(RuntimeError, match="gradient"):
        await run_task(Failing(), out=tmp_path / "without")


async def test_bad_tasks_are_told_in_words(tmp_path: Path) -> None:
    task = Mean()
    task.examples = 0
    with pytest.raises(UserError, match="Mean: examples, steps, shards and samples must be at least 1"):
        await run_task(task, out=tmp_path)

    class Wide(Mean):
        def initial(self) -> dict[str, np.ndarray]:
            return {"mean": np.zeros(1)}

    with pytest.raises(UserError, match=r"Wide.initial: expected float32 arrays, got \['mean'\]"):
        await run_task(Wide(), out=tmp_path)
