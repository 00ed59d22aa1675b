"""Differentiable operations: each computes forwards and records its backward rule on a `Tape`.

Activations are 2-D, (rows, features), with rows = batch x positions, row b * positions + t being position t
of sequence b. Ops never change their inputs' data.
"""

from __future__ import annotations

from zbmd.training.ops.activation import gelu, squared_relu
from zbmd.training.ops.attention import causal_attention, causal_distance_bias
from zbmd.training.ops.cross_entropy import cross_entropy
from zbmd.training.ops.dropout import dropout
from zbmd.training.ops.embedding import embedding
from zbmd.training.ops.linear import add, add_bias, linear, tied_linear
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
