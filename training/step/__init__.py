"""One training step, whichever rank does it: the recipe, its gradients over shards and ranks, its memory.

`recipe` is the computation, `reduction` sums gradients, `non_finite` finds where a NaN arose, `step_hook` is
what redundancy sees of a step. Imports `model`, `data` and below. Begin with `recipe`.
"""
