"""Trace a step: run a model's own forward and backward pass on arrays that have shapes, but no numbers.

The tape is the engine's (`zbmd.training.autograd.tape`): each op, each rule and each sum of gradients that it
plays becomes a node. Attention is traced as scores, softmax and the mix of values, as it is defined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.array_module import Array, bfloat16
from zbmd.training.autograd.parameter_layout import ParameterSlot
from zbmd.training.autograd.rng import Noise
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT, Batch
from zbmd.training.model.graph.ir import (
    ACTIVATIONS_IN,
    ACTIVATIONS_OUT,
    GRADIENT,
    OWN_TARGETS,
    OWN_TOKENS,
    PRECISION,
    SLOPE_IN,
    SLOPE_OUT,
    Attribute,
    Graph,
    Node,
    Phase,
    Source,
    Value,
)
from zbmd.training.model.tensor_parallel import ParallelGPT
from zbmd.training.ops.cuda.table import FP8, MatmulPrecision

Shape = tuple[int, ...]


class SymbolicArray:
    """An array of the graph. Writing to it lets it stand for another value: values never change."""

    __slots__ = ("builder", "dtype", "number", "shape", "size")

    def __init__(self, builder: _Builder, number: int, shape: Shape, dtype: np.dtype[Any]) -> None:
        self.builder, self.number, self.shape, self.dtype = builder, number, shape, dtype
        self.size = math.prod(shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def executor(self) -> _Builder:
        """Return what makes arrays where this one lies."""
        return self.builder

    def reshape(self, *shape: int) -> SymbolicArray:
        """Return a view of another shape; one extent may be -1."""
        rest = self.size // math.prod(extent for extent in shape if extent != -1)
        extents = tuple(rest if extent == -1 else extent for extent in shape)
        return SymbolicArray(self.builder, self.number, extents, self.dtype)

    def copy(self) -> SymbolicArray:
        """Return a copy."""
        return self.builder.emit("copy", [self], self.shape, self.dtype)

    def astype(self, dtype: npt.DTypeLike) -> SymbolicArray:
        """Return a copy of another dtype."""
        return self.builder.emit("cast", [self], self.shape, np.dtype(dtype))

    def room(self, dtype: npt.DTypeLike) -> SymbolicArray:
        """Return an array that is not written yet."""
        return SymbolicArray(self.builder, -1, self.shape, np.dtype(dtype))

    def become(self, other: SymbolicArray) -> None:
        """Stand for the value of `other` from here on, in this array's dtype."""
        self.number = other.number if other.dtype == self.dtype else other.astype(self.dtype).number

    def __setitem__(self, _: Any, value: SymbolicArray) -> None:
        self.become(value)

    def __iadd__(self, other: SymbolicArray) -> SymbolicArray:
        return self.builder.emit("add", [self, other], self.shape, self.dtype)


@dataclass(slots=True)
class _Builder:
    values: dict[int, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    constants: dict[int, npt.NDArray[Any]] = field(default_factory=dict)
    tape: Tape | None = None
    phase: Phase = "forward"

    def value(self, name: str, shape: Shape, dtype: np.dtype[Any], source: Source) -> SymbolicArray:
        number = len(self.values)
        self.values[number] = Value(
            number=number, name=name or f"%{number}", shape=shape, dtype=dtype.name, source=source
        )
        return SymbolicArray(self, number, shape, dtype)

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> SymbolicArray:
        """Return an array that is not written yet."""
        return SymbolicArray(self, -1, shape, dtype)

    def constant(self, name: str, array: Any) -> SymbolicArray:
        """Return `array`, which the model has made itself, as a value; itself if it is one."""
        if isinstance(array, SymbolicArray):
            return array
        found = next((number for number, one in self.constants.items() if one is array), None)
        if found is not None:
            return SymbolicArray(self, found, array.shape, array.dtype)
        made = self.value(name, array.shape, array.dtype, "constant")
        self.constants[made.number] = array
        return made

    def input(self, name: str, shape: Shape) -> SymbolicArray:
        """Return an input of integers, the same if it was asked for before."""
        found = next((one for one in self.values.values() if one.name == name), None)
        kind = np.dtype(np.int64)
        if found is not None:
            return SymbolicArray(self, found.number, found.shape, kind)
        return self.value(name, shape, kind, "input")

    def emit_all(
        self,
        op: str,
        inputs: list[SymbolicArray],
        outputs: list[tuple[Shape, np.dtype[Any]]],
        *,
        again: bool = False,
        **attributes: Attribute,
    ) -> list[SymbolicArray]:
        """Add a node. again: an op of a forward pass, which is recomputed if the backward pass is on."""
        phase: Phase = "recompute" if again and self.phase == "backward" else self.phase
        made = [self.value("", shape, dtype, "node") for shape, dtype in outputs]
        node = Node(
            number=len(self.nodes),
            op=op,
            inputs=tuple(one.number for one in inputs),
            outputs=tuple(one.number for one in made),
            unit=0 if self.tape is None else self.tape.unit_running,
            phase=phase,
            attributes=attributes,
        )
        self.nodes.append(node)
        return made

    def emit(
        self,
        op: str,
        inputs: list[SymbolicArray],
        shape: Shape,
        dtype: np.dtype[Any],
        *,
        again: bool = False,
        **attributes: Attribute,
    ) -> SymbolicArray:
        """Add a node with one output."""
        return self.emit_all(op, inputs, [(shape, dtype)], again=again, **attributes)[0]


def _sym(array: object) -> SymbolicArray:
    return cast(SymbolicArray, array)


def _data(array: SymbolicArray) -> Array:
    return cast(Array, array)


class TracingOperators:
    """The ops of `zbmd.training.ops`: each adds nodes, and a rule that adds those of its gradient."""

    def __init__(self, builder: _Builder, dtype: np.dtype[Any], matmul_precision: MatmulPrecision) -> None:
        self._b = builder
        self._in_layers: Final[dict[str, Attribute]] = {PRECISION: FP8} if matmul_precision == FP8 else {}
        """Attributes of the products of layers."""
        self.dtype = dtype
        """Of activations."""
        self.sums = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
        """Of statistics and sums."""

    def embedding(self, tape: Tape, tokens: Array, table: Parameter) -> Tensor:
        """See `ops.embedding`."""
        b, known = self._b, _sym(table.stored)
        places = b.constant("positions", tokens)
        shape = (places.size, known.shape[1])
        y = b.emit("embedding", [places, known], shape, self.dtype, again=True)

        def backward(dy: Array) -> None:
            def write(out: Array) -> None:
                into = _sym(out)
                inputs, rows = [_sym(dy), places], into.shape[0]
                into.become(b.emit("embedding_grad", inputs, into.shape, into.dtype, rows=rows))

            table.receive(write, lasting=True)

        return tape.record(_data(y), backward, table)

    def linear(self, tape: Tape, x: Tensor, weight: Parameter, residual: Tensor | None = None) -> Tensor:
        """See `ops.linear`."""
        return self._linear(tape, x, weight, residual, self._in_layers)

    def head_linear(self, tape: Tape, x: Tensor, weight: Parameter) -> Tensor:
        """See `ops.linear`: of the logits."""
        return self._linear(tape, x, weight, None, {})

    def _linear(
        self,
        tape: Tape,
        x: Tensor,
        weight: Parameter,
        residual: Tensor | None,
        given: Mapping[str, Attribute],
    ) -> Tensor:
        a, w = _sym(x.data), _sym(weight.stored)
        y = self._product("nn", a, w, again=True, given=given)
        if residual is not None:
            y = self._b.emit("add", [y, _sym(residual.data)], y.shape, y.dtype, again=True)

        def backward(dy: Array) -> None:
            x.accumulate(_data(self._product("nt", _sym(dy), w, given=given)))
            weight.receive(lambda out: self._write_product(out, "tn", a, _sym(dy), given), lasting=True)
            if residual is not None:
                residual.accumulate(dy if weight.deferred is None else dy.copy())

        return tape.record(_data(y), backward, weight)

    def tied_linear(self, tape: Tape, x: Tensor, table: Parameter) -> Tensor:
        """See `ops.tied_linear`."""
        a, w = _sym(x.data), _sym(table.stored)

        def backward(dy: Array) -> None:
            x.accumulate(_data(self._product("nn", _sym(dy), w)))
            table.receive(lambda out: self._write_product(out, "tn", _sym(dy), a, {}))

        return tape.record(_data(self._product("nt", a, w, again=True)), backward, table)

    def _product(
        self,
        form: str,
        a: SymbolicArray,
        b: SymbolicArray,
        *,
        again: bool = False,
        dtype: np.dtype[Any] | None = None,
        given: Mapping[str, Attribute] = MappingProxyType({}),
    ) -> SymbolicArray:
        rows = a.shape[1] if form[0] == "t" else a.shape[0]
        columns = b.shape[0] if form[1] == "t" else b.shape[1]
        attributes: dict[str, Attribute] = {"form": form, **given}
        made: list[tuple[Shape, np.dtype[Any]]] = [((rows, columns), dtype or self.dtype)]
        return self._b.emit_all("matmul", [a, b], made, again=again, **attributes)[0]

    def _write_product(
        self, out: Array, form: str, a: SymbolicArray, b: SymbolicArray, given: Mapping[str, Attribute]
    ) -> None:
        into = _sym(out)
        into.become(self._product(form, a, b, dtype=into.dtype, given=given))

    def rms_norm(self, tape: Tape, x: Tensor, gain: Parameter) -> Tensor:
        """See `ops.rms_norm`."""
        return self._norm(tape, x, gain, None)

    def layer_norm(self, tape: Tape, x: Tensor, gain: Parameter, bias: Parameter) -> Tensor:
        """See `ops.layer_norm`."""
        return self._norm(tape, x, gain, bias)

    def _norm(self, tape: Tape, x: Tensor, gain: Parameter, bias: Parameter | None) -> Tensor:
        given, factors = _sym(x.data), _sym(gain.data)
        shift = [] if bias is None else [_sym(bias.data)]
        name = "layer_norm" if shift else "rms_norm"
        sizes = [(given.shape, self.dtype), ((len(given), 2), self.sums)]
        y, statistics = self._b.emit_all(name, [given, factors, *shift], sizes, again=True)

        def backward(dy: Array) -> None:
            sums = [(factors.shape, self.sums)] * (1 + len(shift))
            inputs = [_sym(dy), given, statistics, factors]
            dx, *made = self._b.emit_all(f"{name}_grad", inputs, [(given.shape, self.dtype), *sums])
            gain.receive(lambda out: _sym(out).become(made[0]))
            if bias is not None:
                bias.receive(lambda out: _sym(out).become(made[1]))
            x.accumulate(_data(dx))

        return tape.record(_data(y), backward, *([gain] if bias is None else [gain, bias]))

    def add(self, tape: Tape, x: Tensor, y: Tensor) -> Tensor:
        """See `ops.add`."""
        a = _sym(x.data)

        def backward(dy: Array) -> None:
            x.accumulate(dy.copy())
            y.accumulate(dy)

        made = self._b.emit("add", [a, _sym(y.data)], a.shape, self.dtype, again=True)
        return tape.record(_data(made), backward)

    def add_bias(self, tape: Tape, x: Tensor, bias: Parameter) -> Tensor:
        """See `ops.add_bias`."""
        a = _sym(x.data)

        def backward(dy: Array) -> None:
            total = self._b.emit("column_sums", [_sym(dy)], a.shape[1:], self.sums)
            bias.receive(lambda out: _sym(out).become(total))
            x.accumulate(dy)

        made = self._b.emit("add_bias", [a, _sym(bias.data)], a.shape, self.dtype, again=True)
        return tape.record(_data(made), backward, bias)

    def gelu(self, tape: Tape, x: Tensor) -> Tensor:
        """See `ops.gelu`."""
        return self._each(tape, x, "gelu")

    def squared_relu(self, tape: Tape, x: Tensor) -> Tensor:
        """See `ops.squared_relu`."""
        return self._each(tape, x, "squared_relu")

    def _each(self, tape: Tape, x: Tensor, name: str) -> Tensor:
        a = _sym(x.data)

        def backward(dy: Array) -> None:
            x.accumulate(_data(self._b.emit(f"{name}_grad", [_sym(dy), a], a.shape, self.dtype)))

        return tape.record(_data(self._b.emit(name, [a], a.shape, self.dtype, again=True)), backward)

    def dropout(
        self,
        tape: Tape,
        x: Tensor,
        *,
        rate: float,
        noise: Noise,
        site: int,
        first_row: int = 0,
        rows: int | None = None,
    ) -> Tensor:
        """See `ops.dropout`."""
        a = _sym(x.data)
        given: Any = {"rate": rate, "site": site}
        if rows is not None:
            given |= {"first_row": first_row, "rows": rows}

        def backward(dy: Array) -> None:
            x.accumulate(_data(self._b.emit("dropout", [_sym(dy)], a.shape, self.dtype, **given)))

        made = self._b.emit("dropout", [a], a.shape, self.dtype, again=True, **given)
        return tape.record(_data(made), backward)

    def causal_attention(self, tape: Tape, qkv: Tensor, bias: Array, *, batch: int, heads: int) -> Tensor:
        """See `ops.causal_attention`."""
        b, packed, by_distance = self._b, _sym(qkv.data), self._b.constant("distance_bias", bias)
        rows, width = len(packed), packed.shape[1] // 3
        square = (batch, heads, rows // batch, rows // batch)
        given: Any = {"batch": batch, "heads": heads}
        scores = b.emit("scores", [packed, by_distance], square, self.dtype, again=True, **given)
        odds = b.emit("softmax", [scores], square, self.dtype, again=True)
        y = b.emit("mix", [odds, packed], (rows, width), self.dtype, again=True, **given)

        def backward(dy: Array) -> None:
            one = ((rows, width), self.dtype)
            dodds, dv = b.emit_all("mix_grad", [_sym(dy), odds, packed], [(square, self.dtype), one], **given)
            dscores = b.emit("softmax_grad", [dodds, odds], square, self.dtype)
            dq, dk = b.emit_all("scores_grad", [dscores, packed], [one, one], **given)
            qkv.accumulate(_data(b.emit("pack", [dq, dk, dv], packed.shape, self.dtype)))

        return tape.record(_data(y), backward)

    def cross_entropy(self, tape: Tape, logits: Tensor, targets: Array, *, weight: float) -> Tensor:
        """See `ops.cross_entropy`."""
        b, scores, wanted = self._b, _sym(logits.data), _sym(targets)
        sizes: list[tuple[Shape, np.dtype[Any]]] = [((), self.sums), ((len(scores),), self.sums)]
        loss, logs = b.emit_all("cross_entropy", [scores, wanted], sizes, again=True, weight=weight)

        def backward(_: Array) -> None:
            inputs = [logs, scores, wanted]
            made = b.emit("cross_entropy_grad", inputs, scores.shape, self.dtype, weight=weight)
            logits.accumulate(_data(made))

        return tape.record(_data(loss), backward)

    def embedding_of_vocabulary(
        self, tape: Tape, tokens: Array, table: Parameter, own: tuple[int, int]
    ) -> Tensor:
        """See `CudaOperators.embedding_of_vocabulary`."""
        b, known, (first, stop) = self._b, _sym(table.stored), own
        places = b.input(OWN_TOKENS, _sym(tokens).shape)
        sizes = (len(places), known.shape[1])
        y = b.emit("embedding_of_vocabulary", [places, known], sizes, self.dtype, first=first, stop=stop)

        def backward(dy: Array) -> None:
            def write(out: Array) -> None:
                into = _sym(out)
                inputs, rows = [_sym(dy), places], into.shape[0]
                into.become(b.emit("embedding_grad", inputs, into.shape, into.dtype, rows=rows))

            table.receive(write, lasting=True)

        return tape.record(_data(y), backward, table)

    def vocabulary_loss(
        self,
        tape: Tape,
        logits: Tensor,
        targets: Array,
        own: tuple[int, int],
        gather: Callable[[Array], Array],
        *,
        weight: float,
        vocabulary: int,
    ) -> Tensor:
        """See `CudaOperators.vocabulary_loss`: what is gathered, and joined by the host, is one node."""
        b, scores, (first, stop) = self._b, _sym(logits.data), own
        places, rows = b.input(OWN_TARGETS, (len(scores),)), len(scores)
        sums = b.emit("part_sums", [scores, places], (2, rows), self.sums, first=first, stop=stop)
        loss, logs = b.emit_all("join_sums", [sums], [((), self.sums), ((rows,), self.sums)])

        def backward(_: Array) -> None:
            inputs = [scores, logs, places]
            logits.accumulate(_data(b.emit("part_slopes", inputs, scores.shape, self.dtype)))

        return tape.record(_data(loss), backward)


class _TracedCollectives:
    """The collectives of units as nodes."""

    def __init__(self, builder: _Builder) -> None:
        self._b = builder

    def all_gather(self, x: Any, /, *, out: Any) -> None:
        """Return all members' rows in `out`."""
        rows, features = math.prod(out.shape[:-1]), out.shape[-1]
        out.become(self._b.emit("all_gather", [x], (rows, features), x.dtype))

    def reduce_scatter(self, x: Any, /, *, out: Any) -> None:
        """Return this member's rows of the sum in `out`."""
        out.become(self._b.emit("reduce_scatter", [x], out.shape, x.dtype))

    def all_reduce(self, x: Any, /) -> Any:
        """Let `x` be the sum."""
        x.become(self._b.emit("all_reduce", [x], x.shape, x.dtype))
        return x


@dataclass(frozen=True, slots=True)
class _TracedGroup:
    """The group along `tp` of a trace."""

    blocking: _TracedCollectives
    rank: int
    size: int


class _TraceModule(ModuleType):
    """The array module of a trace: what a model makes itself is made by numpy, and becomes constants."""

    def __init__(self, builder: _Builder, dtype: np.dtype[Any], matmul_precision: MatmulPrecision) -> None:
        super().__init__("zbmd_trace")
        self.operators_of_device = TracingOperators(builder, dtype, matmul_precision)
        self.asarray, self.arange, self.tile, self.zeros = np.asarray, np.arange, np.tile, np.zeros

    @staticmethod
    def full_like(value: SymbolicArray, _: float) -> SymbolicArray:
        """Return the gradient of the loss, 1, which no rule reads."""
        return value


@dataclass(frozen=True, slots=True)
class Traced:
    """A step's graph, and the arrays that the model made itself. noise: that of dropout, of shape only."""

    graph: Graph
    constants: dict[int, npt.NDArray[Any]]


def trace_step(
    config: GPTConfig,
    *,
    sequences: int,
    length: int = 0,
    precision: str = "float32",
    recompute: bool = False,
    matmul_precision: MatmulPrecision = "default",
) -> Traced:
    """Return the forward and backward pass of one shard of `sequences` windows of `length` tokens.

    length: by default the model's context. precision: the dtype of weights, activations and gradients,
    float32 or bfloat16; sums are float32. matmul_precision: what layers multiply in.
    """
    return trace_units(
        config,
        range(config.layers + 2),
        sequences=sequences,
        length=length,
        precision=precision,
        recompute=recompute,
        matmul_precision=matmul_precision,
    )


def trace_units(
    config: GPTConfig,
    units: range,
    *,
    sequences: int,
    length: int = 0,
    precision: str = "float32",
    recompute: bool = False,
    splits: bool = False,
    part: tuple[int, int] = (0, 1),
    matmul_precision: MatmulPrecision = "default",
) -> Traced:
    """Return the passes of a run of units; see `trace_step`.

    splits: the gradients of weights are a pass of their own, after the one that ends with the input's.
    part: of the model, and how many ranks along `tp` divide it.
    """
    dtype = bfloat16() if precision == "bfloat16" else np.dtype(precision)
    builder, (place, parts) = _Builder(), part
    xp = _TraceModule(builder, dtype, matmul_precision)
    model = GPT(config, xp=xp, recompute=recompute)
    if parts > 1:
        group: Any = _TracedGroup(_TracedCollectives(builder), place, parts)
        model = ParallelGPT(config, group, xp=xp, recompute=recompute)
    length, slots = length or config.context, slots_of_units(model, units)
    rows, weight = sequences * length, 1.0 / (sequences * length)
    batch = Batch(
        _data(builder.value("tokens", (sequences, length), np.dtype(np.int64), "input")),
        targets=_data(builder.value("targets", (rows,), np.dtype(np.int64), "input")),
        weight=weight,
        noise=Noise(0, 0, np.arange(sequences)) if config.dropout else None,
    )
    weights = [_data(builder.value(slot.name, slot.shape, dtype, "weight")) for slot in slots]
    grads = [SymbolicArray(builder, -1, slot.shape, dtype) for slot in slots]
    parameters = [
        model.leaf(slot.name, Parameter(weight, _data(grad), index, None))
        for index, (slot, weight, grad) in enumerate(zip(slots, weights, grads, strict=True))
    ]
    later: list[Callable[[], None]] = []
    for parameter in parameters if splits else ():
        parameter.deferred = later
    wide = (rows // parts, config.width)
    x = Tensor(_data(builder.value(ACTIVATIONS_IN, wide, dtype, "input")) if units[0] else np.zeros(0))
    tape = builder.tape = Tape(model.xp)
    made = model.run_units(tape, units, x, parameters, batch)
    is_last, produced = units[-1] == config.layers + 1, _sym(made.data).number
    builder.phase = "backward"
    slope = made.data if is_last else _data(builder.value(SLOPE_IN, wide, dtype, "input"))
    tape.play(made, slope)
    builder.phase = "weights"
    for write in later:
        write()
    tape.check_whole()
    outputs = {"loss" if is_last else ACTIVATIONS_OUT: produced}
    if x.grad is not None:
        outputs[SLOPE_OUT] = _sym(x.grad).number
    outputs |= {GRADIENT + slot.name: grad.number for slot, grad in zip(slots, grads, strict=True)}
    graph = Graph(values=builder.values, nodes=tuple(builder.nodes), outputs=outputs)
    return Traced(graph.check(), builder.constants)


def slots_of_units(model: GPT, units: range) -> Sequence[ParameterSlot]:
    """Return the parameters of a run of units, in their order."""
    slots = model.layout.slots
    if len(units) == model.config.layers + 2:
        return slots
    return slots[model.units[units[0]].start : model.units[units[-1]].stop]
