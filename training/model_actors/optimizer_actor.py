"""The optimizer as an actor: from one version of the state and its gradient to the next."""

from __future__ import annotations

from typing import Any

from zbmd.training.autograd.array_module import Array
from zbmd.training.model_actors.slot import Seat, SeatedActor
from zbmd.training.optim.adamw import AdamWState
from zbmd.training.step.recipe import Recipe


class OptimizerActor(SeatedActor):
    """Updates out of place, so that an update that failed half-way is done again from the same state."""

    def __init__(self, seat: Seat[Any], recipe: Recipe) -> None:
        super().__init__(seat)
        self.recipe = recipe

    def update(self, old: AdamWState, new: AdamWState, grads: Array, *, step: int) -> float:
        """A direct call: see `Recipe.update`."""
        return self.recipe.update(old, new, grads, step=step)
