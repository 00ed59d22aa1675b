"""Kernels for sm_90a on a GPU: tensor maps, FP8, and attention by `wgmma`, beside proved kernels and numpy.

Takes what it runs on, so that tests run it on a modelled GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from zbmd.training.autograd.array_module import bfloat16
from zbmd.training.ops.cuda.device_array import DeviceArray, Out
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.hopper.operands import tile_operands
from zbmd.training.ops.cuda.operators import CudaOperators
from zbmd.training.ops.cuda.table import HOPPER, HOPPER_ATTENTION, PORTABLE_ATTENTION
from zbmd.training.ops.fp8 import DelayedScaling, Format, product_of_blocks, quantised
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

SIZE: Final = 4096
ROUNDS: Final = 20
_EPILOGUE: Final = (None, None, None, np.float32(1), np.int32(0))


def kernels(run: Executor, size: int = SIZE, rounds: int = ROUNDS) -> str:
    """Compare each kernel for sm_90a; `size` is a multiple of 256. Raises `UserError` for a difference."""
    if run.architecture != HOPPER:
        raise UserError(f"{run.name} is no GPU of compute capability 9.0, for which these kernels exist")
    found = [
        check(run, form, size, rounds) for check in (_products, _fp8_of_layers) for form in ("nn", "nt", "tn")
    ]
    return "; ".join([*found, _fp8(run, size, rounds), _attention(run, min(size // 2, 2048), rounds)])


def _timed(run: Executor, rounds: int, work: Callable[[], None]) -> float:
    """Return the median of seconds."""
    times = list[int]()
    for _ in range(rounds):
        run.api.stream_synchronize(run.stream)
        started_ns = now_ns()
        work()
        run.api.stream_synchronize(run.stream)
        times.append(now_ns() - started_ns)
    return statistics.median(times) / 1e9


def _products(run: Executor, form: str, size: int, rounds: int) -> str:
    """Products by tensor maps and wgmma beside those by mma.sync."""
    random, n = np.random.default_rng(0), np.int32(size)
    a, b = (run.upload(random.standard_normal((size, size)).astype(bfloat16())) for _ in "ab")
    both = [run.zeros((size, size), np.float32) for _ in range(2)]
    grid, name = (size // 256, size // 128), f"{form}_f32"
    run.launch(f"matmul_{name}", (size // 128, size // 128), Out(both[0]), a, b, n, n, n, *_EPILOGUE)
    maps = tile_operands(form, a, b)

    def work() -> None:
        run.launch(f"tma_{name}", grid, Out(both[1]), *maps, n, n, n, *_EPILOGUE)

    seconds = _timed(run, rounds, work)
    portable, found = (one.get() for one in both)
    error = float(np.abs(portable - found).max() / np.abs(portable).max())
    if not error < 1e-5:
        raise UserError(f"tma_{name} and matmul_{name} differ by {error:.1e} of the largest element")
    beside = "the bits of mma.sync" if error == 0.0 else f"within {error:.1e} of mma.sync"
    return f"TMA {form} {2 * size**3 / seconds / 1e12:.0f} TFLOP/s, {beside}"


def _fp8_of_layers(run: Executor, form: str, size: int, rounds: int) -> str:
    """A product of a layer in FP8, its operands rounded on the way, beside numpy's."""
    random, ops = np.random.default_rng(1), CudaOperators(run)
    values = [random.standard_normal((size, size)).astype(bfloat16()) for _ in "ab"]
    a, b = map(run.upload, values)
    c = run.zeros((size, size), bfloat16())
    seconds = _timed(run, rounds, lambda: ops.multiply(form, c, a, b, in_fp8=True))
    wide_a, wide_b = (one.astype(np.float32) for one in values)
    some = wide_a[:, :128] if form[0] == "t" else wide_a[:128]
    expected = product_of_blocks(form, some, wide_b)
    error = float(np.abs(c.get()[:128].astype(np.float32) - expected).max() / np.abs(expected).max())
    if not error < 1e-2:
        raise UserError(f"a product {form} in FP8 differs by {error:.1e} of its largest element")
    return f"FP8 of layers {form} {2 * size**3 / seconds / 1e12:.0f} TFLOP/s, within {error:.1e}"


def _fp8(run: Executor, size: int, rounds: int) -> str:
    """Rounding with the bits of numpy's, and a product within the rounding of its accumulators."""
    random, machine = np.random.default_rng(0), DelayedScaling([Format.E4M3, Format.E4M3])
    values = [random.standard_normal((size, size)).astype(np.float32) for _ in "ab"]
    machine.observe([float(np.abs(one).max()) for one in values])
    given, blocks = list[DeviceArray](), (size // 64, size // 64)
    scales = [run.upload(machine.scales[number : number + 1]) for number in range(2)]
    for value, scale in zip(values, scales, strict=True):
        q, most = run.zeros((size, size), np.uint8), run.zeros(blocks, np.float32)
        side = np.int32(size)
        run.launch(
            "fp8_quantise_e4m3_f32", blocks, Out(q), None, Out(most), run.upload(value), scale, side, side
        )
        expected = quantised(value, float(scale.get()[0]), Format.E4M3)
        if q.get().tobytes() != expected.tobytes() or most.get().max() != np.abs(value).max():
            raise UserError("fp8_quantise_e4m3_f32 differs from numpy")
        given.append(q)
    c, n = run.zeros((size, size), bfloat16()), np.int32(size)
    grid = (size // 128, size // 128)

    def work() -> None:
        run.launch(
            "fp8_e4m3_e4m3_bf16", grid, Out(c), *given, n, n, n, *scales, None, None, None, np.int32(0)
        )

    seconds = _timed(run, rounds, work)
    a, b = (
        quantised(one, float(scale), Format.E4M3).astype(np.float32) / scale
        for one, scale in zip(values, machine.scales, strict=True)
    )
    exact = a[:128] @ b.T
    error = float(np.abs(c.get()[:128].astype(np.float32) - exact).max() / np.abs(exact).max())
    if not error < 1e-2:
        raise UserError(f"an FP8 product differs by {error:.1e} of its largest element")
    return f"FP8 {2 * size**3 / seconds / 1e12:.0f} TFLOP/s, within {error:.1e}"


def _attention(run: Executor, length: int, rounds: int) -> str:
    """Forward and backward by `wgmma` and by `mma.sync`, within the rounding of bf16."""
    heads, depth = 2, 64
    random = np.random.default_rng(0)
    qkv, dy = (
        run.upload(random.standard_normal((length, count * heads * depth)).astype(bfloat16()))
        for count in (3, 1)
    )
    bias = run.zeros((heads, length), np.float32)
    numbers = [np.int32(one) for one in (length, heads, heads, length)]
    spans, found = list[tuple[float, float]](), list[list[Any]]()
    for choice in (PORTABLE_ATTENTION, HOPPER_ATTENTION):
        grid = (-(-length // choice.tile[0]), heads)
        y, dqkv = dy.room(bfloat16()), qkv.room(bfloat16())
        logs, delta = (run.zeros((heads, length), np.float32) for _ in range(2))

        arguments: Any = (Out(dqkv), dy, logs, delta, qkv, bias, *numbers)

        def forward(name: str = choice.prefix, grid: Any = grid, y: Any = y, logs: Any = logs) -> None:
            run.launch(f"{name}_{depth}", grid, Out(y), Out(logs), qkv, bias, *numbers)

        def backward(name: str = choice.prefix, grid: Any = grid, arguments: Any = arguments) -> None:
            for part in ("keys", "queries"):
                run.launch(f"{name}_{part}_grad_{depth}", grid, *arguments)

        ahead = _timed(run, rounds, forward)
        rows = [np.int32(one) for one in (length, heads, length)]
        run.launch(f"attention_delta_{depth}", -(-length * heads // 4), Out(delta), dy, y, *rows)
        spans.append((ahead, _timed(run, rounds, backward)))
        found.append([one.get().astype(np.float32) for one in (y, dqkv)])
    errors = [
        float(np.linalg.norm(one - other) / np.linalg.norm(one)) for one, other in zip(*found, strict=True)
    ]
    if not max(errors) < 8e-3:
        raise UserError(f"attention by wgmma and by mma.sync differ by {max(errors):.1e} of their norm")
    ratios = [hopper / portable for portable, hopper in zip(*spans, strict=True)]
    return (
        f"attention by wgmma in {ratios[0]:.2f} of the time of mma.sync, its gradient in {ratios[1]:.2f}, "
        f"within {max(errors):.1e}"
    )
