"""Run a fused graph on a device: one launch a product with all that follows it, all values in one arena.

The kernels are those of `zbmd.training.ops.cuda`. Weights are bf16 on the device; tokens are in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.array_module import bfloat16
from zbmd.training.autograd.rng import Noise
from zbmd.training.model.graph.ir import ACTIVATIONS, Graph, Node
from zbmd.training.model.graph.memory import plan_memory
from zbmd.training.model.graph.trace import Traced
from zbmd.training.ops.cuda.device_array import DeviceArray, Out
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.operators import CudaOperators, PendingLoss
from zbmd.transport.errors import UserError


class CudaGraphRun:
    """A graph that `executor` runs, many times. Raises `UserError` for an op that has no kernel.

    grads: the gradients of the last run, by name; they are overwritten by the next one.
    """

    def __init__(self, traced: Traced, graph: Graph, executor: Executor) -> None:
        self._by_op = self._launches()
        missing = sorted({node.op for node in graph.nodes} - self._by_op.keys())
        if missing:
            raise UserError(
                f"the graph has ops without a kernel: {', '.join(missing)}. Attention has kernels for heads "
                "of 64 and 128 features; fuse the graph for the target cuda."
            )
        self.graph, self._run, self._ops = graph, executor, CudaOperators(executor)
        self.plan: Final = plan_memory(graph)
        self._arena = executor.empty(max(1, self.plan.arena_bytes), np.uint8)
        self._held: dict[int, Any] = {}
        offsets, kinds = self.plan.offsets(), {"bfloat16": bfloat16()}
        for number, value in graph.values.items():
            dtype = kinds.get(value.dtype) or np.dtype(value.dtype)
            if number in offsets:
                address = self._arena.address + offsets[number]
                self._held[number] = DeviceArray(executor, address, value.shape, dtype, self._arena.base)
            elif value.source == "constant":
                array = traced.constants[number]
                self._held[number] = array if array.dtype.kind in "iu" else executor.upload(array)
        names = {number: name for name, number in graph.outputs.items() if name != "loss"}
        self.grads: Final[dict[str, DeviceArray]] = {}
        for number, name in names.items():
            value = graph.values[number]
            made = executor.empty(value.shape, kinds.get(value.dtype) or np.dtype(value.dtype))
            self._held[number] = self.grads[name.removeprefix("grad ")] = made
        self._held[graph.outputs["loss"]] = None  # the host adds up the losses of all rows
        self._noise: Noise | None = None
        self._samples: DeviceArray | None = None
        self._loss: PendingLoss | None = None

    def run(
        self,
        weights: Mapping[str, DeviceArray],
        tokens: npt.NDArray[np.integer],
        *,
        noise: Noise | None = None,
    ) -> PendingLoss:
        """Compute the loss and `grads` of `tokens`, (samples, T + 1)."""
        known = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        flat = {name: np.ascontiguousarray(one, np.int64).reshape(-1) for name, one in known.items()}
        self._noise = noise
        self._samples = None if noise is None else self._run.upload(noise.samples.astype(np.int64))
        for number, value in self.graph.values.items():
            if value.source == "input":
                self._held[number] = flat[value.name]
            elif value.source == "weight":
                self._held[number] = weights[value.name]
        for node in self.graph.nodes:
            self._by_op[node.op](
                self, node, *(self._held[number] for number in (*node.outputs, *node.inputs))
            )
        assert self._loss is not None, "a step has a loss"
        return self._loss

    @staticmethod
    def _launches() -> Mapping[str, Callable[..., None]]:
        """Return what launches each op: it takes the run, the node, its outputs and its inputs."""
        return {
            "add": CudaGraphRun._add,
            "add_bias": CudaGraphRun._add_bias,
            "attention": lambda run, _, y, logs, qkv, bias: run._ops.attend(y, logs, qkv, bias),
            "attention_grad": lambda run, _, *arrays: run._ops.attention_slope(*arrays),
            "cast": lambda run, _, y, x: run._run.copy(y, x),
            "column_sums": lambda run, _, y, x: run._ops.sum_runs(y, run._ops.column_sums(x)),
            "cross_entropy_both": CudaGraphRun._cross_entropy,
            "dropout": CudaGraphRun._dropout,
            "embedding": lambda run, _, y, tokens, table: run._ops.embed(y, table, tokens),
            "embedding_grad": lambda run, _, y, dy, tokens: run._ops.embedding_grad(y, dy, tokens),
            "layer_norm": lambda run, _, y, rows, x, *given: run._ops.normalise(y, rows, x, *given),
            "layer_norm_grad": CudaGraphRun._norm_grad,
            "matmul": CudaGraphRun._product,
            "product": CudaGraphRun._product,
            "rms_norm": lambda run, _, y, rows, x, gain: run._ops.normalise(y, rows, x, gain, None),
            "rms_norm_grad": CudaGraphRun._norm_grad,
            **dict.fromkeys(ACTIVATIONS, CudaGraphRun._activation),
            **{f"{name}_grad": CudaGraphRun._activation_grad for name in ACTIVATIONS},
        }

    def _add(self, _: Node, y: DeviceArray, a: DeviceArray, b: DeviceArray) -> None:
        other = b if b.dtype == a.dtype else b.astype(a.dtype)
        self._run.each(f"add_{y.kind}", y.size, Out(y), a, other, np.uint64(y.size))

    def _add_bias(self, _: Node, y: DeviceArray, x: DeviceArray, bias: DeviceArray) -> None:
        sizes = (np.uint64(x.size), np.int32(x.shape[1]))
        self._run.each("add_bias_bf16", x.size, Out(y), x, bias, *sizes)

    def _activation(self, node: Node, y: DeviceArray, x: DeviceArray) -> None:
        self._run.each(f"{node.op}_bf16", x.size, Out(y), x, np.uint64(x.size))

    def _activation_grad(self, node: Node, dx: DeviceArray, dy: DeviceArray, x: DeviceArray) -> None:
        self._moved(dx, dy)
        self._run.each(f"{node.op}_bf16", x.size, Out(dx), x, np.uint64(x.size))

    def _moved(self, into: DeviceArray, source: DeviceArray) -> None:
        """Copy what a kernel then overwrites, unless the plan has put both in one place."""
        if into.address != source.address:
            self._run.copy(into, source)

    def _dropout(self, node: Node, y: DeviceArray, x: DeviceArray) -> None:
        assert self._noise is not None and self._samples is not None, "a graph with dropout has noise"
        rate, site = float(node.attributes["rate"]), int(node.attributes["site"])
        self._ops.thin(y, x, self._samples, rate=rate, noise=self._noise, site=site, first_row=0, rows=len(x))

    def _cross_entropy(self, node: Node, *arrays: Any) -> None:
        *_, slope, logits, targets = arrays
        self._moved(slope, logits)
        self._loss = self._ops.loss(slope, targets, float(node.body[0].attributes["weight"]))

    def _norm_grad(self, node: Node, dx: DeviceArray, *arrays: DeviceArray) -> None:
        *sums, dy, x, statistics, gain = arrays
        partial = self._ops.norm_sums(dy, x, statistics, has_bias=len(sums) > 1)
        for out, one in zip(sums, partial, strict=True):
            self._ops.sum_runs(out, one)
        self._ops.norm_slope(node.op.removesuffix("_grad"), dx, dy, x, statistics, gain)

    def _product(self, node: Node, *_: Any) -> None:
        """Launch a product with what follows it, in the kernels' order: bias, activation, residual."""
        first, *rest = node.body or (node,)
        a, b = (self._held[number] for number in first.inputs)
        made, given = first.outputs[0], dict[str, Any]()
        for one in rest:
            if one.op in ACTIVATIONS:
                given["activation"] = one.op
                given["before"] = self._held[made] if made in node.outputs else None
            elif one.op == "add_bias":
                given["bias"] = self._held[one.inputs[1]]
            elif one.op == "add":
                given["residual"] = self._held[next(n for n in one.inputs if n != made)]
            made = one.outputs[0]
        self._ops.multiply(str(first.attributes["form"]), self._held[made], a, b, **given)
