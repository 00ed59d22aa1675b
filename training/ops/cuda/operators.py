"""The ops of the tape on a device: each is called like the op of its name in `zbmd.training.ops`.

Weights and activations are bf16, sums and gradients of weights float32 (rounded when they are stored).
Tokens and targets lie in host memory, and are copied as they are used. The numpy op is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.array_module import Array, bfloat16
from zbmd.training.autograd.rng import Noise, Purpose
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.ops import EPSILON
from zbmd.training.ops.cuda.device_array import DeviceArray, Out
from zbmd.training.ops.cuda.executor import Argument, Executor
from zbmd.training.ops.cuda.hopper.operands import block_operands, tile_operands
from zbmd.training.ops.cuda.table import (
    BY_NAME,
    FP8,
    FP8_PRODUCTS,
    choose_attention,
    choose_product,
    product_kernel,
)
from zbmd.transport.errors import LocalProtocolError

DEPTH_MOST: Final = 256
"""Features of a head, at most, in attention over a cache."""
DEPTHS: Final = (64, 128)
"""Features of a head that attention has kernels for."""
RUN_ROWS: Final = 64
"""Rows that one block adds up in the gradients of gains and biases."""
ACTIVATIONS: Final = ("", "gelu", "squared_relu", "gelu_grad", "squared_relu_grad")
"""Of products, by the number that their kernels have for each; a gradient reads what the activation was
given as `residual`."""
i32, u32, u64, f32 = np.int32, np.uint32, np.uint64, np.float32


def _on_device(array: Array) -> DeviceArray:
    return cast(DeviceArray, array)


def _as_data(array: DeviceArray) -> Array:
    """Return `array` as the type of what tensors hold."""
    return cast(Array, array)


NOISE_HEAD: Final = ("seed", "step")
"""Numbers before those of the samples; see `noise_numbers`."""


def noise_numbers(noise: Noise) -> npt.NDArray[np.int64]:
    """Return what the kernel of dropout reads: the seed, the step, and the number of each sample."""
    head = [noise.seed & 0xFFFFFFFFFFFFFFFF, noise.step & 0xFFFFFFFF]
    return np.concatenate([np.array(head, np.uint64).view(np.int64), noise.samples.astype(np.int64)])


def rows_by_token(
    tokens: npt.NDArray[np.int64], vocabulary: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the rows sorted by token, stable, and where those of each token begin and the last one's end."""
    order = np.argsort(tokens, kind="stable")
    starts = np.searchsorted(tokens[order], np.arange(vocabulary + 1))
    return order.astype(np.int32), starts.astype(np.int32)


def own_tokens(tokens: npt.NDArray[Any], own: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Return the rows of `tokens` in the part [own[0], own[1]) of a table; of others, the one behind it."""
    first, stop = own
    places = np.where((tokens >= first) & (tokens < stop), tokens.astype(np.int64) - first, stop - first)
    return places.astype(np.int64)


def own_targets(targets: npt.NDArray[Any], own: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Return the columns of `targets` in the part [own[0], own[1]) of the vocabulary; of others, -1."""
    first, stop = own
    places = np.where((targets >= first) & (targets < stop), targets.astype(np.int64) - first, -1)
    return places.astype(np.int64)


def joined_sums(
    every: npt.NDArray[np.float32], targets: npt.NDArray[Any], vocabulary: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the log-sum of each row, and its loss, given all ranks' `part_sums`.

    A target out of range is NaN.
    """
    log_sums, picked = every[0]
    for more_logs, more_picked in every[1:]:
        log_sums, picked = np.logaddexp(log_sums, more_logs), picked + more_picked
    log_sums = np.where((targets >= 0) & (targets < vocabulary), log_sums, np.float32(np.nan))
    return log_sums, log_sums - picked


@dataclass(slots=True)
class PendingLoss:
    """A loss that the device computes: a scalar once it is asked for, which waits."""

    executor: Executor
    losses: DeviceArray
    weight: float
    shape: tuple[int, ...] = ()
    known: float | None = None
    dtype: ClassVar[np.dtype[np.float32]] = np.dtype(np.float32)
    nbytes: ClassVar[int] = dtype.itemsize

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
        places = np.ascontiguousarray(tokens, np.int64)
        y = run.empty((len(places), rows.shape[1]), self.dtype)
        self.embed(y, rows, run.upload(places))

        return tape.record(_as_data(y), lambda dy: self._add_rows(table, dy, places), table)

    def _add_rows(
        self,
        table: Parameter,
        dy: Array,
        places: npt.NDArray[np.int64],
        which: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Hand the table its gradient: of the rows `places`, or of those of them that `which` counts."""
        order, starts = rows_by_token(places if which is None else places[which], len(table.stored))
        if which is not None:
            order = which[order].astype(np.int32)
        tables = [self.executor.upload(one) for one in (order, starts)]
        table.receive(lambda out: self.embedding_grad(_on_device(out), _on_device(dy), *tables), lasting=True)

    def embed(self, y: DeviceArray, table: DeviceArray, tokens: DeviceArray) -> None:
        """Write the rows `tokens` of the table to `y`."""
        vocabulary, features = map(i32, table.shape)
        self.executor.launch("embedding_bf16", tokens.size, Out(y), table, tokens, vocabulary, features)

    def embedding_grad(
        self, out: DeviceArray, dy: DeviceArray, order: DeviceArray, starts: DeviceArray
    ) -> None:
        """Write the gradient of the table of `embedding` to `out`. order, starts: see `rows_by_token`."""
        given = (Out(out), dy, order, starts, i32(dy.shape[1]))
        self.executor.launch(f"embedding_grad_{dy.kind}", len(out), *given)

    def embedding_of_vocabulary(
        self, tape: Tape, tokens: Array, table: Parameter, own: tuple[int, int]
    ) -> Tensor:
        """Return the rows of a table of the tokens in [own[0], own[1]), and zeros for other tokens."""
        run, rows = self.executor, _on_device(table.stored)
        places = own_tokens(tokens, own)
        y = run.empty((len(places), rows.shape[1]), self.dtype)
        self.embed_own(y, rows, run.upload(places))
        mine = np.flatnonzero(places < len(rows))
        return tape.record(_as_data(y), lambda dy: self._add_rows(table, dy, places, mine), table)

    def embed_own(self, y: DeviceArray, table: DeviceArray, places: DeviceArray) -> None:
        """Write the rows `places` of the table to `y`; the one behind its last is zero."""
        whole = self.executor.empty((len(table) + 1, table.shape[1]), self.dtype)
        whole[: len(table)] = table
        whole[len(table) :] = 0
        self.embed(y, whole, places)

    def part_sums(self, sums: DeviceArray, logits: DeviceArray, places: DeviceArray) -> None:
        """Write, (2, rows), the log of the sum of exponentials of each row, and its logit at `places`.

        Of a row whose place is -1 that is 0.
        """
        given = (Out(sums), logits, places, i32(logits.shape[1]))
        self.executor.launch(f"part_sums_{logits.kind}", len(logits), *given)

    def part_slopes(
        self, logits: DeviceArray, log_sums: DeviceArray, places: DeviceArray, factor: float
    ) -> None:
        """Overwrite logits by the gradient of a loss whose classes are divided over ranks."""
        given = (log_sums, places, f32(factor), i32(logits.shape[1]))
        self.executor.launch(f"part_slopes_{logits.kind}", len(logits), Out(logits), *given)

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
        """Return the loss of logits of the tokens in [own[0], own[1]). `gather` collects all ranks' sums."""
        run, scores = self.executor, _on_device(logits.data)
        places, sums = run.upload(own_targets(targets, own)), run.empty((2, len(scores)), np.float32)
        self.part_sums(sums, scores, places)
        log_sums, losses = joined_sums(gather(sums.get()), targets, vocabulary)

        def backward(dy: Array) -> None:
            self.part_slopes(scores, run.upload(log_sums), places, float(dy) * weight)
            logits.accumulate(_as_data(scores))

        return tape.record(np.asarray(losses.sum(dtype=np.float64) * weight), backward)

    def cross_entropy(self, tape: Tape, logits: Tensor, targets: Array, *, weight: float) -> Tensor:
        """See `ops.cross_entropy`. targets: in host memory. The logits become their gradient, at once."""
        scores = _on_device(logits.data)
        run, wanted = self.executor, np.ascontiguousarray(targets, np.int64)
        losses, scale = run.empty(len(scores), np.float32), run.upload(np.array([weight], np.float32))
        self.loss(scores, losses, run.upload(wanted), scale)
        loss = PendingLoss(run, losses, weight)

        def backward(dy: Array) -> None:
            if float(dy) != 1.0:
                raise LocalProtocolError(
                    f"a loss scale of {float(dy):g} was given: gradients of bf16 on a device need none"
                )
            logits.accumulate(_as_data(scores))

        return tape.record(cast(Array, loss), backward)

    def loss(
        self, logits: DeviceArray, losses: DeviceArray, targets: DeviceArray, scale: DeviceArray
    ) -> None:
        """Write the loss of each row, and overwrite the logits by their gradient, times `scale`, (1,)."""
        rows, classes = logits.shape
        given = (Out(logits), Out(losses), targets, scale, i32(classes))
        self.executor.launch("cross_entropy_bf16", rows, *given)

    # ---- products

    def head_linear(self, tape: Tape, x: Tensor, weight: Parameter) -> Tensor:
        """See `ops.linear`: of the logits, never in FP8."""
        return self.linear(tape, x, weight, in_fp8=False)

    def linear(
        self,
        tape: Tape,
        x: Tensor,
        weight: Parameter,
        residual: Tensor | None = None,
        *,
        in_fp8: bool | None = None,
    ) -> Tensor:
        """See `ops.linear`. in_fp8: None means if the executor multiplies in it."""
        if in_fp8 is None:
            in_fp8 = self.executor.matmul_precision == FP8
        a, w = _on_device(x.data), _on_device(weight.stored)
        other = None if residual is None else _on_device(residual.data)
        y = self._product("nn", a, w, residual=other, in_fp8=in_fp8)

        def backward(dy: Array) -> None:
            slope = _on_device(dy)
            x.accumulate(_as_data(self._product("nt", slope, w, in_fp8=in_fp8)))
            weight.receive(
                lambda out: self.multiply("tn", _on_device(out), a, slope, in_fp8=in_fp8), lasting=True
            )
            if residual is not None:  # which may change what it is given
                residual.accumulate(dy if weight.deferred is None else dy.copy())

        return tape.record(_as_data(y), backward, weight)

    def tied_linear(self, tape: Tape, x: Tensor, table: Parameter) -> Tensor:
        """See `ops.tied_linear`."""
        a, w = _on_device(x.data), _on_device(table.stored)

        def backward(dy: Array) -> None:
            slope = _on_device(dy)
            x.accumulate(_as_data(self._product("nn", slope, w)))
            table.receive(lambda out: self.multiply("tn", _on_device(out), slope, a), lasting=True)

        return tape.record(_as_data(self._product("nt", a, w)), backward, table)

    def _product(
        self,
        form: str,
        a: DeviceArray,
        b: DeviceArray,
        *,
        residual: DeviceArray | None = None,
        in_fp8: bool = False,
    ) -> DeviceArray:
        rows = a.shape[1] if form[0] == "t" else a.shape[0]
        columns = b.shape[0] if form[1] == "t" else b.shape[1]
        made = self.executor.empty((rows, columns), self.dtype)
        self.multiply(form, made, a, b, residual=residual, in_fp8=in_fp8)
        return made

    def multiply(
        self,
        form: str,
        c: DeviceArray,
        a: DeviceArray,
        b: DeviceArray,
        *,
        bias: DeviceArray | None = None,
        activation: str = "",
        before: DeviceArray | None = None,
        residual: DeviceArray | None = None,
        in_fp8: bool = False,
    ) -> None:
        """Write activation(a b + bias) + residual to c, or a b times the slope of an activation at residual.

        form: of a and b, whether each is transposed in memory (t) or not (n). before: gets the values that
        the activation is given. in_fp8: as `fp8.product_of_blocks`, if there is a kernel.
        """
        (m, n), k = c.shape, a.shape[0 if form[0] == "t" else 1]
        by = choose_product(self.executor.architecture, n, fp8_depth=k if in_fp8 else 0)
        rows, columns = by.tile
        sizes, end = (i32(m), i32(n), i32(k)), (bias, residual, None if before is None else Out(before))
        number, grid = i32(ACTIVATIONS.index(activation)), (-(-n // columns), -(-m // rows))
        kernel = product_kernel(by, form, c.kind)
        if by == FP8_PRODUCTS:
            (left, of_left), (right, of_right) = block_operands(self.executor, form, a, b)
            self.executor.launch(kernel, grid, Out(c), left, right, *sizes, of_left, of_right, *end, number)
            return
        operands = tile_operands(form, a, b) if by.is_tiled else (a, b)
        self.executor.launch(kernel, grid, Out(c), *operands, *sizes, *end, f32(1.0), number)

    # ---- rows and elements

    def rms_norm(self, tape: Tape, x: Tensor, gain: Parameter) -> Tensor:
        """See `ops.rms_norm`."""
        return self._norm(tape, x, gain, None)

    def layer_norm(self, tape: Tape, x: Tensor, gain: Parameter, bias: Parameter) -> Tensor:
        """See `ops.layer_norm`."""
        return self._norm(tape, x, gain, bias)

    def _norm(self, tape: Tape, x: Tensor, gain: Parameter, bias: Parameter | None) -> Tensor:
        run, rows = self.executor, len(x.data)
        given, factors = _on_device(x.data), _on_device(gain.data)
        y, statistics = run.empty(given.shape, self.dtype), run.empty((rows, 2), np.float32)
        name = "rms_norm" if bias is None else "layer_norm"
        shift = None if bias is None else _on_device(bias.data)
        self.normalise(y, statistics, given, factors, shift)

        def backward(dy: Array) -> None:
            slope = _on_device(dy)
            partial = self.norm_sums(slope, given, statistics, has_bias=bias is not None)
            gain.receive(lambda out: self.sum_runs(_on_device(out), partial[0]))
            if bias is not None:
                bias.receive(lambda out: self.sum_runs(_on_device(out), partial[1]))
            dx = run.empty(given.shape, self.dtype)
            self.norm_slope(name, dx, slope, given, statistics, factors)
            x.accumulate(_as_data(dx))

        return tape.record(_as_data(y), backward, *([gain] if bias is None else [gain, bias]))

    def normalise(
        self,
        y: DeviceArray,
        statistics: DeviceArray,
        x: DeviceArray,
        gain: DeviceArray,
        bias: DeviceArray | None,
        other: DeviceArray | None = None,
        total: DeviceArray | None = None,
    ) -> None:
        """Write the norm of each row of `x` to `y`: a layer norm with `bias`, an RMS norm without.

        With `other`, that of x + other, which is written to `total`.
        """
        name, shift = ("rms_norm", []) if bias is None else ("layer_norm", [bias])
        given: tuple[Argument, ...] = (
            Out(y),
            Out(statistics),
            x,
            gain,
            *shift,
            i32(x.shape[1]),
            f32(EPSILON),
            other,
            None if total is None else Out(total),
        )
        self.executor.launch(f"{name}_bf16", len(x), *given)

    def norm_sums(
        self, dy: DeviceArray, x: DeviceArray, statistics: DeviceArray, *, has_bias: bool
    ) -> list[DeviceArray]:
        """Return the gradients of gain and bias, as sums of runs of rows; see `sum_runs`."""
        run, (rows, features) = self.executor, x.shape
        runs = -(-rows // RUN_ROWS)
        partial = [run.empty((runs, features), np.float32) for _ in range(1 + has_bias)]
        run.launch(
            "norm_gain_grad_bf16",
            (-(-features // 32), runs),
            *(*map(Out, partial), *([] if has_bias else [None])),
            *(dy, x, statistics, i32(rows), i32(features), i32(RUN_ROWS)),
        )
        return partial

    def norm_slope(
        self,
        name: str,
        dx: DeviceArray,
        dy: DeviceArray,
        x: DeviceArray,
        statistics: DeviceArray,
        gain: DeviceArray,
        other: DeviceArray | None = None,
    ) -> None:
        """Write the gradient of the input of the norm `name` to `dx`, plus `other`."""
        given = (Out(dx), dy, x, statistics, gain, i32(x.shape[1]), other)
        self.executor.launch(f"{name}_grad_bf16", len(x), *given)

    def sum_runs(self, out: DeviceArray, partial: DeviceArray) -> None:
        """Write the sums of the rows of `partial` to `out`, in their order."""
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
        y = a.room(self.dtype)
        run.each("add_bias_bf16", a.size, Out(y), a, _on_device(bias.data), u64(a.size), i32(a.shape[1]))

        def backward(dy: Array) -> None:
            partial = self.column_sums(_on_device(dy))
            bias.receive(lambda out: self.sum_runs(_on_device(out), partial))
            x.accumulate(dy)

        return tape.record(_as_data(y), backward, bias)

    def column_sums(self, x: DeviceArray) -> DeviceArray:
        """Return the sums of each column over runs of rows; see `sum_runs`."""
        (rows, features), runs = x.shape, -(-len(x) // RUN_ROWS)
        partial = self.executor.empty((runs, features), np.float32)
        numbers = (i32(rows), i32(features), i32(RUN_ROWS))
        self.executor.launch("column_sums_bf16", (-(-features // 32), runs), Out(partial), x, *numbers)
        return partial

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
        drawn = self.executor.upload(noise_numbers(noise))
        all_rows = len(x.data) if rows is None else rows

        def thinned(values: DeviceArray) -> DeviceArray:
            made = values.room(self.dtype)
            self.thin(made, values, drawn, rate=rate, site=site, first_row=first_row, rows=all_rows)
            return made

        def backward(dy: Array) -> None:
            x.accumulate(_as_data(thinned(_on_device(dy))))

        return tape.record(_as_data(thinned(_on_device(x.data))), backward)

    def thin(
        self,
        y: DeviceArray,
        x: DeviceArray,
        noise: DeviceArray,
        *,
        rate: float,
        site: int,
        first_row: int,
        rows: int,
    ) -> None:
        """Write `x` after dropout to `y`. noise: see `noise_numbers`; rows: of all samples."""
        features, samples = x.shape[1], noise.size - len(NOISE_HEAD)
        each, place = rows // samples * features, (int(Purpose.DROPOUT) << 24) | site
        least, factor = min(int(rate * 2**32), 2**32 - 1), 1.0 / (1.0 - rate)
        sizes = (u64(x.size), u64(first_row * features), u64(each))
        numbers = (u32(place), u32(least), f32(factor))
        self.executor.each("dropout_bf16", -(-x.size // 4), Out(y), x, noise, *sizes, *numbers)

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
        y = run.empty((rows, width // 3), self.dtype)
        logs = run.empty((batch, heads, rows // batch), np.float32)
        self.attend(y, logs, packed, by_distance)

        def backward(dy: Array) -> None:
            dqkv = packed.room(self.dtype)
            self.attention_slope(dqkv, _on_device(dy), y, logs, packed, by_distance)
            qkv.accumulate(_as_data(dqkv))

        return tape.record(_as_data(y), backward)

    def attend(self, y: DeviceArray, logs: DeviceArray, qkv: DeviceArray, bias: DeviceArray) -> None:
        """Write attention to `y`, and the log-sums of its rows to `logs`, (batch, heads, T)."""
        by = choose_attention(self.executor.architecture, logs.shape[2])
        depth, grid, sizes = _attention_sizes(by.tile[0], logs, qkv, bias)
        self.executor.launch(f"{by.prefix}_{depth}", grid, Out(y), Out(logs), qkv, bias, *sizes)

    def attention_slope(
        self,
        dqkv: DeviceArray,
        dy: DeviceArray,
        y: DeviceArray,
        logs: DeviceArray,
        qkv: DeviceArray,
        bias: DeviceArray,
    ) -> None:
        """Write the gradient of `qkv`, given what `attend` was given and wrote."""
        run, delta, rows = self.executor, logs.room(np.float32), len(qkv)
        by = choose_attention(run.architecture, logs.shape[2])
        depth, grid, sizes = _attention_sizes(by.tile[0], logs, qkv, bias)
        heads, warps = logs.shape[1], BY_NAME[f"attention_delta_{depth}"].block // 32
        numbers = (i32(logs.shape[2]), i32(heads), i32(rows))
        run.launch(f"attention_delta_{depth}", -(-rows * heads // warps), Out(delta), dy, y, *numbers)
        given: tuple[Argument, ...] = (dy, logs, delta, qkv, bias, *sizes)
        for name in ("keys", "queries"):
            run.launch(f"{by.prefix}_{name}_grad_{depth}", grid, Out(dqkv), *given)


def _attention_sizes(
    tile: int, logs: DeviceArray, qkv: DeviceArray, bias: DeviceArray
) -> tuple[int, tuple[int, int], tuple[np.int32, ...]]:
    """Return the features of a head, the grid, and the numbers that the kernels are given."""
    batch, heads, length = logs.shape
    tiles = -(-length // tile)
    sizes = (i32(length), i32(heads), i32(heads), i32(bias.shape[1]))
    return qkv.shape[1] // (3 * heads), (tiles, batch * heads), sizes
