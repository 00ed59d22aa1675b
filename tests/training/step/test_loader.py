"""Batches that a thread reads ahead are those of their step, whatever is asked for next."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from zbmd.tools.chaos.small_job import write_text
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import Corpus, prepare_corpus
from zbmd.training.model.gpt import GPT
from zbmd.training.sharded import trainer
from zbmd.training.sharded.trainer import BatchLoader
from zbmd.training.step.recipe import Recipe

STEPS = 6


def recipe_in(directory: Path) -> Recipe:
    path = prepare_corpus(str(write_text(directory / "text")), directory, context=8)
    model = GPT(GPTConfig(context=8, width=16, heads=2, layers=1, dropout=0.1))
    return Recipe(model, Corpus(path, context=8), TrainingConfig(steps=STEPS, shards=5, warmup_steps=1))


@pytest.mark.parametrize("least", [0.0, math.inf], ids=["ahead", "on time"])
def test_batches_are_those_of_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: float
) -> None:
    recipe = recipe_in(tmp_path)
    loading = BatchLoader(recipe)
    monkeypatch.setattr(trainer, "AHEAD_SHARE", least)
    read: list[tuple[int, bool]] = []
    of_class, here = Recipe.order_of, threading.get_ident()

    def order(step: int) -> npt.NDArray[np.int64]:
        return of_class(recipe, step)

    def noted(self: Recipe, step: int) -> npt.NDArray[np.int64]:
        read.append((step, threading.get_ident() == here))
        return of_class(self, step)

    monkeypatch.setattr(Recipe, "order_of", noted)
    # A step that is repeated, one of other shards, one that is gone back to, and the last one.
    asked = [(0, (0, 1)), (0, (0, 1)), (1, (0, 1)), (2, (3,)), (1, (3,)), (STEPS - 1, (4, 2))]
    for step, shards in asked:
        found, ids = loading.load(step, shards), order(step)
        assert list(found.samples) == list(shards)
        for shard, batch in zip(shards, found.batches, strict=True):
            assert (found.samples[shard] == ids[shard]).all()
            windows = recipe.corpus.windows(ids[shard])
            wanted = recipe.model.batch(windows, global_batch=recipe.config.global_batch)
            assert (batch.inputs == wanted.inputs).all()
            assert batch.targets is not None and (batch.targets == wanted.targets).all()
            assert batch.noise is not None and batch.weight == wanted.weight
    loading.close()
    assert max(step for step, _ in read) == STEPS - 1
    by_thread = [step for step, is_here in read if not is_here]  # what was not needed yet is dropped
    assert by_thread[:1] == ([1] if least == 0 else [])
    assert loading.load(3, (0,)).samples[0].tolist() == order(3)[0].tolist(), "it may be used again"
    loading.close()


def test_an_error_of_the_thread_is_raised_where_its_batches_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = BatchLoader(recipe_in(tmp_path))
    monkeypatch.setattr(trainer, "AHEAD_SHARE", 0)
    order = Recipe.order_of

    def broken(self: Recipe, step: int) -> npt.NDArray[np.int64]:
        if step == 1:
            raise OSError("the disk is gone")
        return order(self, step)

    monkeypatch.setattr(Recipe, "order_of", broken)
    loading.load(0, (0,))
    with pytest.raises(OSError, match="the disk is gone"):
        loading.load(1, (0,))
    assert len(loading.load(2, (0,)).batches) == 1
    loading.close()
