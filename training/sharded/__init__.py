"""Training on a mesh of `dp × fsdp × pp × tp` ranks, from a recipe: what `zbmd train` runs on every rank.

`options` is the recipe, `stages` its pipeline. `trainer` runs steps over a model part and `stage_of_view`;
the policies `replicated` and `zero_trainer` hold its state whole, or sharded; `task` and `run` are the job.
Imports `zero`, `job` and below. Begin with `options` and `trainer`.
"""
