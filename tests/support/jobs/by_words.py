"""Runs of `zbmd train` by its options, in this process or on a rank of a launcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import uvloop

from zbmd.tools.demo.overhead import timed_task
from zbmd.tools.train.command import recipe_of
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.run import open_recipe, run_plain, train
from zbmd.training.sharded.task import TrainResult
from zbmd.training.step.recipe import Recipe


def options_by(words: Sequence[str]) -> TrainOptions:
    """The recipe that the options spell, for the ranks of the launcher, if there is one."""
    return recipe_of(words, ranks=int(os.environ.get("WORLD_SIZE", "1")))


def recipe_by(words: Sequence[str]) -> Recipe:
    """Its model, data and configuration."""
    return open_recipe(options_by(words), int(os.environ.get("WORLD_SIZE", "1")))


def plain_by(words: Sequence[str]) -> TrainResult:
    """Train in a bare loop."""
    return run_plain(recipe_of(words, ranks=1))


def train_by(words: Sequence[str], before_step: Callable[[int], None] | None = None) -> None:
    """Train; `before_step(version)` is called on the training thread."""
    options = options_by(words)
    options.check()
    uvloop.run(train(options) if before_step is None else train(options, timed_task(before_step)))
