"""The optimizer as an actor: from one version of the state and its gradient to the next."""

from __future__ import annotations

from typing import Any

from zbmd.training.adamw import AdamWState
from zbmd.training.ml_actors.seat import Seat, SeatedActor
from zbmd.training.recipe import Recipe
from zbmd.training.xp import Array


class OptimizerActor(SeatedActor):
    """Updates out of place, so that an update that failed half-way is done again from the same state."""

    def __init__(self, seat: Seat[Any], recipe: Recipe) -> None:
        super().__init__(seat)
        self.recipe = recipe

    def update(self, old: AdamWState, new: AdamWState, grads: Array, *, step: int) -> float:
        """A direct call: see `Recipe.update`."""
        return self.recipe.update(old, new, grads, step=step)
