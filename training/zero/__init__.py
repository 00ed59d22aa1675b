"""ZeRO: the state of a data-parallel run is sharded over its ranks (stages 1 to 3), with redundancy.

`machine` is the sans-I/O order of a step, `layout` the shards, `rank` what one rank holds, `trainer` runs
steps, `job` the run. Imports `replicated`, `redundancy` and below. Begin with `machine`.
"""
