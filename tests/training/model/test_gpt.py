"""The whole model: gradients, the shard arithmetic, readiness, and bits that depend on the inputs alone."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from zbmd.training.config import Activation, GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.transport.errors import UserError

SMALL = GPTConfig(context=6, width=8, heads=2, layers=2)
STEP = 1e-6


def random_params(model: GPT, dtype: type[np.floating] = np.float64) -> npt.NDArray[np.floating]:
    """Initial weights, with everything that starts at a constant disturbed."""
    flat = model.init(3).astype(dtype)
    for view in model.layout.views(flat):
        view += np.random.default_rng(view.size).standard_normal(view.shape).astype(dtype) * dtype(0.2)
    return flat


def random_tokens(samples: int, length: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (samples, length), dtype=np.uint8)


def at_offset(flat: npt.NDArray[np.floating], offset: int) -> npt.NDArray[np.floating]:
    """A copy of `flat` that begins `offset` elements into its memory."""
    memory = np.zeros(len(flat) + offset, dtype=flat.dtype)
    memory[offset:] = flat
    return memory[offset:]


@pytest.mark.parametrize("activation", ["relu2", "gelu"])
@pytest.mark.parametrize("length", [7, 4])
def test_gradients_against_finite_differences(activation: Activation, length: int) -> None:
    model = GPT(GPTConfig(context=6, width=8, heads=2, layers=2, activation=activation))
    params, tokens = random_params(model), random_tokens(3, length)
    grads = np.full_like(params, np.nan)
    loss = model.loss_and_grads(params, grads, tokens, global_batch=3)
    assert math.isclose(loss, model.loss(params, tokens), rel_tol=1e-12)
    random = np.random.default_rng(1)
    for slot, grad in zip(model.layout.slots, model.layout.views(grads), strict=True):
        view = params[slot.span]
        steepest = np.abs(grad).reshape(-1).argsort()[-2:]  # random places of an embedding are mostly 0
        for place in {*random.choice(slot.size, 3), *steepest}:
            original = view[place]
            view[place] = original + STEP
            above = model.loss(params, tokens)
            view[place] = original - STEP
            below = model.loss(params, tokens)
            view[place] = original
            slope = (above - below) / (2 * STEP)
            assert math.isclose(grad.flat[place], slope, rel_tol=1e-4, abs_tol=1e-8), slot.name


def test_shards_add_up_to_the_batch() -> None:
    model = GPT(SMALL)
    params, tokens = random_params(model), random_tokens(6, 7)
    whole, part, total = (np.zeros_like(params) for _ in range(3))
    whole_loss = model.loss_and_grads(params, whole, tokens, global_batch=6)
    loss = 0.0
    for shard in (tokens[:1], tokens[1:3], tokens[3:]):
        loss += model.loss_and_grads(params, part, shard, global_batch=6)
        total += part
    assert math.isclose(loss, whole_loss, rel_tol=1e-12)
    np.testing.assert_allclose(total, whole, rtol=1e-9, atol=1e-15)


def test_every_parameter_is_ready_once_when_it_is_final() -> None:
    model = GPT(SMALL)
    params, tokens = random_params(model), random_tokens(2, 7)
    grads, copies = np.zeros_like(params), np.zeros_like(params)
    order: list[int] = []

    def on_ready(index: int) -> None:
        order.append(index)
        span = model.layout.slots[index].span
        copies[span] = grads[span]

    model.loss_and_grads(params, grads, tokens, global_batch=2, on_grad_ready=on_ready)
    assert sorted(order) == list(range(len(model.layout.slots)))
    assert copies.tobytes() == grads.tobytes()
    assert order[0] == len(order) - 1, "the head is ready first, so that its reduction can start"
    assert order[-1] == 0


@pytest.mark.parametrize("offset", [1, 3, 5, 16])
def test_bits_depend_on_values_alone(offset: int) -> None:
    model = GPT(GPTConfig(context=33, width=48, heads=4, layers=2))
    params, tokens = random_params(model, np.float32), random_tokens(2, 34)
    grads = np.zeros_like(params)
    loss = model.loss_and_grads(params, grads, tokens, global_batch=2)
    moved, moved_grads = at_offset(params, offset), at_offset(np.full_like(grads, 7.0), offset + 2)
    for slot in model.layout.slots:
        moved_grads[slot.span] = np.nan
    other = GPT(model.config).loss_and_grads(moved, moved_grads, tokens.copy(), global_batch=2)
    assert other == loss
    for slot in model.layout.slots:
        assert moved_grads[slot.span].tobytes() == grads[slot.span].tobytes(), slot.name


def test_padding_is_never_written() -> None:
    model = GPT(GPTConfig(context=5, width=6, heads=2, layers=1))
    params, grads = random_params(model), np.zeros(model.layout.size)
    model.loss_and_grads(params, grads, random_tokens(1, 6), global_batch=1)
    for view in model.layout.views(grads):
        view[...] = 0.0
    assert not grads.any()


def test_initial_weights_depend_on_the_seed_alone_and_predict_nothing() -> None:
    model = GPT(SMALL)
    assert model.init(5).tobytes() == GPT(SMALL).init(5).tobytes()
    assert model.init(5).tobytes() != model.init(6).tobytes()
    assert math.isclose(model.loss(model.init(5), random_tokens(4, 7)), math.log(256), rel_tol=1e-6)


def test_the_default_model_has_over_a_million_parameters() -> None:
    layout = GPT(GPTConfig()).layout
    assert layout.parameter_count >= 1_000_000
    assert layout.size - layout.parameter_count < 16 * len(layout.slots)


def test_logits_are_those_of_the_loss_and_causal() -> None:
    model = GPT(SMALL)
    params, tokens = random_params(model), random_tokens(2, 7)
    logits = model.logits(params, tokens[:, :-1])
    assert logits.shape == (2, 6, 256)
    log_total = np.log(np.exp(logits).sum(-1))
    picked = np.take_along_axis(logits, tokens[:, 1:, None].astype(np.int64), axis=-1)[..., 0]
    assert math.isclose(float((log_total - picked).mean()), model.loss(params, tokens), rel_tol=1e-12)
    changed = tokens[:, :-1].copy()
    changed[:, 4:] ^= 0xFF
    np.testing.assert_array_equal(model.logits(params, changed)[:, :4], logits[:, :4])
    np.testing.assert_allclose(model.logits(params, tokens[:, :3]), logits[:, :3], rtol=1e-9)


def test_wrong_arguments_are_refused() -> None:
    model = GPT(SMALL)
    params = model.init(0)
    with pytest.raises(ValueError, match="1 to 6 positions, not 7"):
        model.loss(params, random_tokens(1, 8))
    with pytest.raises(ValueError, match="contiguous"):
        model.loss(params[:-1], random_tokens(1, 7))
    with pytest.raises(ValueError, match="contiguous"):
        model.loss(np.repeat(params, 2)[::2], random_tokens(1, 7))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"width": 1 << 20}, "width is 1048576"),
        ({"width": 100, "heads": 3}, "multiple of the number of heads"),
        ({"activation": "tanh"}, 'unknown activation "tanh"'),
    ],
)
def test_impossible_shapes_are_user_errors(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        GPTConfig(**change)  # type: ignore[arg-type]
