"""Training on a mesh of `dp × pp × tp` ranks, from a recipe: what `zbmd train` runs on every rank.

`mesh` names ranks and groups; `options` is the recipe, `stages` its pipeline, `trainer` runs steps, `job` and
`run` the job. Imports `pipeline`, `tensor`, `redundancy` and below. Begin with `mesh` and `options`.
"""
