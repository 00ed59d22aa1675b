"""Folders of `torch.distributed.checkpoint`: PyTorch reads ours, and we read PyTorch's, of any ranks."""

from __future__ import annotations

import importlib
import pickle  # noqa: TID251 -- to make what is refused
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import PROGRAMS
from safetensors import safe_open

from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.checkpoint.formats.convert import Format, convert_checkpoint
from zbmd.training.checkpoint.plan import plan_text
from zbmd.training.checkpoint.sharded import open_state, read_names, take_state, whole_pieces, write_alone
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.model.gpt import parameter_shapes
from zbmd.training.optim import ARRAYS, AdamWConfig, AdamWState
from zbmd.training.run.loop_steps import LoopPlan
from zbmd.transport.errors import UserError

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [
    pytest.mark.optional,
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of its deprecations
]
dcp: Any = importlib.import_module("torch.distributed.checkpoint")
formats: Any = importlib.import_module("zbmd.training.checkpoint.formats.dcp")
saved: Any = importlib.import_module("zbmd.training.torch.durable.saved")
states: Any = importlib.import_module("zbmd.training.torch.state")

GPT = GPTConfig(context=8, width=16, heads=2, layers=2)
LAYOUT = ParameterLayout.of(parameter_shapes(GPT))
PLAN = LoopPlan(loop="X", ranks=1, parameters=1, model="m")

TWO_RANKS = str(PROGRAMS / "torch" / "backend" / "loading" / "two_ranks_of_dcp.py")


def on_two_ranks(directory: Path, folder: Path, what: str) -> Any:
    """Save or load with PyTorch alone, on two ranks with gloo; return the whole tensors."""
    done = subprocess.run(
        [sys.executable, TWO_RANKS, str(folder), what], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.load(f"{folder}.whole", weights_only=True)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Path, AdamWState]]:
    """A checkpoint of the engine, and its state."""
    flat = np.random.default_rng(3).standard_normal(3 * LAYOUT.size).astype(np.float32)
    state = AdamWState.of(flat, LAYOUT.size, 3)
    for name in ARRAYS:
        LAYOUT.clear_padding(getattr(state, name))
    (tmp_path / "run").mkdir()
    plan = plan_text(GPT, TrainingConfig(steps=9), corpus="c")
    pieces = whole_pieces(LAYOUT, state, AdamWConfig())
    write_alone(tmp_path / "run", pieces, version=4, plan=plan, loss_scale=(8.0, 1.0))
    yield tmp_path / "run", state


def test_pytorch_reads_what_a_run_of_the_engine_has_written(
    tmp_path: Path, run: tuple[Path, AdamWState]
) -> None:
    """As a whole in one process, and one parameter as shards of two ranks; then it becomes a run again."""
    path, state = run
    convert_checkpoint(path, tmp_path / "dcp", Format.DCP)
    model = {name: torch.zeros(shape) for name, shape in parameter_shapes(GPT).items()}
    moments = {name: {"mean": torch.zeros(shape)} for name, shape in parameter_shapes(GPT).items()}
    dcp.load({"model": model, "optim": {"state": moments}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for slot in LAYOUT.slots:
        assert model[slot.name].numpy().tobytes() == state.weights[slot.span].tobytes()
        assert moments[slot.name]["mean"].numpy().tobytes() == state.mean[slot.span].tobytes()
    whole = on_two_ranks(tmp_path, tmp_path / "dcp", "load")
    assert whole.numpy().tobytes() == state.weights[LAYOUT.slots[0].span].tobytes()
    convert_checkpoint(tmp_path / "dcp", tmp_path / "again", Format.ZBMD)
    names = read_names(tmp_path / "again/checkpoint.json")
    assert names.version == 4 and names.loss_scale == (8.0, 1.0)
    other = AdamWState.of(np.zeros(3 * LAYOUT.size, np.float32), LAYOUT.size, 3)
    with closing(open_state(tmp_path / "again", plan=names.plan)) as opened:
        take_state(opened, other, LAYOUT, AdamWConfig(), xp=np)
    assert all(getattr(other, name).tobytes() == getattr(state, name).tobytes() for name in ARRAYS)


def test_what_two_ranks_of_pytorch_have_written_becomes_safetensors_files(tmp_path: Path) -> None:
    whole = on_two_ranks(tmp_path, tmp_path / "dcp", "save")
    convert_checkpoint(tmp_path / "dcp", tmp_path / "hf", Format.HF)
    with safe_open(tmp_path / "hf/model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"wide", "half"}
        for name, tensor in whole.items():
            assert torch.equal(file.get_tensor(name), tensor) and file.get_tensor(name).dtype == tensor.dtype
    convert_checkpoint(tmp_path / "hf", tmp_path / "back", Format.DCP)
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in whole.items()}}
    dcp.load(into, checkpoint_id=tmp_path / "back", no_dist=True)
    assert all(torch.equal(into["model"][name], tensor) for name, tensor in whole.items())
    with pytest.raises(UserError, match="was not written by a run of zbmd"):
        convert_checkpoint(tmp_path / "dcp", tmp_path / "again", Format.ZBMD)


def loop_of(seed: int) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    optimizer.step()
    return states.LoopState([model], [optimizer], [], rank=0, ranks=1, seed=seed)


def test_a_loop_of_pytorch_goes_through_the_format_and_on(tmp_path: Path) -> None:
    state = loop_of(1)
    (tmp_path / "loop").mkdir()
    write_alone(tmp_path / "loop", saved.pieces_of(state, 7), version=3, plan=PLAN.text())
    convert_checkpoint(tmp_path / "loop", tmp_path / "dcp", Format.DCP)
    weights = state.models[0].state_dict()
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in weights.items()}}
    dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(into["model"][name], tensor) for name, tensor in weights.items())
    convert_checkpoint(tmp_path / "dcp", tmp_path / "again", Format.ZBMD)
    other = loop_of(2)
    assert saved.resume(tmp_path / "again", other, PLAN, None) == 7
    assert all(torch.equal(other.models[0].state_dict()[name], tensor) for name, tensor in weights.items())
    for mine, theirs in zip(state.models[0].parameters(), other.models[0].parameters(), strict=True):
        for name, value in state.optimizers[0].state[mine].items():
            assert torch.equal(other.optimizers[0].state[theirs][name], value)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_metadata_that_calls_anything_else_is_refused(tmp_path: Path) -> None:
    folder, made = tmp_path / "dcp", tmp_path / "made"
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=folder, no_dist=True)
    metadata = formats.read_metadata(folder)
    whole = (folder / ".metadata").read_bytes()
    metadata.planner_data = Evil(made)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"which is no part of the format.*Expected the classes"):
        formats.open_dcp(folder)
    assert not made.exists()
    for damaged in (b"", whole[:-9], pickle.dumps({"a": 1}), b"cos\nsystem\n(S'touch made'\ntR."):
        (folder / ".metadata").write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read as the metadata"):
            formats.open_dcp(folder)


def test_metadata_of_files_elsewhere_or_of_more_than_there_is_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=folder, no_dist=True)
    metadata = formats.read_metadata(folder)
    (info,) = metadata.storage_data.values()
    whole, info.relative_path = info.relative_path, "../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="which is not in the folder"):
        formats.open_dcp(folder)
    info.relative_path = whole
    metadata.state_dict_metadata["model.w"].size = torch.Size([1 << 40])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"its tensors have 4398046511104 bytes, and its files \d+"):
        formats.open_dcp(folder)
