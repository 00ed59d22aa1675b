"""Records, checkpoints and memory: they outlive all ranks of a resilient loop.

`recorder` writes the commit log, `checkpoints` and `saved` write and read checkpoints, `memory` keeps each
committed step for the snapshot process of the host; `slow_ranks` and `operations` measure the loop's steps.
Imports `training.torch`, never `run` or `meetings`.
"""
