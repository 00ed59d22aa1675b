"""A run of `zbmd train` whose operators and updates fail at times: a seed (empty: never), and a recipe."""

from __future__ import annotations

import sys
from random import Random

from support.devices.flaky_operators import Flaky

from zbmd.training.model_actors.actors import ComputingActor
from zbmd.training.sharded.__main__ import main
from zbmd.training.sharded.task import EngineTask

UPDATES_FAIL = 0.3


def break_operators(seed: int) -> None:
    """Have operators fail from now on."""
    flaky, recipe_of = Flaky(seed, share=0.02, failures_max=5), EngineTask._recipe

    def broken(self, model):  # type: ignore[no-untyped-def]
        model.operators = flaky.around(model.operators)
        return recipe_of(self, model)

    EngineTask._recipe = broken  # type: ignore[method-assign]


def break_updates(seed: int) -> None:
    """Have updates fail from now on, when they are done."""
    random, run = Random(seed), ComputingActor.run

    def broken(self, work):  # type: ignore[no-untyped-def]
        made = run(self, work)
        if random.random() < UPDATES_FAIL:
            raise RuntimeError("an update")
        return made

    ComputingActor.run = broken  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1]:
        break_operators(int(sys.argv[1]))
        break_updates(int(sys.argv[1]))
    raise SystemExit(main(sys.argv[2:]))
