"""16-bit weights and gradients under float32 masters; the loss scale, and what happens to an overflow."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.training.adamw import AdamWConfig
from zbmd.training.clip import TrainingDiverged
from zbmd.training.config import GPTConfig
from zbmd.training.gpt import GPT
from zbmd.training.precision import (
    GROWTH_STEPS,
    SCALE_FIRST,
    SCALE_LEAST,
    SCALE_MOST,
    LossScale,
    MixedStep,
    MixedTrainer,
    Storage,
    storage_dtype,
)
from zbmd.training.tape import Parameter
from zbmd.transport.errors import UserError

SMALL = GPTConfig(context=8, width=16, heads=2, layers=2)


def tokens_of(step: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(step).integers(97, 105, (4, 9), dtype=np.uint8)


def trainer_of(storage: Storage) -> MixedTrainer:
    return MixedTrainer(GPT(SMALL), AdamWConfig(), storage=storage, seed=1)


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
def test_a_run_in_16_bits_follows_the_run_in_32(storage: Storage) -> None:
    narrow, wide = trainer_of(storage), trainer_of("float32")
    steps: list[MixedStep] = []
    for step in range(25):
        steps = [t.run_step(tokens_of(step), learning_rate=4e-3, clip_norm=1.0) for t in (narrow, wide)]
        assert steps[0].loss == pytest.approx(steps[1].loss, rel=0.02)
        assert steps[0].grad_norm == pytest.approx(steps[1].grad_norm, rel=0.1)
    assert steps[0].loss < 4.0 and narrow.loss_scale.skipped == 0
    assert narrow.weights.dtype.itemsize == 2 and narrow.state.weights.dtype == np.float32
    assert narrow.weights.tobytes() == narrow.state.weights.astype(narrow.weights.dtype).tobytes()


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
def test_16_bit_gradients_are_those_of_the_widened_weights_rounded(storage: Storage) -> None:
    model = GPT(SMALL)
    params = model.init(2).astype(storage_dtype(storage))
    grads, wide = np.zeros_like(params), np.zeros(len(params), dtype=np.float32)
    loss = model.loss_and_grads(params, grads, tokens_of(0), global_batch=4, loss_scale=8.0)
    same = model.loss_and_grads(params.astype(np.float32), wide, tokens_of(0), global_batch=4, loss_scale=8.0)
    assert loss == same
    assert grads.tobytes() == wide.astype(grads.dtype).tobytes()


def test_a_narrow_gradient_of_two_uses_is_rounded_after_their_sum() -> None:
    weight = Parameter(np.ones(1, np.float16), np.zeros(1, np.float16), 0, None)
    weight.uses_left = 2
    for value in (2048.0, 1.5):
        weight.receive(lambda out, value=value: np.copyto(out, value))
    assert weight.grad is not None and weight.grad[0] == np.float16(2049.5)


def test_a_step_that_overflows_is_skipped_and_counted_and_changes_nothing() -> None:
    trainer = trainer_of("float16")
    trainer.loss_scale = replace(trainer.loss_scale, scale=2.0**24)
    before = [array.tobytes() for array in (trainer.weights, trainer.state.weights, trainer.state.mean)]
    step = trainer.run_step(tokens_of(0), learning_rate=4e-3, clip_norm=1.0)
    assert step.skipped and step.grad_norm == float("inf")
    assert before == [
        array.tobytes() for array in (trainer.weights, trainer.state.weights, trainer.state.mean)
    ]
    assert (trainer.loss_scale.scale, trainer.loss_scale.skipped, trainer.step) == (2.0**23, 1, 0)
    for _ in range(20):
        step = trainer.run_step(tokens_of(0), learning_rate=4e-3, clip_norm=1.0)
    assert not step.skipped and trainer.step + trainer.loss_scale.skipped == 21


@pytest.mark.parametrize("storage", ["bfloat16", "float16", "float32"])
def test_what_no_scale_helps_is_a_divergence_with_a_name(storage: Storage) -> None:
    trainer = trainer_of(storage)
    trainer.loss_scale = replace(trainer.loss_scale, scale=SCALE_LEAST)
    slot = next(slot for slot in trainer.model.layout.slots if slot.name == "blocks.0.mlp.in.weight")
    trainer.weights[slot.offset] = np.nan
    kept = trainer.state.weights.tobytes()
    with pytest.raises(TrainingDiverged, match=r"step 0: .* head\.weight is NaN"):
        trainer.run_step(tokens_of(0), learning_rate=4e-3, clip_norm=1.0)
    assert trainer.state.weights.tobytes() == kept


@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_stays_in_its_bounds_and_skips_are_counted(steps: list[bool]) -> None:
    scale = LossScale.of("float16")
    for finite in steps:
        scale = scale.after(finite=finite)
        assert SCALE_LEAST <= scale.scale <= SCALE_MOST
    assert scale.skipped == steps.count(False)


def test_the_scale_halves_at_once_and_grows_after_a_while() -> None:
    scale = LossScale().after(finite=False)
    assert scale.scale == SCALE_FIRST / 2
    for _ in range(GROWTH_STEPS):
        assert scale.scale == SCALE_FIRST / 2
        scale = scale.after(finite=True)
    assert scale.scale == SCALE_FIRST and scale.good_steps == 0
    assert LossScale(scale=SCALE_MOST, good_steps=GROWTH_STEPS).after(finite=True).scale == SCALE_MOST
    fixed = LossScale.of("bfloat16")
    assert fixed.exhausted and fixed.after(finite=True).scale == 1.0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UserError, match=r"zbmd\[bfloat16\]"):
        storage_dtype("bfloat16")
