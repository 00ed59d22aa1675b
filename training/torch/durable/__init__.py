"""What outlives all ranks of a resilient loop: its records, its checkpoints, and its state in memory.

`recorder` writes the commit log, `checkpoints` and `saved` write and read checkpoints, `memory` keeps each
committed step for the snapshot process of the host. Imports `training.torch`, never `run` or `meetings`.
"""
