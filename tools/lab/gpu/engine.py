"""The training engine on a GPU: launches, gradients, a graph, and a job whose rank is killed.

Each function takes what it runs on, so that tests run it on a modelled GPU.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.tools.bench.run_ranks import RanksOutput
from zbmd.tools.chaos.small_job import ended_within, failures_of, write_text
from zbmd.training.autograd.array_module import bfloat16
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.ops.cuda.device_array import DeviceArray
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.module import DeviceModule
from zbmd.training.sharded.options import TrainOptions
from zbmd.transport import kill_points as faults
from zbmd.transport.cuda.runtime import runtime_of_device
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

SMALL: Final = GPTConfig(context=128, width=256, heads=4, layers=2)
ERROR_MOST: Final = 0.04
"""Of a parameter's gradient, in its norm: activations are bf16."""
TIMED: Final = 20
JOB_S_MAX: Final = 200.0
STEPS: Final = 20


def on_gpu() -> Executor:
    """Return an executor of the first GPU."""
    return Executor(runtime_of_device(0))


def gradients(run: Executor, config: GPTConfig = SMALL) -> str:
    """Compare loss and gradients of a GPT with the processor's, and the bits of a second pass."""
    host, device = GPT(config), GPT(config, xp=DeviceModule(run))
    random = np.random.default_rng(0)
    params = host.init(0)
    params += random.standard_normal(params.shape).astype(np.float32) * np.float32(0.02)
    narrow: npt.NDArray[Any] = params.astype(bfloat16())
    tokens = random.integers(0, config.vocabulary, (2, config.context + 1))
    expected = np.zeros_like(narrow)
    loss = host.loss_and_grads(narrow, expected, tokens, global_batch=2)
    given: Any = run.upload(narrow)

    def computed() -> tuple[float, npt.NDArray[Any]]:
        room: Any = run.zeros(narrow.size, narrow.dtype)
        value = device.loss_and_grads(given, room, tokens, global_batch=2)
        return value, room.get()

    (found_loss, found), before = computed(), run.launches
    _, again = computed()
    launches, worst, where = run.launches - before, 0.0, ""
    views = zip(host.layout.slots, host.layout.views(found), host.layout.views(expected), strict=True)
    for slot, view, wanted in views:
        wide = wanted.astype(np.float64)
        norm = max(1e-30, float(np.linalg.norm(wide)))
        error = float(np.linalg.norm(view.astype(np.float64) - wide)) / norm
        if not error <= worst:
            worst, where = error, slot.name
    if not worst < ERROR_MOST or not abs(found_loss - loss) < 1e-2 * abs(loss):
        raise UserError(f"gradients differ by {worst:.1e} of {where}'s, losses are {found_loss} and {loss}")
    if found.tobytes() != again.tobytes():
        raise UserError("two passes over the same inputs differ in bits")
    return f"gradients within {worst:.1e} of the processor's; the same bits again; {launches} launches a pass"


def graph(run: Executor, elements: int = 1 << 20, launches: int = 100) -> str:
    """Replay captured launches with new inputs, and time them beside the same launches one by one."""
    source, total = run.upload(np.ones(elements, np.float32)), run.zeros(elements, np.float32)

    def add() -> DeviceArray:
        made = total
        for _ in range(launches):
            made += source
        return made

    with run.capturing() as captured:
        add()
    spans: dict[bool, list[int]] = {False: [], True: []}
    for _ in range(TIMED):
        for replayed, times in spans.items():
            started_ns = now_ns()
            if replayed:
                run.replay(captured)
            else:
                add()
            run.api.stream_synchronize(run.stream)
            times.append(now_ns() - started_ns)
    run.upload(np.full(elements, 2.0, np.float32), source)
    run.replay(captured)
    wanted = 2 * TIMED * launches + 2 * launches
    found = total.get()
    if not (found == wanted).all():
        raise UserError(f"a replayed graph gave {found[:4]}, not {wanted}")
    alone, replayed_ns = (statistics.median(times) / launches / 1e3 for times in spans.values())
    return f"{captured.launches} launches: {alone:.2f} µs each, {replayed_ns:.2f} µs each in a graph"


def job(target: str = "zbmd.training.sharded", *, is_module: bool = True, steps: int = STEPS) -> str:
    """Train by `--device cuda` on two ranks, undisturbed, then with a rank killed; compare the bits."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_text(Path(folder) / "text")
        digests = [
            _weights(Path(folder) / name, data, target, is_module, steps, fault)
            for name, fault in (("calm", ""), ("killed", f"rank1:job.begin:{steps // 2}"))
        ]
    if digests[0] != digests[1]:
        raise UserError(f"the weights are {digests[1]} after a kill, and {digests[0]} without it")
    return f"{steps} steps of two ranks, rank 1 killed at {steps // 2}: the same weights"


def _weights(out: Path, data: Path, target: str, is_module: bool, steps: int, fault: str) -> str:
    options = TrainOptions(
        out=out,
        data=str(data),
        model=GPTConfig(width=64, heads=1, layers=1, context=16),
        training=TrainingConfig(steps=steps, shards=4, sequences_per_shard=1),
        precision="bfloat16",
        device="cuda",
        evaluate_windows=2,
    )
    output = RanksOutput(None)
    config = HostConfig(
        target=target,
        is_module=is_module,
        arguments=(options.encode(),),
        world_size=2,
        max_restarts=2,
        environment={faults.FAULT_VARIABLE: fault},
    )
    ended = asyncio.run(ended_within(Host(config, output=output, observer=output), JOB_S_MAX))
    found = [str(one["weights_sha256"]) for one in output.reports if one.get("kind") == "result"]
    deaths = failures_of(ended.failures)
    if ended.exit_code or not found or len(deaths) != bool(fault):
        raise UserError(f"the job ended with {ended.exit_code}: {' | '.join([*deaths, *output.lines][-6:])}")
    return found[-1]
