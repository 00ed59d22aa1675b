"""Differentiable operations: each computes its output and records its backward rule on a `Tape`.

Activations are 2-D, (rows, features), with rows = batch × positions; row b * positions + t is position t of
sequence b. Ops never change their inputs' data. Imports only `autograd` and `native`.
"""

from __future__ import annotations

from zbmd.training.ops.activation import dropout, gelu, squared_relu
from zbmd.training.ops.attention import causal_attention, causal_distance_bias
from zbmd.training.ops.linear import add, add_bias, cross_entropy, embedding, linear, tied_linear
from zbmd.training.ops.norm import layer_norm, rms_norm

__all__ = [
    "add",
    "add_bias",
    "causal_attention",
    "causal_distance_bias",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "rms_norm",
    "squared_relu",
    "tied_linear",
]
