"""The graph of a step: values with shapes and dtypes, and nodes in order. Pure data.

Each value is written once, before it is read. A fused node keeps the nodes that it stands for in `body`;
values that only they use are not written to memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from zbmd.transport.errors import LocalProtocolError

ITEM_BYTES: Final = {"float32": 4, "float64": 8, "bfloat16": 2, "int64": 8}
ELEMENTWISE: Final = frozenset(
    ("add", "add_bias", "gelu", "gelu_grad", "squared_relu", "squared_relu_grad", "dropout", "cast")
)
"""Ops whose output has an element for each of their first input's, and depends on no other of these."""
ACTIVATIONS: Final = ("gelu", "squared_relu")
EXCHANGES: Final = frozenset(("all_gather", "reduce_scatter", "all_reduce", "join_sums"))
"""Ops that all ranks along `tp` take part in: no captured graph can hold them."""

_ATTENTION: Final = {"attention": (0, 2), "attention_grad": (3, 5)}
"""The place of the packed queries, keys and values among the inputs, and products of causal pairs."""

Phase = Literal["forward", "recompute", "backward", "weights"]
"""weights: gradients of weights that are computed after those of activations, in a pass of their own."""
PASSES: Final = {"forward": 0, "recompute": 1, "backward": 1, "weights": 2}
"""The pass of each phase. Other work may lie between passes; see `Graph.pass_ends`."""
ACTIVATIONS_IN: Final = "activations"
"""The input of a run of units that does not begin with the embedding, (rows, features)."""
SLOPE_IN: Final = "slope"
"""The gradient of the output of a run of units that does not end with the loss."""
ACTIVATIONS_OUT: Final = "activations out"
SLOPE_OUT: Final = "slope out"
OWN_TOKENS: Final = "own tokens"
"""The input of a model that is divided along `tp`: the row of each token in this rank's part of the table."""
OWN_TARGETS: Final = "own targets"
GRADIENT: Final = "grad "
"""Begins the name of the gradient of a parameter."""
Source = Literal["input", "weight", "constant", "node"]
Attribute = int | float | str
PRECISION: Final = "precision"
"""The attribute of a product whose operands are rounded to something else than their dtype."""


class GraphFlawed(LocalProtocolError):
    """The graph reads a value before it is written, or writes one twice."""


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """An array. source: what writes it."""

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    source: Source = "node"

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        """Its name, shape and dtype."""
        return f"{self.name} ({', '.join(map(str, self.shape))}) {self.dtype}"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One computation. unit: of the model; see `GPT.unit_names`. body: of a fused node, what it computes."""

    number: int
    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    unit: int
    phase: Phase
    attributes: dict[str, Attribute] = {}
    body: tuple[Node, ...] = ()

    @property
    def ops(self) -> str:
        """The ops that it computes, such as `matmul + gelu`."""
        return " + ".join(one.op for one in self.body) or self.op


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a model, or of a run of its units. outputs: values by name.

    They are `grad NAME` of each parameter, `loss` or `ACTIVATIONS_OUT`, and `SLOPE_OUT` if the run begins
    with activations.
    """

    values: dict[int, Value]
    nodes: tuple[Node, ...]
    outputs: dict[str, int]

    def traffic(self, nodes: Iterable[Node]) -> int:
        """Return the bytes that `nodes` read and write, if each reads its inputs once."""
        return sum(
            self.values[number].nbytes for node in nodes for number in (*set(node.inputs), *node.outputs)
        )

    def flops(self, node: Node) -> int:
        """Return the FLOPs of a node's matrix products; of causal attention, of the pairs that it computes.

        Attention computes the scores again in its backward pass.
        """
        if node.op in _ATTENTION:
            place, products = _ATTENTION[node.op]
            rows, packed = self.values[node.inputs[place]].shape
            length = rows // int(node.attributes["batch"])
            return products * rows * (length + 1) * (packed // 3)
        return sum(
            2 * self.values[one.outputs[0]].shape[1] * math.prod(self.values[one.inputs[0]].shape)
            for one in node.body or (node,)
            if one.op == "matmul"
        )

    def uses(self) -> dict[int, list[int]]:
        """Return where each value is read: positions of nodes."""
        found: dict[int, list[int]] = defaultdict(list)
        for place, node in enumerate(self.nodes):
            for number in dict.fromkeys(node.inputs):
                found[number].append(place)
        return found

    def made_at(self) -> dict[int, int]:
        """Return where each value is written: the position of a node."""
        return {number: place for place, node in enumerate(self.nodes) for number in node.outputs}

    def pass_ends(self) -> tuple[int, ...]:
        """Return the positions where one pass ends and the next begins."""
        every = [PASSES[node.phase] for node in self.nodes]
        return tuple(place for place in range(1, len(every)) if every[place - 1] != every[place])

    def check(self) -> Graph:
        """Return the graph itself. Raises `GraphFlawed`."""
        known = {number for number, value in self.values.items() if value.source != "node"}
        for node in self.nodes:
            for number in node.inputs:
                if number not in known:
                    raise GraphFlawed(f"node {node.number} ({node.op}) reads %{number} before it is written")
            for number in node.outputs:
                if number in known:
                    raise GraphFlawed(f"node {node.number} ({node.op}) writes %{number} a second time")
                known.add(number)
        for name, number in self.outputs.items():
            if number not in known:
                raise GraphFlawed(f"the output {name}, %{number}, is never written")
        return self
