"""The ops of the tape on a device: each is called like the op of its name in `zbmd.training.ops`.

Weights and activations are bf16, sums and gradients of weights float32 (rounded when they are stored).
Tokens and targets lie in host memory, and are copied as they are used. The numpy op is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.array_module import Array, bfloat16
from zbmd.training.autograd.rng import Noise, Purpose
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.ops import EPSILON
from zbmd.training.ops.cuda.device_array import DeviceArray, Out
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.table import BY_NAME
from zbmd.transport.errors import LocalProtocolError

DEPTH_MOST: Final = 256
"""Features of a head, at most, in attention over a cache."""
DEPTHS: Final = (64, 128)
"""Features of a head that attention has kernels for."""
ATTENTION_TILE: Final = 64
RUN_ROWS: Final = 64
"""Rows that one block adds up in the gradients of gains and biases."""
_TILES: Final = {"matmul": (128, 128), "wgmma": (128, 256)}
"""Rows and columns of a block's tile."""

i32, u32, u64, f32 = np.int32, np.uint32, np.uint64, np.float32


def _on_device(array: Array) -> DeviceArray:
    return cast(DeviceArray, array)


def _as_data(array: DeviceArray) -> Array:
    """Return `array` as the type of what tensors hold."""
    return cast(Array, array)


@dataclass(slots=True)
class PendingLoss:
    """A loss that the device computes: a scalar once it is asked for, which waits."""

    executor: Executor
    losses: DeviceArray
    weight: float
    shape: tuple[int, ...] = ()
    known: float | None = None

    def __float__(self) -> float:
        if self.known is None:
            self.known = float(self.losses.get().astype(np.float64).sum() * self.weight)
        return self.known


class CudaOperators:
    """The ops over the kernels of one executor."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.dtype: Final = bfloat16()

    # ---- embedding and loss

    def embedding(self, tape: Tape, tokens: Array, table: Parameter) -> Tensor:
        """See `ops.embedding`. tokens: in host memory."""
        run, rows = self.executor, _on_device(table.stored)
        vocabulary, features = rows.shape
        places = np.ascontiguousarray(tokens, np.int64)
        y = run.empty((len(places), features), self.dtype)
        run.launch(
            "embedding_bf16",
            len(places),
            *(Out(y), rows, run.upload(places), i32(vocabulary), i32(features)),
        )

        def backward(dy: Array) -> None:
            table.receive(
                lambda out: self._embedding_grad(_on_device(out), _on_device(dy), places), lasting=True
            )

        return tape.record(_as_data(y), backward, table)

    def _embedding_grad(self, out: DeviceArray, dy: DeviceArray, tokens: npt.NDArray[np.int64]) -> None:
        run, order = self.executor, np.argsort(tokens, kind="stable")
        distinct, starts = np.unique(tokens[order], return_index=True)
        tables = (order, np.append(starts, len(tokens)), distinct)
        run.clear(out)
        given = [run.upload(one.astype(np.int32)) for one in tables]
        run.launch(f"embedding_grad_{dy.kind}", len(distinct), Out(out), dy, *given, i32(dy.shape[1]))

    def cross_entropy(self, tape: Tape, logits: Tensor, targets: Array, *, weight: float) -> Tensor:
        """See `ops.cross_entropy`. targets: in host memory. The logits become their gradient, at once."""
        run, scores = self.executor, _on_device(logits.data)
        rows, classes = scores.shape
        losses = run.empty(rows, np.float32)
        wanted = run.upload(np.ascontiguousarray(targets, np.int64))
        scale = run.upload(np.array([weight], np.float32))
        run.launch("cross_entropy_bf16", rows, Out(scores), Out(losses), wanted, scale, i32(classes))

        def backward(dy: Array) -> None:
            if float(dy) != 1.0:
                raise LocalProtocolError(
                    f"a loss scale of {float(dy):g} was given: gradients of bf16 on a device need none"
                )
            logits.accumulate(_as_data(scores))

        return tape.record(cast(Array, PendingLoss(run, losses, weight)), backward)

    # ---- products

    def linear(self, tape: Tape, x: Tensor, weight: Parameter, residual: Tensor | None = None) -> Tensor:
        """See `ops.linear`."""
        a, w = _on_device(x.data), _on_device(weight.stored)
        y = self._product("nn", a, w, residual=None if residual is None else _on_device(residual.data))

        def backward(dy: Array) -> None:
            slope = _on_device(dy)
            x.accumulate(_as_data(self._product("nt", slope, w)))
            weight.receive(lambda out: self._multiply("tn", _on_device(out), a, slope), lasting=True)
            if residual is not None:  # which may change what it is given
                residual.accumulate(dy if weight.deferred is None else dy.copy())

        return tape.record(_as_data(y), backward, weight)

    def tied_linear(self, tape: Tape, x: Tensor, table: Parameter) -> Tensor:
        """See `ops.tied_linear`."""
        a, w = _on_device(x.data), _on_device(table.stored)

        def backward(dy: Array) -> None:
            slope = _on_device(dy)
            x.accumulate(_as_data(self._product("nn", slope, w)))
            table.receive(lambda out: self._multiply("tn", _on_device(out), slope, a), lasting=True)

        return tape.record(_as_data(self._product("nt", a, w)), backward, table)

    def _product(
        self, form: str, a: DeviceArray, b: DeviceArray, *, residual: DeviceArray | None = None
    ) -> DeviceArray:
        rows = a.shape[1] if form[0] == "t" else a.shape[0]
        columns = b.shape[0] if form[1] == "t" else b.shape[1]
        made = self.executor.empty((rows, columns), self.dtype)
        self._multiply(form, made, a, b, residual=residual)
        return made

    def _multiply(
        self,
        form: str,
        c: DeviceArray,
        a: DeviceArray,
        b: DeviceArray,
        *,
        residual: DeviceArray | None = None,
    ) -> None:
        """Write a b to c; form: of a and b, whether each is transposed in memory (t) or not (n)."""
        by = self.executor.products
        (m, n), k = c.shape, a.shape[0 if form[0] == "t" else 1]
        rows, columns = _TILES[by]
        self.executor.launch(
            f"{by}_{form}_{c.kind}",
            (-(-n // columns), -(-m // rows)),
            *(Out(c), a, b, i32(m), i32(n), i32(k), None, residual, None, f32(1.0), i32(0)),
        )

    # ---- rows and elements

    def rms_norm(self, tape: Tape, x: Tensor, gain: Parameter) -> Tensor:
        """See `ops.rms_norm`."""
        return self._norm(tape, x, gain, None)

    def layer_norm(self, tape: Tape, x: Tensor, gain: Parameter, bias: Parameter) -> Tensor:
        """See `ops.layer_norm`."""
        return self._norm(tape, x, gain, bias)

    def _norm(self, tape: Tape, x: Tensor, gain: Parameter, bias: Parameter | None) -> Tensor:
        run, rows, features = self.executor, *x.data.shape
        given, factors = _on_device(x.data), _on_device(gain.data)
        y, statistics = run.empty(given.shape, self.dtype), run.empty((rows, 2), np.float32)
        name = "rms_norm" if bias is None else "layer_norm"
        shift = [] if bias is None else [_on_device(bias.data)]
        outputs = (Out(y), Out(statistics))
        run.launch(f"{name}_bf16", rows, *outputs, given, factors, *shift, i32(features), f32(EPSILON))

        def backward(dy: Array) -> None:
            slope, runs = _on_device(dy), -(-rows // RUN_ROWS)
            partial = [run.empty((runs, features), np.float32) for _ in range(1 + len(shift))]
            run.launch(
                "norm_gain_grad_bf16",
                (-(-features // 32), runs),
                *(*map(Out, partial), *([] if shift else [None])),
                *(slope, given, statistics, i32(rows), i32(features), i32(RUN_ROWS)),
            )
            gain.receive(lambda out: self._sum_runs(_on_device(out), partial[0]))
            if bias is not None:
                bias.receive(lambda out: self._sum_runs(_on_device(out), partial[1]))
            dx = run.empty(given.shape, self.dtype)
            run.launch(f"{name}_grad_bf16", rows, Out(dx), slope, given, statistics, factors, i32(features))
            x.accumulate(_as_data(dx))

        return tape.record(_as_data(y), backward, *([gain] if bias is None else [gain, bias]))

    def _sum_runs(self, out: DeviceArray, partial: DeviceArray) -> None:
        runs, columns = partial.shape
        self.executor.launch("sum_runs", -(-columns // 256), Out(out), partial, i32(runs), i32(columns))

    def add(self, tape: Tape, x: Tensor, y: Tensor) -> Tensor:
        """See `ops.add`."""
        a, b = _on_device(x.data), _on_device(y.data)
        made = a.room(self.dtype)
        self.executor.each("add_bf16", a.size, Out(made), a, b, u64(a.size))

        def backward(dy: Array) -> None:
            x.accumulate(dy.copy())
            y.accumulate(dy)

        return tape.record(_as_data(made), backward)

    def add_bias(self, tape: Tape, x: Tensor, bias: Parameter) -> Tensor:
        """See `ops.add_bias`."""
        run, a = self.executor, _on_device(x.data)
        rows, features = a.shape
        y = a.room(self.dtype)
        run.each("add_bias_bf16", a.size, Out(y), a, _on_device(bias.data), u64(a.size), i32(features))

        def backward(dy: Array) -> None:
            runs = -(-rows // RUN_ROWS)
            partial = run.empty((runs, features), np.float32)
            numbers = (i32(rows), i32(features), i32(RUN_ROWS))
            run.launch("column_sums_bf16", (-(-features // 32), runs), Out(partial), _on_device(dy), *numbers)
            bias.receive(lambda out: self._sum_runs(_on_device(out), partial))
            x.accumulate(dy)

        return tape.record(_as_data(y), backward, bias)

    def gelu(self, tape: Tape, x: Tensor) -> Tensor:
        """See `ops.gelu`."""
        return self._activation(tape, x, "gelu")

    def squared_relu(self, tape: Tape, x: Tensor) -> Tensor:
        """See `ops.squared_relu`."""
        return self._activation(tape, x, "squared_relu")

    def _activation(self, tape: Tape, x: Tensor, name: str) -> Tensor:
        run, a = self.executor, _on_device(x.data)
        y = a.room(self.dtype)
        run.each(f"{name}_bf16", a.size, Out(y), a, u64(a.size))

        def backward(dy: Array) -> None:
            run.each(f"{name}_grad_bf16", a.size, Out(_on_device(dy)), a, u64(a.size))
            x.accumulate(dy)

        return tape.record(_as_data(y), backward)

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
        """See `ops.dropout`: the same numbers, so the same elements are dropped."""
        run, features = self.executor, x.data.shape[1]
        all_rows = len(x.data) if rows is None else rows
        each = all_rows // len(noise.samples) * features
        least, factor = min(int(rate * 2**32), 2**32 - 1), 1.0 / (1.0 - rate)
        samples = run.upload(noise.samples.astype(np.int64))
        place = (int(Purpose.DROPOUT) << 24) | site

        def thinned(values: DeviceArray) -> DeviceArray:
            made = values.room(self.dtype)
            sizes = (u64(values.size), u64(first_row * features), u64(each), u64(noise.seed))
            numbers = (u32(place), u32(noise.step & 0xFFFFFFFF), u32(least), f32(factor))
            run.each("dropout_bf16", -(-values.size // 4), Out(made), values, samples, *sizes, *numbers)
            return made

        def backward(dy: Array) -> None:
            x.accumulate(_as_data(thinned(_on_device(dy))))

        return tape.record(_as_data(thinned(_on_device(x.data))), backward)

    # ---- attention

    def cache(self, heads: int, context: int, depth: int) -> tuple[DeviceArray, DeviceArray]:
        """Return room for the keys and the values of one sequence."""
        keys, values = (self.executor.zeros((heads, context, depth), self.dtype) for _ in range(2))
        return keys, values

    def cached_attention(
        self, qkv: Array, bias: Array, cache: tuple[DeviceArray, DeviceArray], *, known: int
    ) -> DeviceArray:
        """Return the attention of new rows after `known` cached positions, and cache theirs."""
        run, packed, (keys, values) = self.executor, _on_device(qkv), cache
        heads, context, depth = keys.shape
        sizes = (i32(heads), i32(depth), i32(context), i32(known))
        run.launch("cache_rows", len(packed), Out(keys), Out(values), packed, *sizes)
        y = run.empty((len(packed), heads * depth), self.dtype)
        given = (packed, keys, values, _on_device(bias), *sizes)
        run.launch("attention_cached", (len(packed), heads), Out(y), *given)
        return y

    def causal_attention(self, tape: Tape, qkv: Tensor, bias: Array, *, batch: int, heads: int) -> Tensor:
        """See `ops.causal_attention`. bias: (heads, context) float32 on the device."""
        run, packed, by_distance = self.executor, _on_device(qkv.data), _on_device(bias)
        rows, width = packed.shape
        length, depth = rows // batch, width // (3 * heads)
        tiles = -(-length // ATTENTION_TILE)
        sizes = (i32(length), i32(heads), i32(heads), i32(by_distance.shape[1]))
        y = run.empty((rows, width // 3), self.dtype)
        logs = run.empty((batch, heads, length), np.float32)
        grid = (tiles, batch * heads)
        run.launch(f"attention_{depth}", grid, Out(y), Out(logs), packed, by_distance, *sizes)

        def backward(dy: Array) -> None:
            slope, delta = _on_device(dy), logs.room(np.float32)
            warps = BY_NAME[f"attention_delta_{depth}"].block // 32
            numbers = (i32(length), i32(heads), i32(rows))
            run.launch(f"attention_delta_{depth}", -(-rows * heads // warps), Out(delta), slope, y, *numbers)
            dqkv = packed.room(self.dtype)
            given = (slope, logs, delta, packed, by_distance, *sizes)
            for name in ("keys", "queries"):
                run.launch(f"attention_{name}_grad_{depth}", grid, Out(dqkv), *given)
            qkv.accumulate(_as_data(dqkv))

        return tape.record(_as_data(y), backward)
