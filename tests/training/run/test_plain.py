"""The plain job: it learns, its bits are its configuration's, and shards stand for ranks."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from zbmd.collectives.algorithms.shard_tree import reduce_shards
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import Corpus, bigram_loss, fit_bigram, prepare_corpus
from zbmd.training.model.gpt import GPT
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.optim.elementwise import AdamWState
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.step.recipe import Recipe
from zbmd.transport.errors import UserError

MODEL = GPTConfig(context=16, width=16, heads=4, layers=2)
TRAINING = TrainingConfig(steps=150, shards=6, sequences_per_shard=2, warmup_steps=5, learning_rate=1e-2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A counting text: the next byte depends on more than the one before it."""
    directory = tmp_path_factory.mktemp("corpus")
    text = " ".join(str(number) for number in range(3000)).encode()
    (directory / "source").write_bytes(text)
    return Corpus(prepare_corpus(str(directory / "source"), directory), context=MODEL.context)


def weights_digest(trainer: PlainTrainer) -> str:
    return hashlib.sha256(trainer.state.weights.tobytes()).hexdigest()


def test_it_learns_more_than_bigrams(corpus: Corpus) -> None:
    trainer = PlainTrainer(Recipe(GPT(MODEL), corpus, TRAINING))
    first = trainer.run_step()
    assert first.loss == pytest.approx(np.log(256), rel=1e-5)
    for _ in range(TRAINING.steps - 1):
        trainer.run_step()
    held_out = trainer.recipe.held_out_loss(trainer.state.weights, windows_max=50)
    assert held_out < bigram_loss(fit_bigram(corpus), corpus.windows(corpus.evaluation_ids(50)))


def test_two_runs_have_the_same_bits(corpus: Corpus) -> None:
    trainers = [PlainTrainer(Recipe(GPT(MODEL), corpus, TRAINING)) for _ in range(2)]
    for _ in range(5):
        assert trainers[0].run_step() == trainers[1].run_step()
    assert weights_digest(trainers[0]) == weights_digest(trainers[1])


def test_a_step_is_shards_tree_and_update(corpus: Corpus) -> None:
    recipe = Recipe(GPT(MODEL), corpus, TRAINING)
    trainer = PlainTrainer(recipe)
    trainer.run_step()
    start = trainer.state.weights.copy(), trainer.state.mean.copy(), trainer.state.square.copy()
    reported = trainer.run_step()

    ids = recipe.sample_ids(1)
    grads = [np.zeros_like(start[0]) for _ in range(TRAINING.shards)]
    for shard in reversed(range(TRAINING.shards)):  # the order of computing them does not matter
        recipe.shard_gradient(start[0], grads[shard], ids[shard], step=1)
    after = AdamWState(*(np.zeros_like(start[0]) for _ in range(3)))
    norm = recipe.update(AdamWState(*start), after, reduce_shards(grads), step=1)
    assert norm == reported.grad_norm
    assert after.weights.tobytes() == trainer.state.weights.tobytes()


def test_a_step_that_diverges_leaves_the_state(corpus: Corpus) -> None:
    trainer = PlainTrainer(Recipe(GPT(MODEL), corpus, TRAINING))
    trainer.state.weights[trainer.recipe.model.layout.slots[-1].offset] = np.nan
    before = weights_digest(trainer)
    with np.errstate(invalid="ignore"), pytest.raises(TrainingDiverged):
        trainer.run_step()
    assert (weights_digest(trainer), trainer.step) == (before, 0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"shards": 0}, "shards is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_impossible_settings_are_user_errors(change: dict[str, float], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        TrainingConfig(**({"steps": 10} | change))  # type: ignore[arg-type]
