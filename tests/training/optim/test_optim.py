"""SGD, Lion and Muon against their formulas; schedules against closed forms; what is not finite is named."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest

from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import Corpus, prepare_corpus
from zbmd.training.model.gpt import GPT
from zbmd.training.optim import (
    WSD_DECAY,
    Curve,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
    learning_rate,
    optimizer_for,
)
from zbmd.training.optim.clip import TrainingDiverged, non_finite
from zbmd.training.optim.elementwise import AdamWConfig, AdamWState
from zbmd.training.optim.muon import orthogonalized
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.step.recipe import Recipe
from zbmd.transport.errors import UserError

LAYOUT = ParameterLayout.of(
    {"embed.weight": (9, 4), "a.weight": (130, 257), "gain": (37,), "b.weight": (6, 3)}
)
CONFIGS: list[OptimizerConfig] = [
    AdamWConfig(),
    SGDConfig(),
    SGDConfig(nesterov=True),
    LionConfig(),
    MuonConfig(),
]
Floats = npt.NDArray[np.float64]


def state(seed: int) -> AdamWState:
    arrays = [np.zeros(LAYOUT.size) for _ in range(3)]
    for number, array in enumerate(arrays):
        for view in LAYOUT.views(array):
            values = np.random.default_rng([seed, number]).standard_normal(view.shape)
            view[...] = values**2 if number == 2 else values
    return AdamWState(*arrays)


def blank() -> AdamWState:
    return AdamWState(*(np.zeros(LAYOUT.size) for _ in range(3)))


def updated(config: OptimizerConfig, old: AdamWState, grads: Floats, rate: float = 0.02) -> AdamWState:
    new = blank()
    optimizer = optimizer_for(config, LAYOUT, dtype=np.float64)
    optimizer.update(old, new, grads, step=3, learning_rate=rate, grad_scale=0.5)
    return new


def decay(rate: float) -> Floats:
    found = np.zeros(LAYOUT.size)
    for slot in LAYOUT.slots:
        found[slot.span] = rate if slot.decayed else 0.0
    return found


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_the_published_formula(nesterov: bool) -> None:
    old, grads = state(1), state(2).weights
    new = updated(SGDConfig(momentum=0.8, nesterov=nesterov, weight_decay=0.3), old, grads)
    velocity = 0.8 * old.mean + 0.5 * grads
    move = 0.5 * grads + 0.8 * velocity if nesterov else velocity
    np.testing.assert_allclose(new.mean, velocity, rtol=1e-12)
    np.testing.assert_allclose(
        new.weights, old.weights * (1 - 0.02 * decay(0.3)) - 0.02 * move, rtol=1e-9, atol=1e-12
    )


def test_lion_is_the_published_formula() -> None:
    old, grads = state(1), state(2).weights
    new = updated(LionConfig(beta1=0.8, beta2=0.95, weight_decay=0.3), old, grads)
    move = np.sign(0.8 * old.mean + 0.2 * 0.5 * grads)
    np.testing.assert_allclose(new.mean, 0.95 * old.mean + 0.05 * 0.5 * grads, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(
        new.weights, old.weights * (1 - 0.02 * decay(0.3)) - 0.02 * move, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("shape", [(6, 6), (5, 40), (40, 5), (1, 9)])
def test_a_matrix_is_made_nearly_orthogonal_along_its_own_vectors(shape: tuple[int, int]) -> None:
    left, _, right = np.linalg.svd(np.random.default_rng(3).standard_normal(shape), full_matrices=False)
    matrix = left @ np.diag(np.linspace(0.3, 4.0, min(shape))) @ right
    made = orthogonalized(matrix, xp=np)
    along = left.T @ made @ right.T
    singular = np.diag(along)
    np.testing.assert_allclose(along, np.diag(singular), atol=1e-9)
    assert made.shape == shape
    assert (singular > 0.5).all() and (singular < 1.3).all()


def test_muon_moves_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    old, grads, config = (
        state(1),
        state(2).weights,
        MuonConfig(momentum=0.9, weight_decay=0.2, adamw_rate=0.5),
    )
    new = updated(config, old, grads)
    beside = updated(config.adamw, old, grads, rate=0.01)
    for slot in LAYOUT.slots:
        if slot.name in ("embed.weight", "gain"):
            assert new.weights[slot.span].tobytes() == beside.weights[slot.span].tobytes()
            continue
        mean = 0.9 * old.mean[slot.span] + 0.1 * 0.5 * grads[slot.span]
        ahead = (0.9 * mean + 0.1 * 0.5 * grads[slot.span]).reshape(slot.shape)
        scale = math.sqrt(max(1.0, slot.shape[1] / slot.shape[0]))
        move = orthogonalized(ahead, xp=np).reshape(-1) * 0.02 * scale
        expected = old.weights[slot.span] * (1 - 0.02 * 0.2) - move
        np.testing.assert_allclose(new.weights[slot.span], expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(new.mean[slot.span], mean, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_padding_stays_zero_and_inputs_stay(config: OptimizerConfig) -> None:
    old, grads = state(1), state(2).weights
    kept = [array.tobytes() for array in (old.weights, old.mean, old.square, grads)]
    new = updated(config, old, grads)
    assert kept == [array.tobytes() for array in (old.weights, old.mean, old.square, grads)]
    for array in (new.weights, new.mean, new.square):
        for view in LAYOUT.views(array):
            view[...] = 0.0
        assert not array.any()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    out = tmp_path_factory.mktemp("corpus")
    text = out / "text"
    text.write_bytes(b"the cat sat on the mat and looked at the dog. " * 400)
    return Corpus(prepare_corpus(str(text), out, context=16), context=16)


@pytest.mark.parametrize(
    ("config", "rate"),
    [(SGDConfig(), 0.1), (SGDConfig(nesterov=True), 0.1), (LionConfig(), 1e-2), (MuonConfig(), 0.02)],
    ids=["sgd", "nesterov", "lion", "muon"],
)
def test_each_trains_a_model(corpus: Corpus, config: OptimizerConfig, rate: float) -> None:
    settings = TrainingConfig(
        steps=30, shards=2, sequences_per_shard=2, learning_rate=rate, warmup_steps=3, optimizer=config
    )
    model = GPT(GPTConfig(context=16, width=16, heads=2, layers=1))
    trainer = PlainTrainer(Recipe(model, corpus, settings))
    losses = [trainer.run_step().loss for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5, losses


@pytest.mark.parametrize("curve", ["cosine", "linear", "wsd", "constant"])
def test_curves_begin_at_the_peak_and_end_at_the_floor(curve: Curve) -> None:
    rates = [
        learning_rate(step, peak=2.0, warmup_steps=4, total_steps=105, floor=0.1, curve=curve)
        for step in range(110)
    ]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert all(earlier >= later for earlier, later in itertools.pairwise(rates[4:]))
    assert rates[104:] == pytest.approx([2.0 if curve == "constant" else 0.2] * 6)
    middle = {"cosine": 1.1, "linear": 1.1, "wsd": 2.0, "constant": 2.0}[curve]
    assert rates[54] == pytest.approx(middle)
    if curve == "wsd":
        assert rates[4 + round(100 * (1 - WSD_DECAY))] == pytest.approx(2.0)
        assert rates[94] == pytest.approx(0.2 + 1.8 * 0.5)


def test_an_unknown_curve_is_refused() -> None:
    with pytest.raises(UserError, match="cosine, linear, wsd, constant"):
        TrainingConfig(steps=1, curve="steps")  # type: ignore[arg-type]


def test_the_first_gradient_that_is_not_finite_is_named(corpus: Corpus) -> None:
    model = GPT(GPTConfig(context=16, width=16, heads=2, layers=2))
    recipe = Recipe(model, corpus, TrainingConfig(steps=2))
    states = [AdamWState(*(np.zeros(model.layout.size, np.float32) for _ in range(3))) for _ in range(2)]
    grads = np.ones(model.layout.size, dtype=np.float32)
    assert non_finite(model.layout, grads, xp=np) is None
    names = [slot.name for slot in model.layout.slots]
    grads[model.layout.slots[names.index("blocks.0.mlp.in.weight")].offset] = math.inf
    last = model.layout.slots[names.index("blocks.1.attn.qkv.weight")]
    grads[last.offset + 3] = math.nan
    with pytest.raises(TrainingDiverged, match=r"step 7: .* blocks\.1\.attn\.qkv\.weight is NaN \(1 of 768"):
        recipe.update(states[0], states[1], grads, step=7)
    assert not states[1].weights.any()
