"""ZeRO: the state of each part of a model is sharded along `fsdp` or `dp` (stages 1 to 3).

`machine` is the sans-I/O order of a step, `layout` the shards, `rank` what one rank holds, `reduction` that
of a sharded gradient and its norm, `options` the settings; `sharded.zero_trainer` runs steps. Imports `job`,
`pipeline`, `redundancy` and below. Begin with `machine`.
"""
