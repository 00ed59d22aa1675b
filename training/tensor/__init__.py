"""Tensor parallelism: each rank of a group holds a part of the matrices, tokens and heads."""
