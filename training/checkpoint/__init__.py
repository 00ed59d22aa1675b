"""Durable checkpoints: sharded (any mesh reads any other's) and whole, and the plan that a run resumes under.

`sharded` writes and opens shards; `whole` is one file; `plan` compares what determines the bits of a run.
Imports `optim`, `config`, `files`, and collectives to write. Begin with `sharded`.
"""
