"""The training engine on a GPU: launches, gradients, a graph, and a job whose rank is killed.

Each function takes what it runs on, so that tests run it on a modelled GPU.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from zbmd.training.model.graph.steps import FusedSteps
from zbmd.training.ops.cuda.device_array import DeviceArray
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.module import DeviceModule
from zbmd.training.profiler.lines import OpRow, read_profiles
from zbmd.training.profiler.operations import COPY
from zbmd.training.profiler.profiler import open_profiler
from zbmd.training.sharded.options import StepGraph, TrainOptions
from zbmd.transport import kill_points as faults
from zbmd.transport.cuda.runtime import runtime_of_device
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

SMALL: Final = GPTConfig(context=128, width=256, heads=4, layers=2)
ERROR_MOST: Final = 0.04
"""Of a parameter's gradient, in its norm: activations are bf16."""
TIMED: Final = 20
WARM_UP: Final = 2
"""Steps that load kernels and allocate."""
OWN_LEAST: Final = 0.6
"""Of a step's time, that of its ops on the device."""
JOB: Final = "zbmd.training.sharded"
JOB_S_MAX: Final = 300.0
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


def fused(run: Executor, config: GPTConfig = SMALL) -> str:
    """Compare a step's fused graph with the tape, and its replays with its first run; time both."""
    tape, whole = (GPT(config, xp=DeviceModule(run)) for _ in range(2))
    whole.whole_step = FusedSteps(whole, run)
    random = np.random.default_rng(0)
    params = tape.init(0) + random.standard_normal(tape.layout.size).astype(np.float32) * np.float32(0.02)
    given: Any = run.upload(params.astype(bfloat16()))
    room: Any = run.zeros(tape.layout.size, bfloat16())
    tokens = random.integers(0, config.vocabulary, (2, config.context + 1))

    def computed(model: GPT) -> tuple[npt.NDArray[Any], float, int]:
        started_ns, before = now_ns(), run.launches
        model.loss_and_grads(given, room, tokens, global_batch=2)
        run.api.stream_synchronize(run.stream)
        return room.get(), (now_ns() - started_ns) / 1e3, run.launches - before

    wanted, first = computed(tape)[0], computed(whole)[0]
    error = np.linalg.norm(first.astype(np.float64) - wanted.astype(np.float64))
    error /= np.linalg.norm(wanted.astype(np.float64))
    if not error < ERROR_MOST:
        raise UserError(f"the fused graph's gradient differs from the tape's by {error:.1e} of its norm")
    every = [(computed(tape), computed(whole)) for _ in range(TIMED)]
    if any(found.tobytes() != first.tobytes() for _, (found, _, _) in every):
        raise UserError("a replayed step and its first run, over the same inputs, differ in bits")
    took = [
        f"{every[-1][side][2]} launches, {statistics.median(pair[side][1] for pair in every):.0f} µs"
        for side in range(2)
    ]
    return f"within {error:.1e} of the tape, the same bits when replayed; tape {took[0]}; fused {took[1]}"


def op_times(run: Executor, config: GPTConfig = SMALL, *, sequences: int = 8, steps: int = TIMED) -> str:
    """Sample the ops of steps, of tapes and of fused graphs; compare their sum with the steps' time.

    Raises `UserError` if ops take longer than their step, or less than `OWN_LEAST` of it.
    """
    found = list[str]()
    for name in ("tape", "fused"):
        model = GPT(config, xp=DeviceModule(run))
        model.whole_step = FusedSteps(model, run) if name == "fused" else None
        given: Any = run.upload(model.init(0).astype(bfloat16()))
        room: Any = run.zeros(model.layout.size, bfloat16())
        tokens = np.random.default_rng(0).integers(0, config.vocabulary, (sequences, config.context + 1))
        took_ns = list[int]()
        with tempfile.TemporaryDirectory() as folder:
            profiler = open_profiler(
                Path(folder), model, sequences=sequences, ops_every=1, executor=run, environ={}
            )
            with profiler, profiler.recording():
                for step in range(steps):
                    profiler.begin_step(step)
                    run.api.stream_synchronize(run.stream)
                    started_ns = now_ns()
                    with profiler.operations():
                        model.loss_and_grads(given, room, tokens, global_batch=sequences)
                    run.api.stream_synchronize(run.stream)
                    took_ns.append(now_ns() - started_ns)
            lines = [line for life in read_profiles(Path(folder)) for line in life.ops]
        own_ns = [sum(row.execute_ns for row in line.ops if not _runs_beside(row)) for line in lines]
        shares = [own / took for own, took in zip(own_ns, took_ns, strict=True)][WARM_UP:]
        if not min(shares) >= OWN_LEAST or not max(shares) <= 1.0:
            raise UserError(f"{name}: ops took {min(shares):.0%} to {max(shares):.0%} of their steps")
        asked = statistics.median(sum(row.enqueue_ns for row in line.ops) for line in lines) / 1e3
        found.append(
            f"{name}: ops took {statistics.median(shares):.0%} of a step of "
            f"{statistics.median(took_ns) / 1e3:.0f} µs, and {asked:.0f} µs to ask for"
        )
    return "; ".join(found)


def _runs_beside(row: OpRow) -> bool:
    """Return whether it may be on another stream than the one that computes."""
    return row.which == COPY


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCase:
    """A mesh that a job trains on while a rank is killed. alike: with the bits of this mesh, undisturbed."""

    mesh: str
    fault: str
    zero: int = 0
    alike: str = "dp=1"
    heads: int = 1
    layers: int = 1
    graph: StepGraph = "fused"


MESHES: Final = (
    MeshCase(mesh="dp=2", zero=1, fault="rank1:zero.updated:2"),
    MeshCase(mesh="dp=2,fsdp=2", zero=3, fault="rank0:zero.norm:2"),
    MeshCase(mesh="pp=2,fsdp=2", zero=2, fault="rank3:pipeline.compute:12", layers=2),
    MeshCase(mesh="dp=2,tp=2", fault="rank1:job.begin:2", alike="tp=2", heads=2),
    MeshCase(mesh="fsdp=2,tp=2", zero=3, fault="rank2:zero.updated:2", alike="tp=2", heads=2),
    MeshCase(mesh="pp=2,tp=2", fault="rank3:job.begin:2", alike="tp=2", heads=2, layers=2),
)


def job(target: str = JOB, *, is_module: bool = True, steps: int = STEPS) -> str:
    """Train by `--device cuda` on two ranks, undisturbed, then with a rank killed; compare the bits."""
    case = MeshCase(mesh="dp=2", fault=f"rank1:job.begin:{steps // 2}", alike="dp=2")
    with tempfile.TemporaryDirectory() as folder:
        _compare([case], Path(folder), target, is_module, steps)
    return f"{steps} steps of two ranks, rank 1 killed at {steps // 2}: the same weights"


def meshes(
    target: str = JOB, *, is_module: bool = True, cases: Sequence[MeshCase] = MESHES, steps: int = 3
) -> str:
    """Train on each mesh with a rank killed; compare the bits with those of an undisturbed job."""
    with tempfile.TemporaryDirectory() as folder:
        _compare(cases, Path(folder), target, is_module, steps)
    found = ", ".join(f"{case.mesh} (ZeRO {case.zero})" if case.zero else case.mesh for case in cases)
    return f"{found}, each with a rank killed: the weights of undisturbed jobs"


def _compare(cases: Sequence[MeshCase], folder: Path, target: str, is_module: bool, steps: int) -> None:
    """Raise `UserError` for weights that differ."""
    data, calm = write_text(folder / "text"), dict[MeshCase, str]()
    for case in cases:
        alone = replace(case, mesh=case.alike, zero=0, fault="")
        if alone not in calm:
            calm[alone] = _weights(folder / f"calm-{len(calm)}", data, target, is_module, steps, alone)
        found = _weights(folder / f"{case.mesh}-{case.zero}", data, target, is_module, steps, case)
        if found != calm[alone]:
            raise UserError(
                f"the weights of {case.mesh} are {found} after a kill, and {calm[alone]} without it on "
                f"{case.alike}"
            )


def _weights(out: Path, data: Path, target: str, is_module: bool, steps: int, case: MeshCase) -> str:
    options = TrainOptions(
        out=out,
        data=str(data),
        mesh=case.mesh,
        zero=case.zero,
        model=GPTConfig(width=64 * case.heads, heads=case.heads, layers=case.layers, context=16),
        training=TrainingConfig(steps=steps, shards=4, sequences_per_shard=1),
        precision="bfloat16",
        device="cuda",
        evaluate_windows=2,
        graph=case.graph,
    )
    output = RanksOutput(None)
    config = HostConfig(
        target=target,
        is_module=is_module,
        arguments=(options.encode(),),
        world_size=math.prod(int(axis.split("=")[1]) for axis in case.mesh.split(",")),
        max_restarts=2,
        environment={faults.FAULT_VARIABLE: case.fault},
    )
    ended = asyncio.run(ended_within(Host(config, output=output, observer=output), JOB_S_MAX))
    found = [str(one["weights_sha256"]) for one in output.reports if one.get("kind") == "result"]
    deaths = failures_of(ended.failures)
    if ended.exit_code or not found or len(deaths) != bool(case.fault):
        raise UserError(f"the job ended with {ended.exit_code}: {' | '.join([*deaths, *output.lines][-6:])}")
    return found[-1]
