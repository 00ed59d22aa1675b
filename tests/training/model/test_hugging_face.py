"""GPT-2 in Hugging Face's layout: it comes back as it was, computes what others do, bad input is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model.hugging_face import CONFIG_NAME, WEIGHTS_NAME, load_gpt2, save_gpt2
from zbmd.training.model.weights import load_weights, save_weights
from zbmd.transport.errors import UserError

CONFIG = GPTConfig(family="gpt2", activation="gelu", vocabulary=97, context=12, width=24, heads=3, layers=2)
Floats = npt.NDArray[np.floating]


def random_params(seed: int) -> npt.NDArray[np.float32]:
    """Weights of which none is zero or one by chance, gains and biases included."""
    flat = GPT(CONFIG).init(seed)
    rng = np.random.default_rng(seed)
    for view in GPT(CONFIG).layout.views(flat):
        view += 0.2 * rng.standard_normal(view.shape, dtype=np.float32)
    return flat


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_gpt2(tmp_path, random_params(3), CONFIG)
    return tmp_path


def reference_logits(tensors: dict[str, Any], tokens: npt.NDArray[np.int64], heads: int) -> Floats:
    """GPT-2 by its paper and the names of its tensors, in float64, one sequence at a time."""

    def norm(x: Floats, name: str) -> Floats:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * t[f"{name}.weight"] + t[f"{name}.bias"]

    def linear(x: Floats, name: str) -> Floats:
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    t = {name.removeprefix("transformer."): tensor.astype(np.float64) for name, tensor in tensors.items()}
    made: list[Floats] = []
    for row in tokens:
        x = t["wte.weight"][row] + t["wpe.weight"][: len(row)]
        future = np.triu(np.full((len(row), len(row)), -np.inf), 1)
        for block in range(len({name.split(".")[1] for name in t if name.startswith("h.")})):
            q, k, v = np.split(linear(norm(x, f"h.{block}.ln_1"), f"h.{block}.attn.c_attn"), 3, -1)
            mixed: list[Floats] = []
            for a, b, c in zip(*(np.split(part, heads, -1) for part in (q, k, v)), strict=True):
                scores = np.exp(a @ b.T / np.sqrt(a.shape[1]) + future)
                mixed.append(scores / scores.sum(-1, keepdims=True) @ c)
            x = x + linear(np.concatenate(mixed, -1), f"h.{block}.attn.c_proj")
            h = linear(norm(x, f"h.{block}.ln_2"), f"h.{block}.mlp.c_fc")
            h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
            x = x + linear(h, f"h.{block}.mlp.c_proj")
        made.append(norm(x, "ln_f") @ t["wte.weight"].T)
    return np.stack(made)


def test_a_model_comes_back_as_it_was(saved: Path) -> None:
    for path in (saved, saved / WEIGHTS_NAME):
        flat, config = load_gpt2(path)
        assert config == CONFIG
        assert flat.tobytes() == random_params(3).tobytes()


def test_the_logits_are_those_of_the_paper(saved: Path) -> None:
    flat, config = load_gpt2(saved)
    tokens = np.random.default_rng(1).integers(0, config.vocabulary, (3, 12))
    wanted = reference_logits(load_file(saved / WEIGHTS_NAME), tokens, config.heads)
    np.testing.assert_allclose(
        GPT(config).logits(flat.astype(np.float64), tokens), wanted, rtol=1e-11, atol=1e-11
    )
    np.testing.assert_allclose(GPT(config).logits(flat, tokens), wanted, rtol=2e-4, atol=2e-4)


def test_the_gradients_are_slopes_of_the_loss() -> None:
    model, rng = GPT(CONFIG), np.random.default_rng(2)
    params = random_params(4).astype(np.float64)
    tokens = rng.integers(0, CONFIG.vocabulary, (2, 9))
    grads, loss = np.full_like(params, np.nan), 0.0
    loss = model.loss_and_grads(params, grads, tokens, global_batch=2)
    assert loss == pytest.approx(model.loss(params, tokens))
    for slot in model.layout.slots:
        direction = np.zeros_like(params)
        direction[slot.span] = rng.standard_normal(slot.size)
        ahead, behind = (model.loss(params + sign * 1e-5 * direction, tokens) for sign in (1, -1))
        along = float(direction[slot.span] @ grads[slot.span])
        assert (ahead - behind) / 2e-5 == pytest.approx(along, rel=1e-5, abs=1e-9), slot.name


def test_it_is_kept_as_weights_of_this_program_too(tmp_path: Path) -> None:
    save_weights(tmp_path / "w", random_params(5), CONFIG, step=2)
    flat, config, step = load_weights(tmp_path / "w")
    assert (flat.tobytes(), config, step) == (random_params(5).tobytes(), CONFIG, 2)


def test_other_spellings_of_the_same_file_are_read(saved: Path) -> None:
    tensors = load_file(saved / WEIGHTS_NAME)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 12, 12), np.bool_)
    bare["h.1.attn.masked_bias"] = np.array(-1e4, np.float32)
    bare["lm_head.weight"] = bare["wte.weight"].copy()
    save_file(bare, saved / WEIGHTS_NAME)
    assert load_gpt2(saved)[0].tobytes() == random_params(3).tobytes()
    save_file({name: tensor.astype(np.float16) for name, tensor in tensors.items()}, saved / WEIGHTS_NAME)
    half = random_params(3).astype(np.float16).astype(np.float32)
    assert load_gpt2(saved)[0].tobytes() == half.tobytes()


def drop(tensors: dict[str, Any]) -> None:
    del tensors["transformer.h.1.ln_1.bias"]


def turn(tensors: dict[str, Any]) -> None:
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].T.copy()


def add(tensors: dict[str, Any]) -> None:
    tensors["transformer.h.7.ln_1.bias"] = np.zeros(3, np.float32)


def whole_numbers(tensors: dict[str, Any]) -> None:
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].astype(np.int32)


def shorten(tensors: dict[str, Any]) -> None:
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"][:90].copy()


def untie(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop, "lacks tensor transformer.h.1.ln_1.bias"),
        (add, "has an unknown tensor transformer.h.7.ln_1.bias"),
        (turn, r"wpe.weight has shape \(24, 12\), not \(12, 24\)"),
        (whole_numbers, "wpe.weight is I32: convert the weights to F32"),
        (shorten, "the vocabulary has 90 tokens in transformer.wte.weight, and 97 in the configuration"),
        (untie, "a head of its own"),
    ],
)
def test_tensors_that_do_not_fit_are_explained(
    saved: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    tensors = load_file(saved / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, saved / WEIGHTS_NAME)
    with pytest.raises(UserError, match=said):
        load_gpt2(saved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama"}, "its model_type is 'llama', and only 'gpt2'"),
        ({"activation_function": "relu"}, "its activation_function is 'relu'"),
        ({"n_inner": 50}, "its n_inner is 50, and only 96"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"n_head": 5}, "width 24 cannot be divided over 5 heads"),
        ({"n_layer": 10**9}, "layers is 1000000000"),
        ({"vocab_size": "many"}, "does not describe a GPT-2"),
    ],
)
def test_models_that_are_not_computed_here_are_explained(
    saved: Path, change: dict[str, Any], said: str
) -> None:
    described = msgspec.json.decode((saved / CONFIG_NAME).read_bytes())
    (saved / CONFIG_NAME).write_bytes(msgspec.json.encode(described | change))
    with pytest.raises(UserError, match=said):
        load_gpt2(saved)


def test_missing_and_damaged_files_are_explained(saved: Path) -> None:
    whole = (saved / WEIGHTS_NAME).read_bytes()
    (saved / WEIGHTS_NAME).write_bytes(whole[:-1])
    with pytest.raises(UserError, match="cannot be read as a safetensors file"):
        load_gpt2(saved)
    (saved / WEIGHTS_NAME).unlink()
    with pytest.raises(UserError, match="there are no weights at"):
        load_gpt2(saved)
    (saved / CONFIG_NAME).write_bytes(b"{" * 100_000)
    with pytest.raises(UserError, match="does not describe a GPT-2"):
        load_gpt2(saved)
    (saved / CONFIG_NAME).write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(UserError, match="more than 1048576 bytes"):
        load_gpt2(saved)
    (saved / CONFIG_NAME).unlink()
    with pytest.raises(UserError, match=r"config\.json must lie beside"):
        load_gpt2(saved)


def test_only_a_gpt2_is_written_as_one(tmp_path: Path) -> None:
    config = GPTConfig(context=4, width=8, heads=2, layers=1)
    with pytest.raises(UserError, match="is no GPT-2"):
        save_gpt2(tmp_path, GPT(config).init(0), config)
    assert not list(tmp_path.iterdir())


def test_a_tied_model_is_not_cut_into_units() -> None:
    with pytest.raises(UserError, match="cannot be divided into parts"):
        _ = GPT(CONFIG).units
