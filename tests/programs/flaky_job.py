"""The training job, whose operators fail now and then: a seed (0: never), then the job's own arguments."""

from __future__ import annotations

import sys

from support.devices.flaky_operators import Flaky

from zbmd.training.__main__ import main
from zbmd.training.replicated import job
from zbmd.training.step.recipe import Recipe

if __name__ == "__main__":
    SEED = int(sys.argv[1])
    FLAKY = Flaky(SEED, share=0.005 if SEED else 0.0, failures_max=5)
    opened = job.open_recipe

    def flaky_recipe(options: job.JobOptions, *, prepare: bool = True) -> Recipe:
        """The job's recipe, with these operators."""
        made = opened(options, prepare=prepare)
        made.model.operators = FLAKY.around(made.model.operators)
        return made

    job.open_recipe = flaky_recipe
    raise SystemExit(main(sys.argv[2:]))
