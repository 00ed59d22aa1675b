"""Hugging Face's folders: several files and an index, which other readers read, and the way back."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.checkpoint.formats.convert import Format, convert_checkpoint, opened
from zbmd.training.checkpoint.formats.safetensors_folder import SafetensorsFile, open_folder, write_folder
from zbmd.training.checkpoint.formats.tensors import file_dtype
from zbmd.training.checkpoint.plan import plan_text
from zbmd.training.checkpoint.sharded import whole_pieces, write_alone
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.model.gpt import parameter_shapes
from zbmd.training.model.hugging_face import INDEX_NAME, WEIGHTS_NAME, load_gpt2, read_index
from zbmd.training.optim import ARRAYS, AdamWConfig, AdamWState
from zbmd.transport.errors import UserError

GPT2 = GPTConfig(family="gpt2", activation="gelu", vocabulary=37, context=8, width=16, heads=2, layers=2)


def engine_checkpoint(path: Path, model: GPTConfig) -> AdamWState:
    """Write a checkpoint of the engine; return its state."""
    layout = ParameterLayout.of(parameter_shapes(model))
    flat = np.random.default_rng(3).standard_normal(3 * layout.size).astype(np.float32)
    state = AdamWState.of(flat, layout.size, 3)
    for name in ARRAYS:
        layout.clear_padding(getattr(state, name))
    path.mkdir()
    plan = plan_text(model, TrainingConfig(steps=9), corpus="c")
    write_alone(path, whole_pieces(layout, state, AdamWConfig()), version=4, plan=plan)
    return state


@pytest.mark.parametrize("shard_bytes", [4_000, 10**9])
def test_a_gpt2_is_written_for_other_readers_and_read_again(tmp_path: Path, shard_bytes: int) -> None:
    state = engine_checkpoint(tmp_path / "run", GPT2)
    found, _ = convert_checkpoint(tmp_path / "run", tmp_path / "hf", Format.HF, shard_bytes=shard_bytes)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert found is Format.ZBMD
    if shard_bytes > 10**6:
        assert [path.name for path in files] == [WEIGHTS_NAME] and not (tmp_path / "hf" / INDEX_NAME).exists()
    else:
        count = len(files)
        assert count > 2 and files[0].name == f"model-00001-of-{count:05d}.safetensors"
        assert set(read_index(tmp_path / "hf" / INDEX_NAME).values()) == set(files)
        index = json.loads((tmp_path / "hf" / INDEX_NAME).read_text())
        total = 0
        for path in files:
            with safe_open(path, framework="numpy") as file:
                sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
            assert sum(sizes.values()) <= shard_bytes or len(sizes) == 1
            assert {index["weight_map"][name] for name in sizes} == {path.name}
            total += sum(sizes.values())
        assert index["metadata"]["total_size"] == total
    flat, config = load_gpt2(tmp_path / "hf")
    assert config == GPT2 and flat.tobytes() == state.weights.tobytes()


def test_weights_of_several_dtypes_go_through_a_folder_with_their_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    wide, counts = rng.standard_normal((4, 6)), rng.integers(0, 9, (3,))
    (tmp_path / "a").mkdir()
    save_file(
        {"wide": wide, "counts": counts, "empty": np.zeros((0, 3), np.float16)}, tmp_path / "a" / WEIGHTS_NAME
    )
    content = open_folder(tmp_path / "a")
    assert {tensor.key: (tensor.dtype, tensor.shape) for tensor in content.tensors} == {
        "model.wide": ("float64", (4, 6)),
        "model.counts": ("int64", (3,)),
        "model.empty": ("float16", (0, 3)),
    }
    (tmp_path / "b").mkdir()
    write_folder(tmp_path / "b", content, shard_bytes=100)
    again = open_folder(tmp_path / "b")
    for one in content.tensors:
        (other,) = (tensor for tensor in again.tensors if tensor.key == one.key)
        assert (other.dtype, other.shape) == (one.dtype, one.shape)
        assert again.read(other).tobytes() == content.read(one).tobytes()
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1


def test_an_index_that_names_files_elsewhere_or_absent_tensors_is_refused(tmp_path: Path) -> None:
    index = tmp_path / INDEX_NAME
    for name in ("../model.safetensors", "/etc/model.safetensors", "model.bin", "a/b.safetensors"):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(UserError, match="is not the name of a safetensors file beside it"):
            open_folder(tmp_path)
    save_file({"v": np.zeros(2)}, tmp_path / "model-1.safetensors")
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    with pytest.raises(UserError, match=r"lacks tensor w, which model\.safetensors\.index\.json names"):
        open_folder(tmp_path)
    index.write_text("{")
    with pytest.raises(UserError, match="is not an index of safetensors files"):
        open_folder(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    save_file({"v": np.arange(6.0)}, tmp_path / "v")
    whole = (tmp_path / "v").read_bytes()
    for damaged in (b"", whole[:5], whole[:-3], b"\xff" * 8 + whole[8:], whole.replace(b"F64", b"F99")):
        (tmp_path / WEIGHTS_NAME).write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read as a safetensors file"):
            SafetensorsFile(tmp_path / WEIGHTS_NAME)


def test_weights_alone_are_no_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    engine_checkpoint(tmp_path / "run", GPT2)
    convert_checkpoint(tmp_path / "run", tmp_path / "hf", Format.HF)
    with pytest.raises(UserError, match=r"was not written by a run of zbmd.*zbmd train --weights"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "again", Format.ZBMD)
    assert not (tmp_path / "again").exists()
    with pytest.raises(UserError, match="hf exists: give a directory that does not exist yet"):
        convert_checkpoint(tmp_path / "run", tmp_path / "hf", Format.HF)
    with (
        pytest.raises(UserError, match=r"there is no checkpoint at .*expected the directory of a run"),
        opened(tmp_path),
    ):
        pass


def test_a_file_has_the_same_dtypes_whatever_else_is_imported() -> None:
    """ml_dtypes makes bfloat16 a dtype of numpy, and files have it as unsigned integers."""
    importlib.import_module("ml_dtypes")
    assert file_dtype("bfloat16") == np.uint16
    assert file_dtype("float8_e4m3fn") == np.uint8
    assert file_dtype("float32") == np.float32
