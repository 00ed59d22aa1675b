"""Run a graph with numpy, node by node or fused: the reference of every other executor.

Each op computes in float32 (float64 in float64), and each value that is written is rounded to its dtype;
inside a fused node nothing is rounded. A graph of float32 with fused attention has the bits of the tape.
Without it, sums are in another order: gradients are within 1e-5 of their norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zbmd.training import ops
from zbmd.training.autograd.array_module import as_indices, bfloat16, widened
from zbmd.training.autograd.rng import Noise
from zbmd.training.autograd.tape import Tape, Tensor
from zbmd.training.model.graph.ir import PRECISION, Attribute, Graph, Node, Value
from zbmd.training.model.graph.memory import MemoryPlan
from zbmd.training.model.graph.trace import Traced
from zbmd.training.native import _kernels
from zbmd.training.ops.cuda.table import FP8
from zbmd.training.ops.fp8 import product_of_blocks, why_not_in_fp8

Array = npt.NDArray[Any]
POISON: Final = 0xFF
"""Every byte of a value that is not written yet, or not needed any more: NaN in every float dtype."""


@dataclass(slots=True)
class GraphRun:
    """One step. weights: by name; tokens: (samples, T + 1); plan: where values lie, by default each alone."""

    traced: Traced
    graph: Graph
    weights: Mapping[str, Array]
    tokens: npt.NDArray[np.integer]
    noise: Noise | None = None
    plan: MemoryPlan | None = None
    _arena: Array = field(init=False)
    _held: dict[int, Array] = field(default_factory=dict, init=False)

    def run(self) -> dict[str, Array]:
        """Return the outputs of the graph by name."""
        known = {"tokens": self.tokens[:, :-1].reshape(-1), "targets": self.tokens[:, 1:].reshape(-1)}
        for number, value in self.graph.values.items():
            if value.source == "constant":
                self._held[number] = self.traced.constants[number]
            elif value.source != "node":
                source = self.weights if value.source == "weight" else known
                self._held[number] = source[value.name]
        self._arena = np.full(0 if self.plan is None else self.plan.arena_bytes, POISON, np.uint8)
        offsets = {} if self.plan is None else self.plan.offsets()
        for place, node in enumerate(self.graph.nodes):
            given = {number: self._read(number) for number in node.inputs}
            for number, made in self._computed(node, given).items():
                self._held[number] = self._stored(self.graph.values[number], made, offsets.get(number))
            self._poison(place)
        return {name: self._held[number] for name, number in self.graph.outputs.items()}

    def _read(self, number: int) -> Array:
        held = self._held[number]
        return held if held.dtype.kind in "iu" else widened(held)

    def _stored(self, value: Value, made: Array, offset: int | None) -> Array:
        dtype = bfloat16() if value.dtype == "bfloat16" else np.dtype(value.dtype)
        if offset is None:
            return made.astype(dtype, copy=False)
        room = self._arena[offset : offset + value.nbytes].view(dtype).reshape(value.shape)
        room[...] = made.astype(dtype)
        return room

    def _poison(self, place: int) -> None:
        if self.plan is not None:
            for one in self.plan.placements:
                if one.end == place:
                    self._arena[one.offset : one.offset + one.nbytes] = POISON

    def _computed(self, node: Node, given: dict[int, Array]) -> dict[int, Array]:
        """Return the outputs of a node, not rounded."""
        compute = OPS.get(node.op)
        if compute is not None:
            made = compute(self, node.attributes, *(given[number] for number in node.inputs))
            return dict(zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True))
        inside = dict(given)
        for one in node.body:
            inside |= self._computed(one, inside)
        return {number: inside[number] for number in node.outputs}


# ---- the ops: each takes the run, its attributes and its inputs, and changes none of these

Attributes = Mapping[str, Attribute]
Compute = Callable[..., Array | tuple[Array, ...]]


def _by_kernel(kernel: Callable[[Array, Array], None]) -> Compute:
    def compute(_: GraphRun, __: Attributes, x: Array) -> Array:
        y = np.empty_like(x)
        kernel(y, np.ascontiguousarray(x))
        return y

    return compute


def _slope(kernel: Callable[[Array, Array], None]) -> Compute:
    def compute(_: GraphRun, __: Attributes, dy: Array, x: Array) -> Array:
        dx = dy.copy()
        kernel(dx, x)
        return dx

    return compute


def _matmul(_: GraphRun, given: Attributes, a: Array, b: Array) -> Array:
    form = str(given["form"])
    if given.get(PRECISION) == FP8 and not why_not_in_fp8(a.shape[0 if form[0] == "t" else 1]):
        return product_of_blocks(form, a, b)
    made: Array = np.matmul(a.T if form[0] == "t" else a, b.T if form[1] == "t" else b)
    return made


def _dropout(run: GraphRun, given: Attributes, x: Array) -> Array:
    assert run.noise is not None, "a graph with dropout is run with the noise of its step"
    tape, rate, site = Tape(np, recording=False), float(given["rate"]), int(given["site"])
    return ops.dropout(tape, Tensor(x), rate=rate, noise=run.noise, site=site).data


def _norm(_: GraphRun, __: Attributes, x: Array, gain: Array, bias: Array | None = None) -> tuple[Array, ...]:
    y, statistics = np.empty_like(x), np.empty((len(x), 2), x.dtype)
    _kernels.norm(y, statistics, x, gain, bias, ops.EPSILON)
    return y, statistics


def _norm_grad(has_bias: bool) -> Compute:
    def compute(
        _: GraphRun, __: Attributes, dy: Array, x: Array, rows: Array, gain: Array
    ) -> tuple[Array, ...]:
        dx, dgain = dy.copy(), np.empty_like(gain)
        dbias = np.empty_like(gain) if has_bias else None
        _kernels.norm_grad(dx, dgain, dbias, rows, x, gain)
        return (dx, dgain) if dbias is None else (dx, dgain, dbias)

    return compute


def _embedding_grad(_: GraphRun, given: Attributes, dy: Array, tokens: Array) -> Array:
    table = np.empty((int(given["rows"]), dy.shape[1]), dy.dtype)
    _kernels.embedding_grad(table, np.ascontiguousarray(dy), as_indices(tokens))
    return table


def _heads(packed: Array, given: Attributes, parts: int) -> Array:
    """Return (parts, batch, heads, T, depth) of rows that hold `parts` arrays side by side."""
    batch, heads = int(given["batch"]), int(given["heads"])
    return packed.reshape(batch, len(packed) // batch, parts, heads, -1).transpose(2, 0, 3, 1, 4)


def _rows(by_head: Array) -> Array:
    """Return (batch, heads, T, depth) as rows of all heads."""
    batch, heads, length, depth = by_head.shape
    return np.ascontiguousarray(by_head.transpose(0, 2, 1, 3)).reshape(batch * length, heads * depth)


def _scores(_: GraphRun, given: Attributes, qkv: Array, bias: Array) -> Array:
    q, k, _v = _heads(qkv, given, 3)
    scores: Array = np.matmul(q * (1.0 / math.sqrt(q.shape[-1])), k.swapaxes(-1, -2))
    scores += ops.bias_by_places(np, bias, q.shape[2])
    return scores


def _softmax(_: GraphRun, __: Attributes, scores: Array) -> Array:
    odds: Array = np.exp(scores - scores.max(axis=-1, keepdims=True))
    odds /= odds.sum(axis=-1, keepdims=True)
    return odds


def _mix(_: GraphRun, given: Attributes, odds: Array, qkv: Array) -> Array:
    return _rows(np.matmul(odds, _heads(qkv, given, 3)[2]))


def _mix_grad(_: GraphRun, given: Attributes, dy: Array, odds: Array, qkv: Array) -> tuple[Array, ...]:
    slope, values = _heads(dy, given, 1)[0], _heads(qkv, given, 3)[2]
    dodds = np.matmul(slope, values.swapaxes(-1, -2))
    return dodds, _rows(np.matmul(odds.swapaxes(-1, -2), slope))


def _softmax_grad(_: GraphRun, __: Attributes, dodds: Array, odds: Array) -> Array:
    dscores: Array = odds * (dodds - np.sum(dodds * odds, axis=-1, keepdims=True))
    return dscores


def _scores_grad(_: GraphRun, given: Attributes, dscores: Array, qkv: Array) -> tuple[Array, ...]:
    q, k, _v = _heads(qkv, given, 3)
    scaled = dscores * (1.0 / math.sqrt(q.shape[-1]))
    return _rows(np.matmul(scaled, k)), _rows(np.matmul(scaled.swapaxes(-1, -2), q))


def _attention(_: GraphRun, given: Attributes, qkv: Array, bias: Array) -> tuple[Array, ...]:
    batch, heads = int(given["batch"]), int(given["heads"])
    y = np.empty((len(qkv), qkv.shape[1] // 3), qkv.dtype)
    logs = np.empty((batch, heads, len(qkv) // batch), qkv.dtype)
    _kernels.attention(y, logs, qkv, bias, batch, heads)
    return y, logs


def _attention_grad(
    _: GraphRun, given: Attributes, dy: Array, y: Array, logs: Array, qkv: Array, bias: Array
) -> Array:
    dqkv = np.empty_like(qkv)
    _kernels.attention_grad(dqkv, dy, y, logs, qkv, bias, int(given["batch"]), int(given["heads"]))
    return dqkv


def _cross_entropy(_: GraphRun, given: Attributes, logits: Array, targets: Array) -> tuple[Array, ...]:
    logs = np.empty(len(logits), logits.dtype)
    total = _kernels.cross_entropy(logs, logits, as_indices(targets))
    return np.asarray(total * float(given["weight"]), logits.dtype), logs


def _cross_entropy_grad(_: GraphRun, given: Attributes, logs: Array, logits: Array, targets: Array) -> Array:
    grad = np.empty_like(logits)
    _kernels.cross_entropy_grad(grad, logs, logits, as_indices(targets), float(given["weight"]))
    return grad


OPS: Final[Mapping[str, Compute]] = {
    "add": lambda _, __, x, y: x + y,
    "add_bias": lambda _, __, x, bias: x + bias,
    "attention": _attention,
    "attention_grad": _attention_grad,
    "cast": lambda _, __, x: x,
    "column_sums": lambda _, __, x: np.einsum("rf->f", x),
    "copy": lambda _, __, x: x,
    "cross_entropy": _cross_entropy,
    "cross_entropy_grad": _cross_entropy_grad,
    "dropout": _dropout,
    "embedding": lambda _, __, tokens, table: table[tokens],
    "embedding_grad": _embedding_grad,
    "gelu": _by_kernel(_kernels.gelu),
    "gelu_grad": _slope(_kernels.gelu_grad),
    "layer_norm": _norm,
    "layer_norm_grad": _norm_grad(True),
    "matmul": _matmul,
    "mix": _mix,
    "mix_grad": _mix_grad,
    "pack": lambda _, __, *parts: np.concatenate(parts, axis=1),
    "rms_norm": _norm,
    "rms_norm_grad": _norm_grad(False),
    "scores": _scores,
    "scores_grad": _scores_grad,
    "softmax": _softmax,
    "softmax_grad": _softmax_grad,
    "squared_relu": _by_kernel(_kernels.squared_relu),
    "squared_relu_grad": _slope(_kernels.squared_relu_grad),
}
"""The functions of ops; any other node runs its body."""
