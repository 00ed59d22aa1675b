"""The kernels of the table as numpy functions for modelled devices, checked beside the interpreter.

`by_numpy` and `by_interpreter` run a launch of the model. Nothing but tests selects either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from support.devices.cuda_model_launches import KernelValue, ModelLaunch, TiledValue
from zbmd.tools.lab import ptx
from zbmd.training import ops
from zbmd.training.autograd.rng import Noise, random_words
from zbmd.training.autograd.tape import Tape, Tensor
from zbmd.training.ops import fp8
from zbmd.training.ops.cuda.operators import ACTIVATIONS
from zbmd.training.optim.clip import squared_as_kernel
from zbmd.transport.cuda.api import ModuleImage

Array = npt.NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
KINDS: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "bf16": BF16}


def nothing_compiled(source: str, architecture: str) -> ModuleImage:
    """Return a module without code: `by_numpy` needs none."""
    return ModuleImage(name=source, ptx="", cubin=b"")


def by_interpreter(launch: ModelLaunch) -> None:
    """Run the compiled PTX of a launch."""
    given: list[Any] = []
    for value, writes in zip(launch.arguments, launch.written, strict=True):
        if isinstance(value, np.ndarray):
            given.append(ptx.Buffer(value, writable=writes))
        elif isinstance(value, TiledValue):
            given.append(ptx.Tiles(ptx.Buffer(value.data, writable=False), value.layout))
        else:
            given.append(0 if value is None else _number(value))
    kernel = _parsed(launch.kernel.image.ptx)[launch.kernel.name]
    ptx.launch(kernel, grid=launch.grid, block=launch.block, arguments=given, shared=launch.shared_bytes)


_PARSED: dict[str, dict[str, ptx.Kernel]] = {}


def _parsed(text: str) -> dict[str, ptx.Kernel]:
    if text not in _PARSED:
        _PARSED[text] = ptx.parse(text)
    return _PARSED[text]


def _number(value: np.number[Any]) -> int | float:
    return float(value) if isinstance(value, np.floating) else int(value)


def by_numpy(launch: ModelLaunch) -> None:
    """Run what the kernel of that name does, in numpy."""
    name, _, kind = launch.kernel.name.rpartition("_")
    whole = launch.kernel.name
    with np.errstate(all="ignore"):
        if whole.startswith("cast_"):
            source, into = (KINDS[one] for one in whole.split("_")[1:])
            _view(launch, 0, into)[:] = _view(launch, 1, source)
        elif whole == "sum_runs":
            _view(launch, 0)[:] = _rows(_view(launch, 1), launch.arguments[3]).sum(axis=0)
        elif whole == "state_sums":
            _state_sums(launch)
        elif whole == "cache_rows":
            _cache_rows(launch)
        elif whole == "attention_cached":
            _attention_cached(launch)
        elif whole.startswith("attention"):
            _attention(name.replace("_wgmma", ""), int(kind), launch)
        elif name in ("fp8_blocks", "fp8_of_rows"):
            _multiply_blocks(1 if name == "fp8_of_rows" else fp8.BLOCK, KINDS[kind], launch)
        elif name.startswith(("fp8_rows", "fp8_tiles")):
            _quantise_blocks(name, KINDS[kind], launch)
        elif name.startswith(("matmul_", "wgmma_", "tma_")):
            _multiply(name.split("_")[1], KINDS[kind], launch)
        else:
            _BY_NAME[name](launch, KINDS[kind])


def _view(launch: ModelLaunch, number: int, dtype: Any = np.float32) -> Array:
    value = launch.arguments[number]
    value = value.data if isinstance(value, TiledValue) else value
    assert isinstance(value, np.ndarray)
    return value.view(dtype)


def _rows(flat: Array, columns: KernelValue) -> Array:
    return flat.reshape(-1, int(columns))  # type: ignore[arg-type]


def _wide(values: Array) -> npt.NDArray[np.float32]:
    return values.astype(np.float32)


def _multiply(form: str, kind: np.dtype[Any], launch: ModelLaunch) -> None:
    a, b = _wide(_view(launch, 1, BF16)), _wide(_view(launch, 2, BF16))
    m, n, k = (int(one) for one in launch.arguments[3:6])  # type: ignore[arg-type]
    left = a.reshape(k, m).T if form[0] == "t" else a.reshape(m, k)
    right = b.reshape(n, k).T if form[1] == "t" else b.reshape(k, n)
    _finish(left @ right * np.float32(launch.arguments[9]), 6, kind, launch)  # type: ignore[arg-type]


def _finish(c: Array, bias: int, kind: np.dtype[Any], launch: ModelLaunch) -> None:
    """Write a product after its epilogue; bias: the number of its first argument."""
    residual, before = bias + 1, bias + 2
    if launch.arguments[bias] is not None:
        c = c + _view(launch, bias)
    if launch.arguments[before] is not None:
        _view(launch, before, BF16)[:] = c.reshape(-1).astype(BF16)
    name = ACTIVATIONS[int(launch.arguments[-1])]  # type: ignore[arg-type]
    if name.endswith("_grad"):
        c = _sloped(name, c, _wide(_view(launch, residual, BF16)).reshape(c.shape))
    elif name:
        c = getattr(ops, name)(Tape(np), Tensor(c)).data
    if launch.arguments[residual] is not None and not name.endswith("_grad"):
        c = c + _wide(_view(launch, residual, BF16)).reshape(c.shape)
    _view(launch, 0, kind)[:] = c.reshape(-1).astype(kind)


def _quantise_blocks(name: str, kind: np.dtype[Any], launch: ModelLaunch) -> None:
    x = _rows(_view(launch, 2, kind), launch.arguments[4])
    values, rows = x.T if name.endswith("turned") else x, fp8.BLOCK if "tiles" in name else 1
    q, scales = fp8.quantised_blocks(values, rows)
    _view(launch, 0, q.dtype)[:] = q.reshape(-1)
    _view(launch, 1)[:] = scales.reshape(-1)


def _multiply_blocks(rows: int, kind: np.dtype[Any], launch: ModelLaunch) -> None:
    m, n, k = (int(one) for one in launch.arguments[3:6])  # type: ignore[arg-type]
    found = list[Array]()
    for number, outers, each in ((1, m, 1), (2, n, rows)):
        q = _view(launch, number, fp8.Format.E4M3.dtype).reshape(outers, k).astype(np.float32)
        scales = _view(launch, number + 5).reshape(-(-outers // each), -1)
        found.append(q / fp8.spread(scales, each, q.shape))
    _finish(found[0] @ found[1].T, 8, kind, launch)


def _embedding(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
    table = _rows(_view(launch, 1, kind), launch.arguments[4])
    _view(launch, 0, kind)[:] = table[_view(launch, 2, np.int64)].reshape(-1)


def _embedding_grad(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
    out, dy = _rows(_view(launch, 0), launch.arguments[4]), _rows(_view(launch, 1, kind), launch.arguments[4])
    order, starts = (_view(launch, number, np.int32) for number in (2, 3))
    for token, (first, last) in enumerate(pairwise(starts)):
        total = np.zeros(dy.shape[1], np.float32)
        for row in order[first:last]:
            total += _wide(dy[row])
        out[token] = total


def _cross_entropy(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
    logits = _rows(_view(launch, 0, kind), launch.arguments[4])
    values, targets = _wide(logits), _view(launch, 2, np.int64)
    most = values.max(axis=1, keepdims=True)
    logs = (most + np.log(np.exp(values - most).sum(axis=1, keepdims=True)))[:, 0]
    rows = np.arange(len(targets))
    _view(launch, 1)[:] = logs - values[rows, targets]
    share = np.exp(values - logs[:, None])
    share[rows, targets] -= 1
    logits[:] = (share * _view(launch, 3)[0]).astype(kind)


def _part_sums(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
    values, places = _wide(_rows(_view(launch, 1, kind), launch.arguments[3])), _view(launch, 2, np.int64)
    most, rows = values.max(axis=1, keepdims=True), np.arange(len(values))
    logs, picked = _view(launch, 0).reshape(2, -1)
    logs[:] = most[:, 0] + np.log(np.exp(values - most).sum(axis=1))
    picked[:] = np.where(places >= 0, values[rows, places], 0.0)


def _part_slopes(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
    logits, places = _rows(_view(launch, 0, kind), launch.arguments[4]), _view(launch, 2, np.int64)
    share = np.exp(_wide(logits) - _view(launch, 1)[:, None])
    own = np.flatnonzero(places >= 0)
    share[own, places[own]] -= 1
    logits[:] = (share * launch.arguments[3]).astype(kind)


def _norm(centred: bool) -> Callable[[ModelLaunch, np.dtype[Any]], None]:
    def run(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
        features, epsilon, other, _ = launch.arguments[-4:]
        x = _wide(_rows(_view(launch, 2, kind), features))
        if other is not None:
            total = _rows(_view(launch, -1, kind), features)
            total[:] = (x + _wide(_rows(_view(launch, -2, kind), features))).astype(kind)
            x = _wide(total)
        mean = x.mean(axis=1) if centred else np.zeros(len(x), np.float32)
        square = ((x - mean[:, None]) ** 2).mean(axis=1)
        inverse = np.float32(1) / np.sqrt(square + epsilon)
        y = (x - mean[:, None]) * inverse[:, None] * _view(launch, 3)
        y = y + _view(launch, 4) if centred else y
        _view(launch, 0, kind)[:] = y.astype(kind).reshape(-1)
        _view(launch, 1).reshape(-1, 2)[:] = np.stack([mean, inverse], axis=1)

    return run


def _unit(x: Array, statistics: Array) -> Array:
    mean, inverse = statistics.reshape(-1, 2).T
    unit: Array = (_wide(x) - mean[:, None]) * inverse[:, None]
    return unit


def _norm_grad(centred: bool) -> Callable[[ModelLaunch, np.dtype[Any]], None]:
    def run(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
        features, statistics = launch.arguments[5], _view(launch, 3)
        unit = _unit(_rows(_view(launch, 2, kind), features), statistics)
        slope = _wide(_rows(_view(launch, 1, kind), features)) * _view(launch, 4)
        dx = slope - unit * (slope * unit).mean(axis=1, keepdims=True)
        dx = dx - slope.mean(axis=1, keepdims=True) if centred else dx
        dx = dx * statistics.reshape(-1, 2)[:, 1:]
        if launch.arguments[6] is not None:
            dx = dx + _wide(_rows(_view(launch, 6, kind), features))
        _view(launch, 0, kind)[:] = dx.astype(kind).reshape(-1)

    return run


def _norm_gain_grad(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
    features, run = launch.arguments[6:8]
    dy = _wide(_rows(_view(launch, 2, kind), features))
    unit = _unit(_rows(_view(launch, 3, kind), features), _view(launch, 4))
    for number, found in ((0, dy * unit), (1, dy)):
        if launch.arguments[number] is not None:
            _view(launch, number)[:] = _by_runs(found, int(run)).reshape(-1)  # type: ignore[arg-type]


def _column_sums(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
    columns, run = launch.arguments[3:]
    values = _wide(_rows(_view(launch, 1, kind), columns))
    _view(launch, 0)[:] = _by_runs(values, int(run)).reshape(-1)  # type: ignore[arg-type]


def _by_runs(values: Array, run: int) -> Array:
    return np.stack([values[at : at + run].sum(axis=0) for at in range(0, len(values), run)])


def _activation(name: str) -> Callable[[ModelLaunch, np.dtype[Any]], None]:
    def run(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
        y = getattr(ops, name)(Tape(np), Tensor(_wide(_view(launch, 1, kind)))).data
        _view(launch, 0, kind)[:] = y.astype(kind)

    return run


def _activation_grad(name: str) -> Callable[[ModelLaunch, np.dtype[Any]], None]:
    def run(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
        dy, x = _wide(_view(launch, 0, kind)), _wide(_view(launch, 1, kind))
        _view(launch, 0, kind)[:] = _sloped(name, dy, x).astype(kind)

    return run


def _sloped(name: str, dy: Array, x: Array) -> Array:
    """Return the gradient of an activation's input, given that of its output."""
    tape, source = Tape(np), Tensor(x)
    tape.play(getattr(ops, name.removesuffix("_grad"))(tape, source), dy)
    assert source.grad is not None
    return source.grad


def _add(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
    y = _wide(_view(launch, 1, kind)) + _wide(_view(launch, 2, kind))
    _view(launch, 0, kind)[:] = y.astype(kind)


def _add_bias(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
    y = _wide(_rows(_view(launch, 1, kind), launch.arguments[4])) + _view(launch, 2)
    _view(launch, 0, kind)[:] = y.astype(kind).reshape(-1)


def _dropout(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
    n, start, each, site, least = (int(one) for one in launch.arguments[3:8])  # type: ignore[arg-type]
    seed, step, *samples = _view(launch, 2, np.int64).tolist()
    noise = Noise(seed, step, np.array(samples))
    words = random_words(noise, site & 0xFFFFFF, each).reshape(-1)[start : start + n]
    kept, factor = (words >= least).astype(np.float32), np.float32(launch.arguments[8])  # type: ignore[arg-type]
    _view(launch, 0, kind)[:] = (_wide(_view(launch, 1, kind)) * kept * factor).astype(kind)


def _block_squares(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
    values, squares = _wide(_view(launch, 1, kind)), _view(launch, 0)
    for number in range(len(squares)):
        squares[number] = squared_as_kernel(values[number * 16384 : (number + 1) * 16384])


def _state_sums(launch: ModelLaunch) -> None:
    sums, words = _view(launch, 0, np.dtype(np.uint64)), _view(launch, 1, np.dtype(np.uint32))
    first = int(launch.arguments[2])  # type: ignore[call-overload]
    for number in range(len(sums)):
        begin = number * 16384
        sums[number] = place_sum(words[begin : begin + 16384], first + begin)


def place_sum(words: Array, first: int) -> int:
    """Return the sum of words, each times the odd number of its place."""
    place = np.arange(first + 1, first + 1 + len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    place = (place ^ place >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    return int(
        (words.astype(np.uint64) * (place ^ place >> np.uint64(32) | np.uint64(1))).sum(dtype=np.uint64)
    )


SPAN = np.dtype([("start", "i8"), ("stop", "i8"), ("keep", "f4"), ("unused", "f4")])


def _spans(launch: ModelLaunch) -> list[tuple[slice, np.float32]]:
    return [(slice(one["start"], one["stop"]), one["keep"]) for one in _view(launch, -2, SPAN)]


def _moved(launch: ModelLaunch, span: slice, keep: np.float32, narrow: int, move: Array) -> None:
    weights = _view(launch, narrow + 1)[span] * keep - move
    _view(launch, 0)[span] = weights
    if launch.arguments[narrow] is not None:
        _view(launch, narrow, BF16)[span] = weights.astype(BF16)


def _adamw(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
    beta1, beta2, rest1, rest2, grad_scale, step_size, epsilon = _view(launch, -1)
    for span, keep in _spans(launch):
        slope = _wide(_view(launch, 7, kind)[span]) * grad_scale
        mean = _view(launch, 5)[span] * beta1 + slope * rest1
        square = _view(launch, 6)[span] * beta2 + slope * slope * rest2
        _view(launch, 1)[span], _view(launch, 2)[span] = mean, square
        _moved(launch, span, keep, 3, mean / (np.sqrt(square) + epsilon) * step_size)


def _one_moment(name: str) -> Callable[[ModelLaunch, np.dtype[Any]], None]:
    def run(launch: ModelLaunch, kind: np.dtype[Any]) -> None:
        beta1, beta2, rest1, rest2, grad_scale, rate = _view(launch, -1)
        for span, keep in _spans(launch):
            slope, before = _wide(_view(launch, 5, kind)[span]) * grad_scale, _view(launch, 4)[span].copy()
            if name == "lion":
                move, mean = np.sign(before * beta1 + slope * rest1), before * beta2 + slope * rest2
            else:
                mean = before * beta1 + slope
                move = slope + mean * beta1 if name == "nesterov" else mean
            _view(launch, 1)[span] = mean
            _moved(launch, span, keep, 2, move * rate)

    return run


def _cache_rows(launch: ModelLaunch) -> None:
    heads, depth, context, known = (int(one) for one in launch.arguments[3:])  # type: ignore[arg-type]
    packed = _view(launch, 2, BF16).reshape(-1, 3, heads, depth).transpose(1, 2, 0, 3)
    for number in (0, 1):
        room = _view(launch, number, BF16).reshape(heads, context, depth)
        room[:, known : known + packed.shape[2]] = packed[number + 1]


def _attention_cached(launch: ModelLaunch) -> None:
    heads, depth, context, known = (int(one) for one in launch.arguments[5:])  # type: ignore[arg-type]
    q = _wide(_view(launch, 1, BF16)).reshape(-1, 3, heads, depth)[:, 0].swapaxes(0, 1)
    stop = known + q.shape[1]
    keys, values = (_wide(_view(launch, at, BF16)).reshape(heads, context, depth)[:, :stop] for at in (2, 3))
    back = np.arange(known, stop)[:, None] - np.arange(stop)
    bias = _view(launch, 4).reshape(heads, context)[:, np.abs(back)]
    scores = np.where(back < 0, -np.inf, q @ keys.swapaxes(-1, -2) / math.sqrt(depth) + bias)
    odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
    y = odds @ values / odds.sum(axis=-1, keepdims=True)
    _view(launch, 0, BF16)[:] = y.swapaxes(0, 1).reshape(-1).astype(BF16)


def _attention(name: str, depth: int, launch: ModelLaunch) -> None:
    if name == "attention_delta":
        length, heads = (int(one) for one in launch.arguments[3:5])  # type: ignore[arg-type]
        along = _wide(_view(launch, 1, BF16)) * _wide(_view(launch, 2, BF16))
        delta = along.reshape(-1, length, heads, depth).sum(axis=3).transpose(0, 2, 1)
        _view(launch, 0)[:] = delta.reshape(-1)
        return
    length, heads, kv_heads, reach = (int(one) for one in launch.arguments[-4:])  # type: ignore[arg-type]
    bias, packed = _view(launch, -5).reshape(heads, reach), _view(launch, -6, BF16)
    qkv = _wide(packed).reshape(-1, length, heads + 2 * kv_heads, depth).transpose(2, 0, 1, 3)
    group = heads // kv_heads
    q, k, v = (
        qkv[:heads],
        *(np.repeat(one, group, axis=0) for one in (qkv[heads : heads + kv_heads], qkv[heads + kv_heads :])),
    )
    place = np.arange(length)
    far = place[:, None] - place
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(depth) + bias[:, None][:, :, np.abs(far)]
    scores[..., far < 0] = -np.inf
    if name == "attention":
        most = scores.max(axis=-1, keepdims=True)
        logs = most[..., 0] + np.log(np.exp(scores - most).sum(axis=-1))
        y = np.exp(scores - logs[..., None]) @ v
        _view(launch, 0, BF16)[:] = y.transpose(1, 2, 0, 3).reshape(-1).astype(BF16)
        _view(launch, 1)[:] = logs.transpose(1, 0, 2).reshape(-1)
        return
    dy = _wide(_view(launch, 1, BF16)).reshape(-1, length, heads, depth).transpose(2, 0, 1, 3)
    logs, delta = (_view(launch, at).reshape(-1, heads, length).transpose(1, 0, 2) for at in (2, 3))
    p = np.exp(scores - logs[..., None])
    dscores = p * (dy @ v.swapaxes(-1, -2) - delta[..., None])
    out = _view(launch, 0, BF16).reshape(-1, length, heads + 2 * kv_heads, depth)
    if name == "attention_queries_grad":
        out[:, :, :heads] = (dscores @ k / math.sqrt(depth)).transpose(1, 2, 0, 3).astype(BF16)
        return
    dk, dv = dscores.swapaxes(-1, -2) @ q / math.sqrt(depth), p.swapaxes(-1, -2) @ dy
    for at, found in ((heads, dk), (heads + kv_heads, dv)):
        summed = found.reshape(kv_heads, group, *found.shape[1:]).sum(axis=1)
        out[:, :, at : at + kv_heads] = summed.transpose(1, 2, 0, 3).astype(BF16)


_BY_NAME: dict[str, Callable[[ModelLaunch, np.dtype[Any]], None]] = {
    "embedding": _embedding,
    "embedding_grad": _embedding_grad,
    "cross_entropy": _cross_entropy,
    "part_sums": _part_sums,
    "part_slopes": _part_slopes,
    "rms_norm": _norm(False),
    "layer_norm": _norm(True),
    "rms_norm_grad": _norm_grad(False),
    "layer_norm_grad": _norm_grad(True),
    "norm_gain_grad": _norm_gain_grad,
    "column_sums": _column_sums,
    "gelu": _activation("gelu"),
    "gelu_grad": _activation_grad("gelu"),
    "squared_relu": _activation("squared_relu"),
    "squared_relu_grad": _activation_grad("squared_relu"),
    "add": _add,
    "add_bias": _add_bias,
    "dropout": _dropout,
    "block_squares": _block_squares,
    "adamw": _adamw,
    **{name: _one_moment(name) for name in ("sgd", "nesterov", "lion")},
}
