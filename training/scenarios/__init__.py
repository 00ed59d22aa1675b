"""Simulated training jobs: the machine that keeps their state and commits steps, with kills at any moment.

`world` is what outlives the ranks' processes, and what must hold; `rank` is a rank, over the production
machine and the production rules of epochs and records; `commit` and `training` are scenarios for `zbmd sim`.
Imports `job`, `redundancy` and below, and `zbmd.collectives.scenarios`. Begin with `commit`.
"""
