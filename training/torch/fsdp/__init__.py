"""Resilient loops over FSDP2: shards, the copy that a buddy keeps of each, and how they are divided again.

`division` says which rank holds what, without PyTorch; `modules` has what is private of `fully_shard`;
`shards` and `replica` the state of this rank and its copies; `gradients` those of several shares of a batch.
"""
