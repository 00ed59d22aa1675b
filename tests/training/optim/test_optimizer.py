"""AdamW against the formula as it is written, clipping, and the learning rate."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.training.autograd.parameter_layout import ALIGNMENT, ParameterLayout
from zbmd.training.optim import learning_rate
from zbmd.training.optim.clip import NORM_BLOCK, TrainingDiverged, clip_scale, global_norm
from zbmd.training.optim.elementwise import UPDATE_BLOCK, AdamW, AdamWConfig, AdamWState

LAYOUT = ParameterLayout.of({"matrix": (130, 257), "gain": (37,), "small": (3, 5), "bias": (1,)})


def state(seed: int, dtype: type[np.floating] = np.float64) -> AdamWState:
    random = np.random.default_rng(seed)
    arrays = [np.zeros(LAYOUT.size, dtype=dtype) for _ in range(3)]
    for number, array in enumerate(arrays):
        for view in LAYOUT.views(array):
            values = random.standard_normal(view.shape)
            view[...] = values**2 if number == 2 else values
    return AdamWState(*arrays)


def blank(dtype: type[np.floating] = np.float64) -> AdamWState:
    return AdamWState(*(np.zeros(LAYOUT.size, dtype=dtype) for _ in range(3)))


def gradient(seed: int, dtype: type[np.floating] = np.float64) -> np.ndarray:
    return state(seed, dtype).weights


@pytest.mark.parametrize("step", [0, 1, 1000])
def test_update_is_the_published_formula(step: int) -> None:
    config = AdamWConfig(beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.3)
    old, new, grads = state(1), blank(), gradient(2)
    kept = [array.tobytes() for array in (old.weights, old.mean, old.square, grads)]
    AdamW(config, LAYOUT, dtype=np.float64).update(
        old, new, grads, step=step, learning_rate=0.02, grad_scale=0.5
    )
    scaled = grads * 0.5
    mean = 0.8 * old.mean + (1 - 0.8) * scaled
    square = 0.9 * old.square + (1 - 0.9) * scaled**2
    corrected = mean / (1 - 0.8 ** (step + 1))
    spread = np.sqrt(square / (1 - 0.9 ** (step + 1)))
    decay = np.zeros(LAYOUT.size)
    for slot in LAYOUT.slots:
        decay[slot.span] = 0.3 if len(slot.shape) == 2 else 0.0
    weights = old.weights - 0.02 * decay * old.weights - 0.02 * corrected / (spread + 1e-3)
    np.testing.assert_allclose(new.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(new.square, square, rtol=1e-12)
    np.testing.assert_allclose(new.weights, weights, rtol=1e-9, atol=1e-12)
    assert kept == [array.tobytes() for array in (old.weights, old.mean, old.square, grads)]


def test_padding_stays_zero() -> None:
    new = blank(np.float32)
    AdamW(AdamWConfig(), LAYOUT).update(
        state(1, np.float32), new, gradient(2, np.float32), step=0, learning_rate=0.1
    )
    for array in (new.weights, new.mean, new.square):
        for view in LAYOUT.views(array):
            assert view.any()
            view[...] = 0.0
        assert not array.any()


def test_bits_do_not_depend_on_where_the_arrays_lie() -> None:
    optimizer = AdamW(AdamWConfig(), LAYOUT)
    old, grads = state(1, np.float32), gradient(2, np.float32)
    new = blank(np.float32)
    optimizer.update(old, new, grads, step=3, learning_rate=0.01)

    def moved(array: np.ndarray, offset: int) -> np.ndarray:
        memory = np.empty(len(array) + offset, dtype=array.dtype)
        memory[offset:] = array
        return memory[offset:]

    elsewhere = AdamWState(moved(new.weights * 0, 1), moved(new.mean * 0, 2), moved(new.square * 0, 3))
    source = AdamWState(moved(old.weights, 5), moved(old.mean, 7), moved(old.square, 9))
    optimizer.update(source, elsewhere, moved(grads, 3), step=3, learning_rate=0.01)
    assert elsewhere.weights.tobytes() == new.weights.tobytes()
    assert elsewhere.square.tobytes() == new.square.tobytes()


def test_blocks_cover_the_flat_array_once() -> None:
    layout = ParameterLayout.of({"big": (5, UPDATE_BLOCK), "gain": (3,), "last": (7, 11)})
    spans = [span for span, _ in AdamW(AdamWConfig(), layout)._shard.blocks]
    assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]
    assert spans[0].start == 0
    assert spans[-1].stop == layout.size
    assert max(span.stop - span.start for span in spans) <= UPDATE_BLOCK


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=12))
def test_layout_places_parameters_in_order_aligned_and_apart(shapes: list[list[int]]) -> None:
    layout = ParameterLayout.of({str(index): tuple(shape) for index, shape in enumerate(shapes)})
    end = 0
    for slot, shape in zip(layout.slots, shapes, strict=True):
        assert slot.shape == tuple(shape)
        assert slot.offset % ALIGNMENT == 0
        assert 0 <= slot.offset - end < ALIGNMENT
        assert slot.decayed == (len(shape) == 2)
        end = slot.span.stop
    assert 0 <= layout.size - end < ALIGNMENT
    assert layout.parameter_count == sum(math.prod(shape) for shape in shapes)


@pytest.mark.parametrize("size", [1, NORM_BLOCK - 1, NORM_BLOCK, 3 * NORM_BLOCK + 5])
def test_norm_is_euclidean_and_its_bits_do_not_depend_on_place(size: int) -> None:
    grads = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    norm = global_norm(grads, xp=np)
    assert math.isclose(norm, float(np.linalg.norm(grads.astype(np.float64))), rel_tol=1e-5)
    for offset in (1, 3, 8):
        memory = np.empty(size + offset, dtype=np.float32)
        memory[offset:] = grads
        assert global_norm(memory[offset:], xp=np) == norm


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_refused(poison: float) -> None:
    grads = np.ones(100, dtype=np.float32)
    grads[70] = poison
    with pytest.raises(TrainingDiverged, match="Lower the learning rate"):
        global_norm(grads, xp=np)


def test_clipping_shortens_but_never_lengthens() -> None:
    assert clip_scale(0.0, limit=1.0) == 1.0
    assert clip_scale(1.0, limit=1.0) == 1.0
    assert clip_scale(8.0, limit=2.0) == 0.25


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    rates = [learning_rate(step, peak=2.0, warmup_steps=4, total_steps=25, floor=0.1) for step in range(30)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert all(earlier > later for earlier, later in itertools.pairwise(rates[4:25]))
    assert math.isclose(rates[14], 2.0 * (0.1 + 0.9 * 0.5))
    assert rates[24:] == pytest.approx([0.2] * 6)


def test_a_run_shorter_than_its_warmup_still_has_rates() -> None:
    assert learning_rate(0, peak=1.0, warmup_steps=50, total_steps=1, floor=0.1) == 0.02
    assert learning_rate(0, peak=1.0, warmup_steps=0, total_steps=1, floor=0.1) == 1.0
