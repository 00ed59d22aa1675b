"""Run a fused graph on a device: one launch a product with all that follows it, all values in one arena.

The kernels are those of `zbmd.training.ops.cuda`. Weights are bf16 on the device. What differs between steps
is read from one block of device memory, so launches can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from zbmd.training.autograd.array_module import bfloat16
from zbmd.training.autograd.op_watch import Kernel
from zbmd.training.model.graph.inputs import BatchInputs, embedded_in
from zbmd.training.model.graph.ir import (
    ACTIVATIONS,
    ACTIVATIONS_OUT,
    EXCHANGES,
    GRADIENT,
    PRECISION,
    SLOPE_OUT,
    Graph,
    Node,
)
from zbmd.training.model.graph.memory import MemoryPlan, plan_memory, plan_passes
from zbmd.training.model.graph.trace import Traced
from zbmd.training.ops.cuda.device_array import DeviceArray, Out, Pool
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.operators import CudaOperators, rows_by_token
from zbmd.training.ops.cuda.table import FP8
from zbmd.transport.errors import UserError

SHAPES_TOLD: Final = 2
"""Inputs of a node whose shapes a profile has, beside that of its output."""
NOTHING: Final[Mapping[str, DeviceArray]] = MappingProxyType({})


class SharedMemory:
    """Memory of runs that compute one after the other on one stream: none keeps anything there."""

    def __init__(self, executor: Executor) -> None:
        self._run = executor
        self.pool: Final = Pool()
        """Memory of partial sums, which are no values of a graph."""
        self._arenas = dict[int, DeviceArray]()

    def arena(self, nbytes: int) -> DeviceArray:
        """Return memory of this size, always the same."""
        if nbytes not in self._arenas:
            self._arenas[nbytes] = self._run.empty(nbytes, np.uint8)
        return self._arenas[nbytes]

    def close(self) -> None:
        """Give it to all arrays; nothing that was captured may be replayed any more."""
        self._arenas.clear()
        self._run.close_pool(self.pool)


class CudaProgram:
    """A graph, what of it does not change between its runs, and the plans of its memory.

    keeps: runs of other graphs lie between its passes. Raises `UserError` for an op that has no kernel.
    """

    def __init__(self, traced: Traced, graph: Graph, executor: Executor, *, keeps: bool = False) -> None:
        missing = sorted({node.op for node in graph.nodes} - CudaGraphRun.launches().keys() - EXCHANGES)
        if missing:
            raise UserError(
                f"the graph has ops without a kernel: {', '.join(missing)}. Attention has kernels for heads "
                "of 64 and 128 features; fuse the graph for the target cuda."
            )
        self.graph: Final = graph
        self.warm = set[int]()
        """Nodes that have run, so that their kernels are loaded and their memory is there."""
        plan = plan_memory(graph)
        self.plans: Final = plan_passes(graph) if keeps else (plan, None)
        """Of what a run holds, and of what it shares with others."""
        self.constants = dict[int, DeviceArray]()
        for number, array in traced.constants.items():
            kept = array.astype(np.int64) if array.dtype.kind in "iu" else array
            self.constants[number] = executor.upload(kept)
        self.tables: Final = {
            number: tuple(map(executor.upload, rows_by_token(traced.constants[number].reshape(-1), rows)))
            for number, rows in embedded_in(graph).items()
            if graph.values[number].source == "constant"
        }


class CudaGraphRun:
    """Memory of one run of a program: what it keeps between passes, and the arrays that it is bound to.

    `bind` names the arrays of weights, gradients and activations, and `launch` asks for nodes. All other
    memory belongs to this object or to `shared`, so captured launches stay valid as long as these are.
    """

    def __init__(
        self, program: CudaProgram, executor: Executor, inputs: BatchInputs, shared: SharedMemory
    ) -> None:
        self._by_op, self.program, self.graph = self.launches(), program, program.graph
        self._run, self._ops, self._pool = executor, CudaOperators(executor), shared.pool
        graph, (own, beside) = program.graph, program.plans
        self.arena: Final = executor.empty(max(1, own.arena_bytes), np.uint8)
        self.inputs: Final = inputs
        self.loss_weight = 1.0
        """Of a loss whose classes are divided over ranks; a captured launch keeps what it was."""
        self._held = dict[int, Any](program.constants)
        self._place(self.arena, own)
        if beside is not None and beside.arena_bytes:
            self._place(shared.arena(beside.arena_bytes), beside)
        self._targets = 0
        for number, value in graph.values.items():
            if value.source == "input":
                self._held[number] = inputs.device.get(value.name)
                self._targets = value.shape[0] if value.name == "targets" else self._targets
        for name in {ACTIVATIONS_OUT, SLOPE_OUT} & graph.outputs.keys():
            number = graph.outputs[name]
            self._held[number] = executor.empty(graph.values[number].shape, bfloat16())
        if "loss" in graph.outputs:
            self._held[graph.outputs["loss"]] = None  # the host adds up the losses of all rows
            self.losses: Final = executor.empty(self._targets, np.float32)
            """Of each row, unweighted, of the last run."""

    def _place(self, arena: DeviceArray, plan: MemoryPlan) -> None:
        kinds = {"bfloat16": bfloat16()}
        for number, offset in plan.offsets().items():
            value = self.graph.values[number]
            dtype = kinds.get(value.dtype) or np.dtype(value.dtype)
            address = arena.address + offset
            self._held[number] = DeviceArray(self._run, address, value.shape, dtype, arena.base)

    def arrays(self, numbers: Iterable[int]) -> list[Any]:
        """Return the arrays of values, in their order."""
        return [self._held[number] for number in numbers]

    def output(self, name: str) -> DeviceArray | None:
        """Return the array of `ACTIVATIONS_OUT` or `SLOPE_OUT`; None if the graph has no such output."""
        found: DeviceArray | None = self._held.get(self.graph.outputs.get(name, -1))
        return found

    def bind(
        self,
        weights: Mapping[str, DeviceArray],
        grads: Mapping[str, DeviceArray],
        inputs: Mapping[str, DeviceArray] = NOTHING,
    ) -> None:
        """Read these weights and inputs, and write these gradients, from now on; by their names."""
        for number, value in self.graph.values.items():
            given = inputs if value.source == "input" else weights if value.source == "weight" else NOTHING
            if value.name in given:
                self._held[number] = given[value.name]
        for name, number in self.graph.outputs.items():
            if name.startswith(GRADIENT) and grads:
                self._held[number] = grads[name.removeprefix(GRADIENT)]

    def let_go(self) -> None:
        """Keep no weights or gradients alive: `bind` names them again."""
        for number, value in self.graph.values.items():
            if value.source == "weight":
                self._held[number] = None
        for name, number in self.graph.outputs.items():
            if name.startswith(GRADIENT):
                self._held[number] = None

    def launch(self, nodes: Iterable[Node]) -> None:
        """Ask the device for nodes of the graph, which follow those that it was asked for last."""
        with self._run.within(self._pool):
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

    @staticmethod
    def launches() -> Mapping[str, Callable[..., None]]:
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
            "embedding_of_vocabulary": lambda run, _, y, at, table: run._ops.embed_own(y, table, at),
            "part_sums": lambda run, _, sums, logits, at: run._ops.part_sums(sums, logits, at),
            "part_slopes": CudaGraphRun._part_slopes,
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
        first, rows = int(node.attributes.get("first_row", 0)), int(node.attributes.get("rows", len(x)))
        noise = self.inputs.device["noise"]
        self._ops.thin(y, x, noise, rate=rate, site=site, first_row=first, rows=rows)

    def _embedding_grad(self, node: Node, y: DeviceArray, dy: DeviceArray, _: DeviceArray) -> None:
        given = self.inputs.device
        tables = self.program.tables.get(node.inputs[1]) or (given["order"], given["starts"])
        self._ops.embedding_grad(y, dy, *tables)

    def _cross_entropy(self, _: Node, *arrays: Any) -> None:
        *_others, slope, logits, targets = arrays
        self._moved(slope, logits)
        self._ops.loss(slope, self.losses, targets, self.inputs.device["scale"])

    def _part_slopes(self, _: Node, slope: DeviceArray, logits: DeviceArray, *given: DeviceArray) -> None:
        self._moved(slope, logits)
        self._ops.part_slopes(slope, given[0], given[1], self.loss_weight)

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
        made, given = first.outputs[0], dict[str, Any](in_fp8=first.attributes.get(PRECISION) == FP8)
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
