"""Checks of work beside the step on a GPU: uploads of batches, copies of the state; each takes its device."""

from __future__ import annotations

import statistics
from typing import Any, Final

import numpy as np

from zbmd.training.autograd.array_module import bfloat16
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model.graph.steps import FusedSteps
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.module import DeviceModule
from zbmd.training.ops.cuda.transfers import StateCopy, sum_of
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

SMALL: Final = GPTConfig(context=128, width=256, heads=4, layers=2)
BATCHES: Final = 12


def uploads(run: Executor, config: GPTConfig = SMALL) -> str:
    """Compute batches that are uploaded beside the one before, and as they are needed: the same bits?"""
    model, random = GPT(config, xp=DeviceModule(run)), np.random.default_rng(0)
    model.whole_step = steps = FusedSteps(model, run)
    noisy = model.init(0) + random.standard_normal(model.layout.size).astype(np.float32) * np.float32(0.02)
    weights: Any = run.upload(noisy.astype(bfloat16()))
    tokens = [random.integers(0, config.vocabulary, (2, config.context + 1)) for _ in range(BATCHES)]
    batches = [model.batch(one, global_batch=2) for one in tokens]
    rooms: list[Any] = [run.zeros(model.layout.size, bfloat16()) for _ in batches]

    def computed(*, ahead: bool) -> tuple[list[bytes], float]:
        steps.follow(batches if ahead else ())
        started_ns = now_ns()
        for batch, room in zip(batches, rooms, strict=True):
            steps(weights, room, batch, None)[1]()
        run.api.stream_synchronize(run.stream)
        took_us = (now_ns() - started_ns) / 1e3 / len(batches)
        return [room.get().tobytes() for room in rooms], took_us

    computed(ahead=False)  # which captures the graphs
    plain, beside = [computed(ahead=False) for _ in range(5)], [computed(ahead=True) for _ in range(5)]
    if any(bits != plain[0][0] for bits, _ in plain + beside):
        raise UserError("a batch that was uploaded beside the one before it gave other bits")
    before, after = (statistics.median(took for _, took in every) for every in (plain, beside))
    return f"{len(batches)} batches, the same bits; {before:.0f} µs each, {after:.0f} µs uploaded ahead"


def state(run: Executor, elements: int = 1 << 26) -> str:
    """Copy a state to the host, alone and beside kernels: the bits, and the device's digest of them?"""
    values = np.random.default_rng(0).standard_normal(elements).astype(np.float32)
    held, other, slot = run.upload(values), run.zeros(elements, np.float32), np.zeros(elements, np.float32)
    copy, took_ms = StateCopy(run), dict[bool, float]()
    for beside in (False, True):
        slot[:] = 0
        run.api.stream_synchronize(run.stream)
        started_ns = now_ns()
        copy.begin([(held, slot)])
        for _ in range(20 if beside else 0):
            other += held
        digest = copy.settle()
        took_ms[beside] = (now_ns() - started_ns) / 1e6
        if slot.tobytes() != values.tobytes() or digest != sum_of(slot):
            raise UserError(f"the copy has digest {sum_of(slot):016x}, the device's is {digest:016x}")
    return (
        f"{values.nbytes >> 20} MiB with the device's digest; {took_ms[False]:.1f} ms alone, "
        f"{took_ms[True]:.1f} ms beside kernels"
    )
