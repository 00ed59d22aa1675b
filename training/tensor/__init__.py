"""Tensor parallelism: each rank of a group holds slices of the matrices, tokens and heads.

`shards` says which; `ops` are the operators with collectives; `model` is the GPT. Imports `model`, `ops` and
collectives. Begin with `shards`.
"""
