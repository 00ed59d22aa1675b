"""Kernels of rows, elements, losses and optimizers, run from their PTX, beside the engine's own ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.devices.kernel_runs import close, empty, fixed, run, same, wide

from zbmd.training import ops
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.autograd.rng import Noise, Purpose
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.native._kernels import state_sum
from zbmd.training.ops.cuda.operators import noise_numbers, rows_by_token
from zbmd.training.optim.clip import NORM_BLOCK, clip_scale, global_norm, squared_as_kernel
from zbmd.training.optim.elementwise import (
    SGD,
    AdamW,
    AdamWConfig,
    AdamWState,
    Lion,
    LionConfig,
    SGDConfig,
    update_blocks,
)

Array = npt.NDArray[Any]
BOTH = pytest.mark.parametrize("kind", ["f32", "bf16"])


def _values(
    shape: tuple[int, ...] | int, kind: str = "f32", *, seed: int = 0, special: bool = False
) -> Array:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if special:
        values.reshape(-1)[[1, 5, 9]] = np.nan, np.inf, -np.inf
    return fixed(values, kind)


def _differentiate(
    op: Callable[[Tape, Tensor, list[Parameter]], Tensor], x: Array, parameters: list[Array], dy: Array
) -> tuple[Array, Array, list[Array]]:
    """Return an op's result, the gradient of x, and those of the parameters."""
    tape, leaf = Tape(np), Tensor(wide(x))
    leaves = [Parameter(p.copy(), np.zeros_like(p), i, None) for i, p in enumerate(parameters)]
    y = op(tape, leaf, leaves)
    weighted = tape.record(np.asarray((y.data * wide(dy)).sum()), lambda g: y.accumulate(wide(dy) * g))
    tape.backward(weighted)
    assert leaf.grad is not None
    return y.data, leaf.grad, [np.asarray(one.grad) for one in leaves]


@BOTH
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("rows", "features"), [(3, 7), (2, 300), (21, 64)])
def test_norms(kind: str, centred: bool, rows: int, features: int) -> None:
    x, dy = _values((rows, features), kind, seed=1), _values((rows, features), kind, seed=2)
    parameters = [1 + 0.1 * _values(features, seed=3), _values(features, seed=4)][: 1 + centred]
    name, op = ("layer_norm", ops.layer_norm) if centred else ("rms_norm", ops.rms_norm)
    expected, dx_expected, grads = _differentiate(lambda t, x, p: op(t, x, *p), x, parameters, dy)  # type: ignore[operator]
    y, statistics, dx = empty(x.shape, kind), empty((rows, 2)), empty(x.shape, kind)
    sizes = (features, ops.EPSILON)
    run(f"{name}_{kind}", rows, [y, statistics], x, *map(fixed, parameters), *sizes, None, None)
    close(y, expected, kind)
    gain = fixed(parameters[0])
    run(f"{name}_grad_{kind}", rows, [dx], dy, x, fixed(statistics), gain, features, None)
    close(dx, dx_expected, kind, ulps=16)
    run_rows = 8
    runs = -(-rows // run_rows)
    partial = [empty((runs, features)), empty((runs, features))]
    outputs = partial if centred else partial[:1]
    others = [] if centred else [None]
    grid = (-(-features // 32), runs)
    run(f"norm_gain_grad_{kind}", grid, outputs, *others, dy, x, fixed(statistics), rows, features, run_rows)
    for one, grad in zip(outputs, grads, strict=True):
        total = empty(features)
        run("sum_runs", -(-features // 256), [total], fixed(one), runs, features)
        close(total, grad, "f32", ulps=64)


@BOTH
@pytest.mark.parametrize("name", ["gelu", "squared_relu"])
def test_activations(kind: str, name: str) -> None:
    x, dy = _values(999, kind, seed=1, special=True), _values(999, kind, seed=2)
    y, dx = empty(999, kind), np.array(dy)
    with np.errstate(all="ignore"):
        expected, dx_expected, _ = _differentiate(lambda t, x, _: getattr(ops, name)(t, x), x, [], dy)
    run(f"{name}_{kind}", 2, [y], x, 999)
    run(f"{name}_grad_{kind}", 2, [], dx, x, 999)
    finite = np.isfinite(wide(x))
    close(y[finite], expected[finite], kind)
    close(dx[finite], dx_expected[finite], kind)
    special = [1, 5, 9]  # NaN, inf, -inf: GELU of the last is NaN, as in PyTorch
    same(y[special], expected.astype(y.dtype)[special])
    same(dx[special], dx_expected.astype(dx.dtype)[special])


@BOTH
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(("rows", "features"), [(3, 7), (2, 300)])
def test_a_sum_and_its_norm_have_the_bits_of_two_kernels(
    kind: str, name: str, rows: int, features: int
) -> None:
    """The gradient of a norm plus another one is rounded once."""
    x, other, dy = (_values((rows, features), kind, seed=seed) for seed in (1, 2, 3))
    parameters = [fixed(1 + 0.1 * _values(features, seed=4)), fixed(_values(features, seed=5))]
    given = (*parameters[: 1 + (name == "layer_norm")], features, ops.EPSILON)
    apart, apart_rows, total, y, statistics = (
        empty(shape, one)
        for shape, one in (
            (x.shape, kind),
            ((rows, 2), "f32"),
            (x.shape, kind),
            (x.shape, kind),
            ((rows, 2), "f32"),
        )
    )
    expected = fixed(wide(x) + wide(other), kind)
    run(f"{name}_{kind}", rows, [apart, apart_rows], expected, *given, None, None)
    run(f"{name}_{kind}", rows, [y, statistics], x, *given, other, total)
    for found, wanted in ((total, expected), (y, apart), (statistics, apart_rows)):
        same(found, wanted)
    dx_apart, dx = empty(x.shape), empty(x.shape, kind)
    slope = (fixed(wide(dy)), fixed(wide(expected)), fixed(statistics), parameters[0], features)
    run(f"{name}_grad_f32", rows, [dx_apart], *slope, None)
    run(f"{name}_grad_{kind}", rows, [dx], dy, expected, *slope[2:], other)
    close(
        dx, dx_apart + wide(other), kind, ulps=1
    )  # a multiplication and the addition may be one instruction


@BOTH
def test_sums_and_casts(kind: str) -> None:
    a, b, bias = _values((7, 45), kind, seed=1, special=True), _values((7, 45), kind, seed=2), _values(45)
    y = empty(a.shape, kind)
    run(f"add_{kind}", 1, [y], a, b, a.size)
    same(y, (wide(a) + wide(b)).astype(y.dtype))
    run(f"add_bias_{kind}", 3, [y], a, bias, a.size, 45)
    same(y, (wide(a) + bias).astype(y.dtype))
    into, result = ("bf16", empty(a.shape, "bf16")) if kind == "f32" else ("f32", empty(a.shape))
    run(f"cast_{kind}_{into}", 2, [result], a, a.size)
    same(result, a.astype(result.dtype))


@BOTH
@pytest.mark.parametrize(("first_row", "rows"), [(0, None), (1, 10)])
def test_dropout_draws_the_bits_of_the_cpu(kind: str, first_row: int, rows: int | None) -> None:
    noise = Noise(seed=2**40 + 7, step=3, samples=np.array([5, 2**33 + 1]))
    count, features = (10, 33) if rows is None else (6, 33)
    x, y = _values((count, features), kind, seed=1), empty((count, features), kind)
    expected = ops.dropout(
        *(Tape(np), Tensor(wide(x))), rate=0.3, noise=noise, site=9, first_row=first_row, rows=rows
    ).data
    each, least = (rows or count) // 2 * features, int(0.3 * 2**32)
    site = (int(Purpose.DROPOUT) << 24) | 9
    numbers = (x.size, first_row * features, each, site, least, 1.0 / 0.7)
    run(f"dropout_{kind}", 1, [y], x, fixed(noise_numbers(noise), "i8"), *numbers)
    same(y, expected.astype(y.dtype))


@BOTH
@pytest.mark.parametrize(("rows", "classes"), [(3, 5), (2, 300), (1, 257)])
def test_cross_entropy_overwrites_logits_by_their_gradient(kind: str, rows: int, classes: int) -> None:
    logits = np.array(_values((rows, classes), kind, seed=1) * 4).astype(_values(1, kind).dtype)
    targets = fixed(np.random.default_rng(2).integers(0, classes, rows), "i8")
    weight = 1.0 / rows
    tape, leaf = Tape(np), Tensor(wide(logits))
    loss = ops.cross_entropy(tape, leaf, targets, weight=weight)
    tape.backward(loss)
    losses = empty(rows)
    _run_loss(kind, logits, losses, targets, weight)
    close(np.asarray(losses.astype(np.float64).sum() * weight), loss.data, "f32")
    assert leaf.grad is not None
    close(logits, leaf.grad, kind)


def _run_loss(kind: str, logits: Array, losses: Array, targets: Array, weight: float) -> None:
    run(f"cross_entropy_{kind}", len(logits), [], logits, losses, targets, fixed([weight]), logits.shape[1])


@BOTH
def test_classes_that_two_ranks_divide_have_the_loss_of_all(kind: str) -> None:
    logits = np.array(_values((5, 72), kind, seed=1) * 4).astype(_values(1, kind).dtype)
    targets, weight = np.array([0, 40, 71, 39, 8]), 0.2
    tape, leaf = Tape(np), Tensor(wide(logits))
    loss = ops.cross_entropy(tape, leaf, targets, weight=weight)
    tape.backward(loss)
    halves = [np.ascontiguousarray(one) for one in (logits[:, :40], logits[:, 40:])]
    places = [fixed(np.where(targets < 40, targets, -1), "i8"), fixed(np.maximum(targets - 40, -1), "i8")]
    sums = [empty((2, 5)) for _ in halves]
    for out, half, at in zip(sums, halves, places, strict=True):
        run(f"part_sums_{kind}", 5, [out], fixed(half.copy(), kind), at, half.shape[1])
    logs, picked = np.logaddexp(sums[0][0], sums[1][0]), sums[0][1] + sums[1][1]
    close(np.asarray((logs - picked).sum() * weight), loss.data, "f32")
    for half, at in zip(halves, places, strict=True):
        run(f"part_slopes_{kind}", 5, [], half, fixed(logs), at, weight, half.shape[1])
    assert leaf.grad is not None
    close(np.concatenate(halves, axis=1), leaf.grad, kind)


def test_a_loss_without_a_number_stays_so() -> None:
    """NaN in a row, and a target that is no class."""
    logits, losses = np.zeros((3, 40), np.float32), np.zeros(3, np.float32)
    logits[0, 3] = np.nan
    _run_loss("f32", logits, losses, fixed([1, 40, 2], "i8"), 1.0)
    assert np.isnan(losses).tolist() == [True, True, False]
    assert np.isnan(logits).all(axis=1).tolist() == [True, True, False]


@BOTH
def test_embedding(kind: str) -> None:
    vocabulary, features = 11, 37
    tokens = np.array([3, 7, 3, 0, 3, 10, 7])
    table, dy = _values((vocabulary, features), kind, seed=1), _values((len(tokens), features), kind, seed=2)
    y, grad = empty((len(tokens), features), kind), empty((vocabulary, features))
    run(f"embedding_{kind}", len(tokens), [y], table, fixed(tokens, "i8"), vocabulary, features)
    same(y, table[tokens])
    sorted_rows = [fixed(one, "i4") for one in rows_by_token(tokens, vocabulary)]
    run(f"embedding_grad_{kind}", vocabulary, [grad], dy, *sorted_rows, features)
    table_grad = np.zeros((vocabulary, features), np.float32)
    parameter = Parameter(wide(table), table_grad, 0, None)
    tape = Tape(np)
    result = ops.embedding(tape, tokens, parameter)
    tape.backward(tape.record(np.asarray(0.0), lambda _: result.accumulate(wide(dy))))
    same(grad, table_grad)  # rows are added in their order


def _span_table(blocks: list[tuple[slice, bool]], decay: float) -> Array:
    spans = np.zeros(len(blocks), [("start", "i8"), ("stop", "i8"), ("keep", "f4"), ("unused", "f4")])
    for span, (place, decayed) in zip(spans, blocks, strict=True):
        span["start"], span["stop"], span["keep"] = place.start, place.stop, 1.0 - decay if decayed else 1.0
    return spans.view(np.uint8)


@BOTH
@pytest.mark.parametrize("name", ["adamw", "sgd", "nesterov", "lion"])
@pytest.mark.parametrize("in_place", [False, True])
def test_optimizers_have_the_bits_of_the_cpu(kind: str, name: str, in_place: bool) -> None:
    layout = ParameterLayout.of({"a": (10, 31), "b": (320,), "c": (8, 10)})
    size, rate, scale, step = layout.size, 0.01, 0.5, 2
    arrays = [np.array(_values(size, seed=n)) for n in range(3)]
    arrays[2] = arrays[2] ** 2
    grads = _values(size, kind, seed=5, special=True)
    old = AdamWState(*arrays)
    new = AdamWState(*(np.zeros(size, np.float32) for _ in range(3)))
    config: Any = {
        "adamw": AdamWConfig(),
        "sgd": SGDConfig(weight_decay=0.1),
        "nesterov": SGDConfig(nesterov=True, weight_decay=0.1),
        "lion": LionConfig(),
    }[name]
    optimizer: Any = {"adamw": AdamW, "sgd": SGD, "nesterov": SGD, "lion": Lion}[name]
    with np.errstate(all="ignore"):
        optimizer(config, layout).update(
            old, new, wide(grads), step=step, learning_rate=rate, grad_scale=scale
        )
    beta1, beta2 = getattr(config, "beta1", getattr(config, "momentum", 0)), getattr(config, "beta2", 0.0)
    numbers = [beta1, beta2, 1.0 - beta1, 1.0 - beta2, scale]
    if name == "adamw":
        corrections = 1.0 - beta1 ** (step + 1), 1.0 - beta2 ** (step + 1)
        root = corrections[1] ** 0.5
        numbers += [rate * root / corrections[0], config.epsilon * root]
    else:
        numbers += [rate]
    moments = 3 if name == "adamw" else 2
    before = [np.array(one) for one in arrays[:moments]]
    after = before if in_place else [np.zeros(size, np.float32) for _ in range(moments)]
    narrow = empty(size, "bf16")
    spans = fixed(_span_table(update_blocks(layout), rate * config.weight_decay), "u1")
    _update(name, kind, after, narrow, before, grads, spans, numbers)
    for found, expected in zip(after, (new.weights, new.mean, new.square), strict=False):
        same(found, expected)
    same(narrow, new.weights.astype(narrow.dtype))


def _update(
    name: str,
    kind: str,
    after: list[Array],
    narrow: Array,
    before: list[Array],
    grads: Array,
    spans: Array,
    numbers: list[float],
) -> None:
    run(f"{name}_{kind}", len(spans) // 24, [], *after, narrow, *before, grads, spans, fixed(numbers))


@BOTH
def test_the_norm_is_summed_in_blocks(kind: str) -> None:
    grads = _values(2 * NORM_BLOCK + 77, kind, seed=3)
    squares, out = empty(3), empty(2)
    run(f"block_squares_{kind}", 3, [squares], grads, grads.size)
    run("norm_and_clip", 1, [out], fixed(squares), 3, 2.5)
    if kind == "bf16":
        blocks = np.split(wide(grads), [NORM_BLOCK, 2 * NORM_BLOCK])
        assert squares.tolist() == [squared_as_kernel(block) for block in blocks]
    norm = global_norm(wide(grads), xp=np)
    close(out, np.array([norm, clip_scale(norm, limit=2.5)]), "f32")
    for bad in (np.nan, np.inf):
        run("norm_and_clip", 1, [out], fixed([1.0, bad, 2.0]), 3, 2.5)
        assert not np.isfinite(out[0])


def test_the_sums_of_a_state_are_those_of_the_host() -> None:
    """Blocks of which the last is ragged, in an array behind another one."""
    words = np.random.default_rng(4).integers(0, 1 << 32, 16_384 + 77, dtype=np.uint32)
    sums = np.zeros(2, np.uint64)
    run("state_sums", 2, [sums], words, 5, len(words))
    assert sums.tolist() == [state_sum(words[:16_384], 5), state_sum(words[16_384:], 5 + 16_384)]
