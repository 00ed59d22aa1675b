"""Durable checkpoints: sharded (any mesh reads any other's), and the plan that a run resumes under.

`sharded` writes and opens them, `index` lists and keeps them, `parts` has what each host adds to an index,
`blocks` is the format of a shard, `storage` where they lie; `saving` is the machine of ranks that write one
together, `writer` drives it on threads, in a rank or in a snapshot process (`held`); `pace` has when to write
(by the formulas of `intervals`); `plan` compares what determines the bits of a run. Imports `model`, `optim`,
`config` and `actors.snapshots`. Begin with `sharded`.
"""
