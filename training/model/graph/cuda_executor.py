"""Run a fused graph on a device: one launch a product with all that follows it, all values in one arena.

The kernels are those of `zbmd.training.ops.cuda`. Weights are bf16 on the device. What differs between steps
is read from one block of device memory, so launches can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.array_module import bfloat16
from zbmd.training.autograd.op_watch import Kernel
from zbmd.training.model.gpt import Batch
from zbmd.training.model.graph.ir import ACTIVATIONS, Graph, Node
from zbmd.training.model.graph.memory import ALIGNMENT, plan_memory
from zbmd.training.model.graph.trace import Traced
from zbmd.training.ops.cuda.device_array import DeviceArray, Out, Pool
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.operators import NOISE_HEAD, CudaOperators, noise_numbers, rows_by_token
from zbmd.training.ops.cuda.transfers import UploadAhead
from zbmd.transport.errors import UserError

SHAPES_TOLD: Final = 2
"""Inputs of a node whose shapes a profile has, beside that of its output."""


class _Inputs:
    """Arrays in one block of device memory, whose next contents are uploaded while kernels read these."""

    def __init__(self, executor: Executor, sizes: Mapping[str, tuple[int, npt.DTypeLike]]) -> None:
        starts, end = dict[str, int](), 0
        for name, (count, dtype) in sizes.items():
            starts[name] = end
            end += -(-count * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        self._block = executor.empty(end, np.uint8)
        self._ahead = UploadAhead(executor, self._block)
        self._sizes, self._starts = sizes, starts
        self.device: Final[dict[str, DeviceArray]] = {}
        for name, (count, dtype) in sizes.items():
            address, base = self._block.address + starts[name], self._block.base
            self.device[name] = DeviceArray(executor, address, (count,), np.dtype(dtype), base)

    def upload(self, key: object, fill: Callable[[dict[str, npt.NDArray[Any]]], None]) -> None:
        """Begin to upload what `fill` writes into host arrays, beside what runs, unless that has begun."""

        def write(room: npt.NDArray[np.uint8]) -> None:
            fill(
                {
                    name: room[self._starts[name] :][: count * np.dtype(dtype).itemsize].view(dtype)
                    for name, (count, dtype) in self._sizes.items()
                }
            )

        self._ahead.upload(key, write)

    def take(self, key: object) -> None:
        """Put what was uploaded for `key` where kernels read it, in the order of the stream."""
        self._ahead.take(key)

    def close(self) -> None:
        """Give page-locked memory back. The device is done with it."""
        self._ahead.close()


class CudaGraphRun:
    """A graph that `executor` runs, many times. Raises `UserError` for an op that has no kernel.

    `load` copies a batch to the device, `bind` names the arrays of weights and gradients, and `launch` asks
    for nodes. All other memory belongs to this object, so captured launches stay valid as long as it is.
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
        self.arena: Final = executor.empty(max(1, self.plan.arena_bytes), np.uint8)
        self.pool: Final = Pool()
        """Memory of partial sums, which are no values of the graph."""
        self._held: dict[int, Any] = {}
        offsets, kinds = self.plan.offsets(), {"bfloat16": bfloat16()}
        for number, value in graph.values.items():
            dtype = kinds.get(value.dtype) or np.dtype(value.dtype)
            if number in offsets:
                address = self.arena.address + offsets[number]
                self._held[number] = DeviceArray(executor, address, value.shape, dtype, self.arena.base)
            elif value.source == "constant":
                array = traced.constants[number]
                kept = array.astype(np.int64) if array.dtype.kind in "iu" else array
                self._held[number] = executor.upload(kept)
        self._held[graph.outputs["loss"]] = None  # the host adds up the losses of all rows
        self._inputs = self._inputs_of()
        for number, value in graph.values.items():
            if value.source == "input":
                self._held[number] = self._inputs.device[value.name]
        self._tables = {
            number: tuple(map(executor.upload, rows_by_token(traced.constants[number].reshape(-1), rows)))
            for number, rows in self._embedded().items()
            if graph.values[number].source == "constant"
        }
        self.losses: Final = executor.empty(self._inputs.device["targets"].size, np.float32)
        """Of each row, unweighted, of the last run."""

    def _embedded(self) -> dict[int, int]:
        """Return what tables are read at, each with the rows of its table."""
        return {
            node.inputs[1]: int(node.attributes["rows"])
            for node in self.graph.nodes
            if node.op == "embedding_grad"
        }

    def _inputs_of(self) -> _Inputs:
        values = {one.name: one for one in self.graph.values.values() if one.source == "input"}
        samples, rows = values["tokens"].shape[0], values["targets"].shape[0]
        sizes: dict[str, tuple[int, npt.DTypeLike]] = dict.fromkeys(values, (rows, np.int64))
        sizes |= {"noise": (len(NOISE_HEAD) + samples, np.int64), "scale": (1, np.float32)}
        for number, entries in self._embedded().items():
            if self.graph.values[number].source == "input":
                sizes |= {"order": (rows, np.int32), "starts": (entries + 1, np.int32)}
        return _Inputs(self._run, sizes)

    def upload(self, batch: Batch) -> None:
        """Begin to upload a batch and the numbers of its step, beside what the device computes."""
        self._inputs.upload(batch, partial(self._fill, batch))

    def load(self, batch: Batch) -> None:
        """Have the nodes that are launched next read a batch, which is uploaded now unless it was before."""
        self.upload(batch)
        self._inputs.take(batch)

    @staticmethod
    def _fill(batch: Batch, into: Mapping[str, npt.NDArray[Any]]) -> None:
        tokens = np.ascontiguousarray(batch.inputs, np.int64).reshape(-1)
        assert batch.targets is not None, "a step has targets"
        into["tokens"][:], into["targets"][:], into["scale"][:] = tokens, batch.targets, batch.weight
        if batch.noise is not None:
            into["noise"][:] = noise_numbers(batch.noise)
        if "order" in into:
            into["order"][:], into["starts"][:] = rows_by_token(tokens, len(into["starts"]) - 1)

    def bind(self, weights: Mapping[str, DeviceArray], grads: Mapping[str, DeviceArray]) -> None:
        """Read these weights and write these gradients, by the names of parameters, from now on."""
        for number, value in self.graph.values.items():
            if value.source == "weight":
                self._held[number] = weights[value.name]
        for name, number in self.graph.outputs.items():
            if name != "loss":
                self._held[number] = grads[name.removeprefix("grad ")]

    def launch(self, nodes: Iterable[Node]) -> None:
        """Ask the device for nodes of the graph, which follow those that it was asked for last."""
        with self._run.within(self.pool):
            for node in nodes:
                arrays = (self._held[number] for number in (*node.outputs, *node.inputs))
                self._by_op[node.op](self, node, *arrays)

    def described(self, node: Node) -> Kernel:
        """Return what a profile says of a node."""
        graph = self.graph
        values = [graph.values[number] for number in (node.outputs[0], *node.inputs[:SHAPES_TOLD])]
        return Kernel(
            op=node.ops if node.op == "product" else node.op,
            which=node.phase,
            unit=node.unit,
            shape=", ".join("x".join(map(str, one.shape)) or "scalar" for one in values),
            dtype=values[0].dtype,
            nbytes=graph.traffic((node,)),
            flops=graph.flops(node),
        )

    def close(self) -> None:
        """Give the memory beside the arena back; nothing that was captured may be replayed any more."""
        self._inputs.close()
        self._run.close_pool(self.pool)

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
            "embedding_grad": CudaGraphRun._embedding_grad,
            "layer_norm": lambda run, _, y, rows, x, *given: run._ops.normalise(y, rows, x, *given),
            "layer_norm_grad": CudaGraphRun._norm_grad,
            "matmul": CudaGraphRun._product,
            "product": CudaGraphRun._product,
            "norm gradient": CudaGraphRun._norm_grad,
            "residual + norm": CudaGraphRun._residual_norm,
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
        rate, site = float(node.attributes["rate"]), int(node.attributes["site"])
        noise = self._inputs.device["noise"]
        self._ops.thin(y, x, noise, rate=rate, site=site, first_row=0, rows=len(x))

    def _embedding_grad(self, node: Node, y: DeviceArray, dy: DeviceArray, _: DeviceArray) -> None:
        given = self._inputs.device
        tables = self._tables.get(node.inputs[1]) or (given["order"], given["starts"])
        self._ops.embedding_grad(y, dy, *tables)

    def _cross_entropy(self, _: Node, *arrays: Any) -> None:
        *_others, slope, logits, targets = arrays
        self._moved(slope, logits)
        self._ops.loss(slope, self.losses, targets, self._inputs.device["scale"])

    def _residual_norm(self, node: Node, *_: Any) -> None:
        add, norm = node.body
        x, other, gain, *bias = (self._held[number] for number in (*add.inputs, *norm.inputs[1:]))
        total, y, rows = (self._kept(number) for number in (*add.outputs, *norm.outputs))
        self._ops.normalise(y, rows, x, gain, bias[0] if bias else None, other, total)

    def _kept(self, number: int) -> DeviceArray:
        """Return where a value of a fused node is written, also if nothing reads it there."""
        found, value = self._held.get(number), self.graph.values[number]
        dtype = bfloat16() if value.dtype == "bfloat16" else value.dtype
        return self._run.empty(value.shape, dtype) if found is None else found

    def _norm_grad(self, node: Node, *_: Any) -> None:
        """Launch the gradient of a norm, and with it the sum with another gradient of its input."""
        first, *rest = node.body or (node,)
        dx, others = first.outputs[0], list[DeviceArray]()
        for add in rest:
            others = [self._held[number] for number in add.inputs if number != dx]
            dx = add.outputs[0]
        sums = [self._held[number] for number in first.outputs[1:]]
        dy, x, statistics, gain = (self._held[number] for number in first.inputs)
        partial = self._ops.norm_sums(dy, x, statistics, has_bias=len(sums) > 1)
        for out, one in zip(sums, partial, strict=True):
            self._ops.sum_runs(out, one)
        name = first.op.removesuffix("_grad")
        self._ops.norm_slope(name, self._held[dx], dy, x, statistics, gain, *others)

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
            elif one.op.removesuffix("_grad") in ACTIVATIONS:
                given["activation"], given["residual"] = one.op, self._held[one.inputs[1]]
            elif one.op == "add":
                given["residual"] = self._held[next(n for n in one.inputs if n != made)]
            made = one.outputs[0]
        self._ops.multiply(str(first.attributes["form"]), self._held[made], a, b, **given)
