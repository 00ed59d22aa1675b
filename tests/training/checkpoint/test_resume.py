"""Runs that go on further than they were meant to, with the bits of one that asked for all steps at once."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.jobs.by_words import plain_by, train_by

from zbmd.tools.chaos.small_job import write_text
from zbmd.training.autograd.parameter_layout import ParameterLayout, flat_slice
from zbmd.training.checkpoint.plan import read_plan, require_plan
from zbmd.training.checkpoint.sharded import Piece, open_state, read_names, write_alone
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.model.gpt import parameter_shapes
from zbmd.training.optim.muon import is_hidden
from zbmd.transport.errors import UserError

SHAPE = ("--width", "16", "--heads", "2", "--layers", "1", "--context", "8", "--shards", "3", "--warmup", "2")
FURTHER = (("--curve", "constant"), ("--horizon", "3"), ("--horizon", "5"))
"""Behind three steps of a curve that ends there, too: its rate is the lowest from then on."""


@pytest.mark.parametrize("schedule", FURTHER, ids=" ".join)
def test_a_finished_run_goes_on(
    schedule: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank with all of the state. Others below and beside: ZeRO in `test_zero_run`, meshes in
    `tests/tools/cli/test_train.py`, two ranks in `test_bad_input`."""

    def job(out: str, *arguments: str) -> list[str]:
        data = str(tmp_path / "text")
        return [*SHAPE, *schedule, "--data", data, "--out", str(tmp_path / out), *arguments]

    write_text(tmp_path / "text")
    wanted = plain_by(job("plain", "--steps", "5"))
    train_by(job("first", "--steps", "3"))
    train_by(job("further", "--steps", "5", "--resume", str(tmp_path / "first")))
    found = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])
    assert (found["steps"], found["weights_sha256"]) == (5, wanted.weights_sha256)


def test_a_run_of_muon_goes_on_without_second_moments_of_matrices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also from a checkpoint of a version that wrote them; another optimizer is refused."""

    def job(out: str, *arguments: str) -> list[str]:
        data = str(tmp_path / "text")
        return [*SHAPE, "--curve", "constant", "--data", data, "--out", str(tmp_path / out), *arguments]

    write_text(tmp_path / "text")
    muon = ("--optimizer", "muon")
    wanted = plain_by(job("plain", "--steps", "5", *muon))
    train_by(job("first", "--steps", "3", *muon))
    write_with_squares(tmp_path / "first", tmp_path / "older")
    for begins in ("first", "older"):
        resumed = ("--resume", str(tmp_path / begins))
        train_by(job(f"from-{begins}", "--steps", "5", *muon, *resumed))
        found = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])
        assert (found["steps"], found["weights_sha256"]) == (5, wanted.weights_sha256)
    with pytest.raises(UserError, match="Moments of another optimizer do not fit"):
        train_by(job("other", "--steps", "5", "--resume", str(tmp_path / "first")))


def write_with_squares(source: Path, out: Path) -> None:
    """Write a checkpoint again as earlier versions did: each parameter has all arrays."""
    names, pieces, added = read_names(source), list[Piece](), 0
    with closing(open_state(source, plan=names.plan)) as saved:
        ((_, shard),) = saved.shards
        for slot in ParameterLayout.of(parameter_shapes(read_plan(names.plan).model)).slots:
            weights, mean = saved.parameter("weights", slot), saved.parameter("mean", slot)
            has_square = f"square.{slot.name}" in shard.tensors
            assert has_square != is_hidden(slot.name, slot.shape)
            square = saved.parameter("square", slot) if has_square else np.zeros_like(mean)
            added += not has_square
            cut = flat_slice(slot.size, 0, slot.size)
            pieces.append(Piece(slot.name, cut, (weights, mean, square)))
    assert added
    out.mkdir()
    write_alone(out, pieces, version=names.version, plan=names.plan)


PLANS = [
    ({}, {}, None),
    ({"curve": "constant", "steps": 6}, {"curve": "constant", "steps": 9}, None),
    ({"curve": "constant", "horizon": 6}, {"curve": "constant"}, None),
    ({"steps": 6}, {"steps": 9, "horizon": 6}, None),
    ({"steps": 6, "horizon": 9}, {"steps": 9}, None),
    (
        {"steps": 6},
        {"steps": 9},
        r"training.horizon \(6, 9\)\. The learning rate .* with --horizon 6 it does so",
    ),
    ({"curve": "constant"}, {"curve": "linear"}, r"training.curve \(constant, linear\), training.horizon"),
    ({"seed": 1}, {"seed": 2}, r"training.seed \(1, 2\)\. Give the options"),
]


def plan(changes: dict[str, object]) -> str:
    training_config = msgspec.convert({"steps": 5, **changes}, TrainingConfig)
    return msgspec.json.encode({"model": GPTConfig(), "training": training_config}).decode()


@pytest.mark.parametrize(("there", "here", "said"), PLANS, ids=[str(case[:2]) for case in PLANS])
def test_steps_may_differ_where_learning_rates_do_not(
    there: dict[str, object], here: dict[str, object], said: str | None
) -> None:
    if said is None:
        require_plan(Path("there"), plan(there), plan(here))
        return
    with pytest.raises(UserError, match=said):
        require_plan(Path("there"), plan(there), plan(here))


def test_a_plan_of_a_version_without_horizons_is_understood() -> None:
    of_before = msgspec.json.decode(plan({"steps": 6}))
    del of_before["training"]["horizon"]
    require_plan(Path("there"), msgspec.json.encode(of_before).decode(), plan({"steps": 9, "horizon": 6}))
