"""16-bit weights and gradients under float32 masters; the loss scale, and what happens to an overflow."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.tools.chaos.small_job import write_text
from zbmd.training.autograd.tape import Parameter
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import Corpus, prepare_corpus
from zbmd.training.model.gpt import GPT
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.optim.mixed_precision import (
    GROWTH_STEPS,
    SCALE_FIRST,
    SCALE_LEAST,
    SCALE_MOST,
    SKIPPED_MOST,
    LossScale,
    Storage,
    storage_dtype,
)
from zbmd.training.run.plain import PlainStep, PlainTrainer
from zbmd.training.step.recipe import Recipe
from zbmd.transport.errors import UserError

SMALL = GPTConfig(context=8, width=16, heads=2, layers=2)


def tokens_of(step: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(step).integers(97, 105, (4, 9), dtype=np.uint8)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    directory = tmp_path_factory.mktemp("corpus")
    path = prepare_corpus(str(write_text(directory / "text")), directory, context=SMALL.context)
    return Corpus(path, context=SMALL.context)


def trainer_of(corpus: Corpus, storage: Storage) -> PlainTrainer:
    config = TrainingConfig(steps=25, shards=3, sequences_per_shard=2, learning_rate=4e-3, warmup_steps=3)
    return PlainTrainer(Recipe(GPT(SMALL), corpus, config), storage=storage)


def scaled(trainer: PlainTrainer, scale: float) -> PlainTrainer:
    trainer.loss_scale = replace(trainer.loss_scale, scale=scale)
    return trainer


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
def test_a_run_in_16_bits_follows_the_run_in_32(corpus: Corpus, storage: Storage) -> None:
    narrow, wide = trainer_of(corpus, storage), trainer_of(corpus, "float32")
    steps: list[PlainStep] = []
    for _ in range(25):
        steps = [t.run_step() for t in (narrow, wide)]
        assert steps[0].loss == pytest.approx(steps[1].loss, rel=0.02)
        assert steps[0].grad_norm == pytest.approx(steps[1].grad_norm, rel=0.1)
    assert steps[0].loss < 5.0 and narrow.loss_scale.skipped <= 3
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


def test_a_step_that_overflows_is_attempted_anew_with_a_smaller_scale(corpus: Corpus) -> None:
    large, fitting = scaled(trainer_of(corpus, "float16"), SCALE_MOST), trainer_of(corpus, "float16")
    done = large.run_step()
    skipped = large.loss_scale.skipped
    assert skipped > 0 and large.loss_scale.scale == SCALE_MOST / 2**skipped
    assert (large.loss_scale.good_steps, large.step) == (1, 1)
    # What overflowed has left nothing behind: the bits are those of the scale that fits.
    assert scaled(fitting, large.loss_scale.scale).run_step() == done
    assert large.state.weights.tobytes() == fitting.state.weights.tobytes()
    assert large.state.square.tobytes() == fitting.state.square.tobytes()


@pytest.mark.parametrize("storage", ["bfloat16", "float16", "float32"])
def test_what_no_scale_helps_is_a_divergence_with_a_name(corpus: Corpus, storage: Storage) -> None:
    trainer = scaled(trainer_of(corpus, storage), SCALE_LEAST)
    layout = trainer.recipe.model.layout
    slot = next(slot for slot in layout.slots if slot.name == "blocks.0.mlp.in.weight")
    trainer.weights[slot.offset] = np.nan
    kept = trainer.state.mean.tobytes()
    with pytest.raises(TrainingDiverged, match=r"step 0: .* head\.weight is NaN"):
        trainer.run_step()
    assert (trainer.state.mean.tobytes(), trainer.step) == (kept, 0)


def test_a_scale_is_read_as_it_was_written_and_damage_is_told() -> None:
    scale = LossScale(scale=8.0, good_steps=1_999, skipped=SKIPPED_MOST)
    room = np.zeros(scale.numbers, np.float32)
    scale.write(room)
    assert LossScale().read(room) == scale
    fixed = LossScale.of(np.dtype(np.float32))
    assert fixed.read(room[: fixed.numbers]) == fixed
    for place, value in ((0, 0.5), (0, np.nan), (1, 1.5), (1, 2_000), (2, -1), (2, np.inf)):
        damaged = room.copy()
        damaged[place] = value
        with pytest.raises(UserError, match="is not a loss scale"):
            LossScale().read(damaged)


@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_stays_in_its_bounds_and_skips_are_counted(steps: list[bool]) -> None:
    scale = LossScale.of(np.dtype(np.float16))
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
    fixed = LossScale.of(storage_dtype("bfloat16"))
    assert fixed.exhausted and fixed.after(finite=True).scale == 1.0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UserError, match=r"zbmd\[bfloat16\]"):
        storage_dtype("bfloat16")
