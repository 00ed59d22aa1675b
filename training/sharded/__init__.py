"""Training on a mesh of `dp × pp × tp` ranks, from a recipe: what `zbmd train` runs on every rank.

`options` is the recipe, `stages` its pipeline. `trainer` runs steps of state that is whole along `dp`, and
`zero_trainer` of sharded state, both over `model_part` and `stage_of_view`; `task` and `run` are the job.
Imports `zero`, `job` and below. Begin with `options` and `trainer`.
"""
