"""Checkpoints of resilient loops: whatever ends a job, the next one goes on with the same bits."""

from __future__ import annotations

import importlib
import json
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import PROGRAMS
from support.jobs.resilient_loops import steps_in, train
from support.processes.kept_lines import Lines
from support.processes.warm_template import template_of

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.process.output import OutputLine
from zbmd.actors.view import Outcome
from zbmd.tools.runs.commands import audit_run
from zbmd.training.checkpoint.index import SHARDS_NAME, Retention, is_shard
from zbmd.training.checkpoint.pace import FIRST_STEPS
from zbmd.training.checkpoint.sharded import open_state, read_names, write_alone
from zbmd.training.job.overwrite import claimed
from zbmd.training.job.records import METRICS_NAME
from zbmd.training.run.ledger import LOG_NAME, read_log
from zbmd.training.run.loop_steps import LoopPlan
from zbmd.transport.errors import UserError

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional
saved: Any = importlib.import_module("zbmd.training.torch.durable.saved")
states: Any = importlib.import_module("zbmd.training.torch.state")
recorder: Any = importlib.import_module("zbmd.training.torch.durable.recorder")

DDP, FSDP = PROGRAMS / "training/resilient_ddp.py", PROGRAMS / "torch/resilient_fsdp.py"
RECORDED = PROGRAMS / "torch/recorded_loop.py"
RANKS = 3


@cache
def _undisturbed() -> dict[tuple[Path, str], frozenset[str]]:
    return {}


async def undisturbed(program: Path, mode: str) -> frozenset[str]:
    """Return what the ranks of an undisturbed run, which is not saved, print of its steps."""
    if (program, mode) not in _undisturbed():
        result, lines = await train(program, mode)
        assert result.outcome is Outcome.SUCCEEDED and result.restarts == 0, "\n".join(lines)
        _undisturbed()[program, mode] = frozenset(told_in(lines))
    return _undisturbed()[program, mode]


def told_in(lines: list[str]) -> list[str]:
    return [line for line in steps_in(lines) if "evaluated" not in line and "saved: " not in line]


def all_of(point: str, ranks: int = RANKS) -> str:
    """A fault that kills all ranks, as a power cut does."""
    return "+".join(f"rank{rank}:{point}" for rank in range(ranks))


def require_tidy(out: Path, step: int) -> None:
    """The directory has a whole checkpoint, of `step`, and but for what is kept nothing of others.

    Its log has each step and sample once.
    """
    names, there = read_names(out / SHARDS_NAME), [path.name for path in out.iterdir()]
    assert names.version == step and set(names.files) <= set(there)
    assert not Retention().removed(there, names)
    found = audit_run(out)
    assert found.is_whole and found.steps == step, found


@pytest.mark.parametrize(
    ("program", "mode", "point", "steps"),
    [
        (DDP, "plain", "loop.begin:11", 12),
        (DDP, "scaler", "loop.begin:9", 12),
        (FSDP, "scaler+fused", "loop.prepared:10", 8),
        (FSDP, "momentum", "loop.begin:8", 8),
    ],
)
async def test_a_job_that_is_lost_as_a_whole_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Path, mode: str, point: str, steps: int
) -> None:
    """With the losses, rates, samples and scales of an undisturbed run; the log has each step once."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted, out = await undisturbed(program, mode), tmp_path / "run"
    more = {"OUT": str(out), "SAVE": "6"}
    result, lines = await train(program, mode, all_of(point), more=more)
    assert result.outcome is Outcome.FAILED, "\n".join(lines)
    assert read_names(out / SHARDS_NAME).version == 6
    logged = [record.version for record in read_log(out / LOG_NAME)[1]]
    result, lines = await train(program, mode, more={"OUT": str(out), "EVERY": "4", "RESUME": "1"})
    told = told_in(lines)
    assert result.outcome is Outcome.SUCCEEDED and len(told) == RANKS * (steps - 6 + 1), "\n".join(lines)
    assert set(told) <= wanted
    assert logged[-1] > 6 and [record.version for record in read_log(out / LOG_NAME)[1]] == [
        *range(1, steps + 1)
    ]
    require_tidy(out, steps)


@pytest.mark.parametrize(
    ("program", "fault", "steps"),
    [
        (DDP, "rank0:shards.staged:1", 12),
        (DDP, "rank0:shards.index:2,rank1:shards.write:3", 12),
        (DDP, "rank0:shards.named:1", 12),
        (FSDP, "rank1:shards.write:1,rank0:shards.index:1", 8),
        (FSDP, "rank0:shards.named:2,rank2:shards.written:2", 8),
    ],
)
async def test_a_rank_that_is_killed_in_a_checkpoint_is_replaced_and_writes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Path, fault: str, steps: int
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted, out = await undisturbed(program, "plain"), tmp_path / "run"
    result, lines = await train(program, "plain", fault, more={"OUT": str(out), "EVERY": "2"})
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    assert result.restarts == len(fault.split(",")), "\n".join(lines)
    assert set(told_in(lines)) <= wanted
    require_tidy(out, steps)


async def test_a_loop_measures_when_its_checkpoints_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 asks for all; a run that is lost as a whole counts as a failure, a replaced rank does not."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    out = tmp_path / "run"
    more = {"OUT": str(out), "EVERY": "auto", "EPOCHS": "20"}
    result, lines = await train(RECORDED, "", all_of("test.paced", 2), ranks=2, more=more)
    assert result.outcome is Outcome.FAILED, "\n".join(lines)
    assert read_names(out / SHARDS_NAME).version == FIRST_STEPS
    result, lines = await train(RECORDED, "", "rank0:loop.begin:2", ranks=2, more={**more, "RESUME": "1"})
    assert result.outcome is Outcome.SUCCEEDED and result.restarts == 1, "\n".join(lines)
    require_tidy(out, 100)
    noted = [json.loads(line) for line in (out / METRICS_NAME).read_text().splitlines()]
    first, lost, *_ = paces = [line for line in noted if "checkpoint_every" in line]
    assert [pace["failures"] for pace in paces][:2] == [0, 1] and lost["step"] == first["step"] == FIRST_STEPS
    assert 0 < first["stall_s"] < first["latency_s"] and lost["mtbf_s"] < 0.1 * first["mtbf_s"]


async def test_a_job_that_is_lost_in_a_checkpoint_goes_on_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shards of the second one are durable, and no index names them."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted, out = await undisturbed(FSDP, "plain"), tmp_path / "run"
    fault = "rank0:shards.index:2,rank1:loop.meet:1,rank2:loop.meet:1"
    result, lines = await train(FSDP, "plain", fault, more={"OUT": str(out), "SAVE": "3"})
    assert result.outcome is Outcome.FAILED, "\n".join(lines)
    assert read_names(out / SHARDS_NAME).version == 3
    result, lines = await train(FSDP, "plain", more={"OUT": str(out), "EVERY": "3", "RESUME": "1"})
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    assert len(told_in(lines)) == RANKS * 6 and set(told_in(lines)) <= wanted
    require_tidy(out, 8)


async def test_shards_are_read_by_another_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a pass; in its middle that is refused before the first step, on all ranks."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    out = {"OUT": str(tmp_path / "run"), "EVERY": "3", "WHOLE": "1"}
    result, lines = await train(FSDP, "plain", ranks=3, more={**out, "EPOCHS": "1"})
    ends = {line.partition("ends with")[2] for line in lines if "ends with" in line}
    assert result.outcome is Outcome.SUCCEEDED and len(ends) == 1, "\n".join(lines)
    result, lines = await train(FSDP, "plain", ranks=2, more={**out, "RESUME": "1", "EPOCHS": "2"})
    begins = [line.partition("begins with")[2] for line in lines if "begins with" in line]
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    assert len(begins) == 2 and set(begins) == ends
    require_tidy(tmp_path / "run", 4 + 6)
    half = {"OUT": str(tmp_path / "half"), "SAVE": "2"}
    await train(FSDP, "plain", all_of("loop.begin:4"), more=half)
    result, lines = await train(FSDP, "plain", ranks=2, more={**half, "RESUME": "1"})
    assert result.outcome is Outcome.FAILED
    assert sum("in the middle of a pass" in line and "start 3 ranks" in line for line in lines) >= 2, lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
async def test_signals_save_and_stop_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """SIGTERM as a launcher sends it, to all; SIGUSR1 to one rank saves, and the loop goes on."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    out = tmp_path / "run"
    sent = tmp_path / "sent"
    waits = {"EPOCHS": "2", "AWAITS": str(sent)} if number is signal.SIGUSR1 else {"EPOCHS": "2000"}
    variables = {"OUT": str(out), **waits}
    output = SignalAfter("step 3 rank 0", number, sent)
    config = HostConfig(target=str(RECORDED), world_size=2, arena_bytes=32 << 20, environment=variables)
    host = output.host = Host(config, output=output, template=template_of(config))
    result = await host.run()
    told = next(line for line in output.lines if "saved: " in line)
    step = int(told.partition("step ")[2].split()[0])
    assert step >= 4 and read_names(out / SHARDS_NAME).version == step, output.lines
    last = read_log(out / LOG_NAME)[1][-1].version
    if number is signal.SIGTERM:
        assert result.outcome is Outcome.STOPPED and last == step, output.lines
        more = {"OUT": str(out), "RESUME": "1", "EPOCHS": str(-(-step // 5) + 1)}
        result, lines = await train(RECORDED, "plain", ranks=2, more=more)
        assert f"step {step + 1} rank 0" in "\n".join(lines) and f"step {step} rank" not in "\n".join(lines)
        last = read_log(out / LOG_NAME)[1][-1].version
    assert result.outcome is Outcome.SUCCEEDED, output.lines
    found = audit_run(out)
    assert found.is_whole and found.steps == last, found


class SignalAfter(Lines):
    """Output that sends a signal once a line has come: SIGTERM by the launcher, others to rank 0.

    sent: a file that is there once rank 0 has the signal.
    """

    host: Host

    def __init__(self, words: str, number: signal.Signals, sent: Path) -> None:
        super().__init__()
        self._words, self._number, self._sent = words, number, sent

    async def write_line(self, line: OutputLine) -> None:
        """Keep one line."""
        await super().write_line(line)
        if self._words and self._words in self.lines[-1]:
            self._words = ""
            if self._number is signal.SIGTERM:
                self.host.stop("SIGTERM received")
            else:
                assert self.host.forward(self._number, local_rank=0) == 1
                self._sent.touch()


# ---- what is refused


def test_a_directory_in_use_is_refused_in_the_words_of_a_training_run(tmp_path: Path) -> None:
    plan = LoopPlan(loop="SGD", ranks=2, parameters=3, model="m")
    with recorder.claiming(tmp_path, resume=False) as refused:
        writer = recorder.Recorder(tmp_path, run_id="a", plan=plan, seed=7, fresh=False)
    assert refused == ""
    with recorder.claiming(tmp_path, resume=True) as refused:
        assert "a run is under way in" in refused and "stop it first" in refused
    writer.close()
    with recorder.claiming(tmp_path, resume=True) as refused:
        assert refused == ""
    with claimed(tmp_path), recorder.claiming(tmp_path, resume=True) as refused:
        assert "a run is under way in" in refused


# ---- the content of a checkpoint


class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Parameters of several dtypes, a buffer of integers, an empty one, and a tied weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        for name, dtype in (("a", torch.float32), ("b", torch.bfloat16), ("c", torch.float64)):
            values = torch.rand(3, 5, generator=draws).to(dtype)
            setattr(self, name, torch.nn.Parameter(values))
        self.tied = self.a
        self.register_buffer("seen", torch.tensor([seed], dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 3))


def state_of(seed: int, kind: str) -> Any:
    model = Model(seed)
    if kind == "adafactor":
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    elif kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return states.LoopState([model], [optimizer], [scheduler], rank=0, ranks=1, seed=seed)


def step(state: Any) -> None:
    state.keep()
    model, optimizer = state.models[0], state.optimizers[0]
    optimizer.zero_grad()
    (model.a.sum() * 2 + (model.b.double() * model.c).sum()).backward()
    optimizer.step()
    state.boundary.others[0].step()
    model.seen += 1


def bits_of(state: Any) -> list[bytes]:
    model, optimizer = state.models[0], state.optimizers[0]
    tensors = [*model.parameters(), *model.buffers()]
    for each in model.parameters():
        tensors += [value for _, value in sorted(optimizer.state[each].items())]
    return [repr(value).encode() for value in (optimizer.param_groups[0]["lr"], *tensors)]


PLAN = LoopPlan(loop="X", ranks=1, parameters=1, model="m")


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor"])
def test_a_state_comes_back_with_its_bits(tmp_path: Path, kind: str) -> None:
    state = state_of(1, kind)
    for _ in range(3):
        step(state)
    write_alone(tmp_path, saved.pieces_of(state, 7), version=3, plan=PLAN.text())
    other = state_of(2, kind)
    assert saved.resume(tmp_path, other, PLAN, None) == 7
    assert bits_of(other) == bits_of(state) and other.seed == 1
    step(state)
    step(other)
    assert bits_of(other) == bits_of(state)


def test_what_a_step_writes_before_its_vote_is_copied() -> None:
    """Buffers are: the rest is not written before, and a thread copies it."""
    state = state_of(1, "adamw")
    step(state)
    found = {piece.name: piece.arrays[0] for piece in saved.pieces_of(state, 1)}
    before = {name: array.copy() for name, array in found.items()}
    state.models[0].seen += 1
    assert found["seen"].tobytes() == before["seen"].tobytes()
    step(state)
    assert found["a"].tobytes() != before["a"].tobytes()


def test_other_plans_seeds_and_damage_are_refused(tmp_path: Path) -> None:
    state = state_of(1, "sgd")
    with pytest.raises(UserError, match="there is no checkpoint at"):
        saved.resume(tmp_path, state, PLAN, None)
    step(state)
    write_alone(tmp_path, saved.pieces_of(state, 1), version=1, plan=PLAN.text())
    with pytest.raises(UserError, match=r"cannot be resumed bit for bit\. Differences.*model \(m, n\)"):
        saved.resume(tmp_path, state, LoopPlan(loop="X", ranks=1, parameters=1, model="n"), None)
    with pytest.raises(UserError, match="belongs to a run with seed 1, so it cannot be resumed by"):
        saved.resume(tmp_path, state, PLAN, 5)
    (shard,) = (path for path in tmp_path.iterdir() if is_shard(path.name))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match="checksum mismatch"):
        saved.resume(tmp_path, state, PLAN, None)


def test_a_state_that_no_file_has_is_named() -> None:
    state = state_of(1, "sgd")
    state.models[0].register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UserError, match="wide is complex128"):
        saved.pieces_of(state, 1)


def test_bfloat16_is_in_the_file_as_it_is(tmp_path: Path) -> None:
    state = state_of(1, "sgd")
    write_alone(tmp_path, saved.pieces_of(state, 0), version=0, plan=PLAN.text())
    part = saved.part_of("b", state.models[0].b, 0)
    found = open_state(tmp_path, plan=PLAN.text())
    bits = found.parameter("weights", part.slot, np.uint16)
    found.close()
    assert bits.tobytes() == bytes(state.models[0].b.detach().view(torch.uint8).reshape(-1).tolist())
    assert os.path.getsize(tmp_path / SHARDS_NAME) < 1024
