"""The device that a rank computes on: `--device`, which GPU, and whether the training fits it.

A rank of a host takes the GPU of its number among the ranks of that host, modulo the GPUs that are visible;
`CUDA_VISIBLE_DEVICES` is read by CUDA alone and is never set here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from zbmd.actors.rank.environment import LOST_DEVICES_VARIABLE, RankEnvironment
from zbmd.collectives.device.windows import WINDOW_BYTES
from zbmd.training.config import GPTConfig
from zbmd.training.job.mesh import DATA_AXIS, TENSOR_AXIS, Mesh
from zbmd.training.ops.cuda.executor import (
    CompileSource,
    Executor,
    architecture_of,
    compiled_here,
    version_in_words,
)
from zbmd.training.ops.cuda.operators import DEPTH_MOST, DEPTHS
from zbmd.training.ops.cuda.table import FP8, HOPPER
from zbmd.training.optim import arrays_of
from zbmd.training.optim.on_device import require_kernel
from zbmd.training.sharded.activations import activations_needed
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.stages import elements_most, shard_layouts
from zbmd.training.step.reduction import buffers_most
from zbmd.training.zero.machine import REDUCING_MAX
from zbmd.training.zero.options import WEIGHTS_STAGE
from zbmd.transport.cuda.api import CudaApi
from zbmd.transport.cuda.runtime import runtime_of_device, visible_devices
from zbmd.transport.errors import UserError
from zbmd.transport.memory.memfd import in_words

CPU: Final = "cpu"
AUTO: Final = "auto"
_NAME: Final = re.compile(r"cuda(?::(?P<index>[0-9]{1,4}))?", re.ASCII)
DRIVER_LEAST: Final = 13000
"""CUDA that a driver must support: that of the compiler whose machine code is loaded."""


def parse_device(text: str) -> str:
    """Return the name of a device: cpu, cuda, cuda:N or auto. Raises `UserError` for another one."""
    if text == "hip":
        raise UserError(
            "hip is not supported yet: kernels exist as CUDA C++ with PTX for tensor cores and cp.async, and "
            "there is no binding of the HIP runtime. Use cpu."
        )
    if text not in (CPU, AUTO) and _NAME.fullmatch(text) is None:
        raise UserError(f"expected cpu, cuda, cuda:N or auto, got {text!r}")
    return text


@dataclass(frozen=True, slots=True)
class Devices:
    """How GPUs are found and opened."""

    count: Callable[[], int] = visible_devices
    open: Callable[[int], CudaApi] = runtime_of_device
    compile: CompileSource = compiled_here


FOUND: list[Devices] = [Devices()]
"""The devices of this machine. Programs of tests replace the one element by modelled devices."""


def why_not(options: TrainOptions, config: GPTConfig, mesh: Mesh) -> str:
    """Return why a recipe cannot be trained on GPUs; empty if it can."""
    depth = config.width // config.heads
    if options.precision != "bfloat16":
        return "the kernels compute in bfloat16: give --precision bf16"
    if options.offload or options.actors or options.plain or options.balance:
        return "omit --offload, --actors, --plain and --balance"
    if depth not in DEPTHS:
        fitting = [str(config.width // one) for one in DEPTHS if config.width % one == 0]
        choose = f"--heads {' or '.join(fitting)}" if fitting else "a --width that is a multiple of 64"
        return f"attention has kernels for heads of 64 and 128 features, not {depth}: choose {choose}"
    if config.vocabulary % (8 * mesh.size(TENSOR_AXIS)):
        each = "" if mesh.size(TENSOR_AXIS) == 1 else f" on each of {mesh.size(TENSOR_AXIS)} ranks along tp"
        return f"products need a vocabulary that is a multiple of 8{each}, not {config.vocabulary}"
    return ""


def device_bytes(options: TrainOptions, config: GPTConfig, mesh: Mesh) -> tuple[int, int, int]:
    """Return the bytes that a rank needs on its GPU: of state, gradients and activations.

    Gradients include the windows of `connect_devices`, one for each group.
    """
    found = _sharded_bytes if options.zero else _whole_bytes
    state, gradients = found(options, config, mesh)
    largest = 4 * max(config.vocabulary, 4 * config.width) * config.width // mesh.size(TENSOR_AXIS)
    exchanging = sum(mesh.size(axis) > 1 for axis in {TENSOR_AXIS, mesh.sharded_axis, DATA_AXIS})
    gradients += WINDOW_BYTES * exchanging
    activations = activations_needed(options, config, mesh) // 2 + largest
    if options.matmul_precision == FP8:  # both operands of the largest product, and their scales
        rows = options.training.sequences_per_shard * config.context
        activations += 2 * 4 * config.width * (rows + config.width)
    return state, gradients, activations


def _whole_bytes(options: TrainOptions, config: GPTConfig, mesh: Mesh) -> tuple[int, int]:
    """Return the bytes of state and gradients of a rank that stands for others along `dp`."""
    training, elements = options.training, elements_most(config, mesh, options.stages)
    sizes = range(1, mesh.size(DATA_AXIS) + 1)
    buffers = buffers_most(training.shards, sizes) + int(mesh.size(DATA_AXIS) > 1) + options.spare_gradients
    return elements * (4 * len(arrays_of(training.optimizer)) + 2), 2 * elements * buffers


def _sharded_bytes(options: TrainOptions, config: GPTConfig, mesh: Mesh) -> tuple[int, int]:
    """Return the same of a rank whose state is sharded; its largest units are whole for a while."""
    training, ranks = options.training, mesh.size(mesh.sharded_axis)
    buffers = buffers_most(training.shards, [mesh.data_ranks]) + REDUCING_MAX
    states, gradients = [0], [0]
    for shards in shard_layouts(config, mesh, options.stages):
        shard, unit = shards.shard_size, ranks * max(one.part for one in shards.units)
        whole = options.zero < WEIGHTS_STAGE
        weights = ranks * shard if whole else shard + unit * (1 + options.prefetch)
        states.append(4 * len(arrays_of(training.optimizer)) * shard + 2 * weights)
        gradients.append(2 * ((ranks * shard if options.zero == 1 else shard) + buffers * unit))
    return max(states), max(gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """The GPU of this rank, by its index among those that are visible, and the ranks that share it."""

    index: int
    sharing: int
    count: int

    @classmethod
    def of(
        cls, device: str, count: int, launched: RankEnvironment | None, lost: Collection[int] = ()
    ) -> DeviceChoice:
        """Choose for a rank of a host with `count` visible GPUs, of which `lost` have failed in this job.

        Raises `UserError` for an absent one, and if all have failed.
        """
        ranks, place = (1, 0) if launched is None else (launched.ranks_per_host, launched.local_rank)
        found = _NAME.fullmatch(device)
        asked = None if found is None else found["index"]
        if asked is not None:
            if int(asked) >= count:
                raise UserError(
                    f"--device {device}: {count} GPUs are visible here, cuda:0 to cuda:{count - 1}."
                )
            if int(asked) in lost:
                raise UserError(f"--device {device}: this GPU failed. Give cuda, for a rank to take another.")
            return cls(index=int(asked), sharing=ranks, count=count)
        index, users = place % count, [len(range(one, ranks, count)) for one in range(count)]
        if index in lost:
            left = [one for one in range(count) if one not in lost]
            if not left:
                raise UserError(f"--device {device}: all of the {count} GPUs of this host failed.")
            index = min(left, key=lambda one: (users[one], one))
            users[index] += 1
        return cls(index=index, sharing=users[index], count=count)


def open_device(
    options: TrainOptions, config: GPTConfig, mesh: Mesh, launched: RankEnvironment | None
) -> tuple[Executor | None, str]:
    """Return what this rank computes with, None for the CPU, and a sentence that says which and why.

    Raises `UserError` if `--device cuda` cannot be had.
    """
    if options.device == CPU:
        return None, ""
    if options.device != AUTO:
        return _opened(options, config, mesh, launched)
    if launched is not None and launched.hosts > 1:
        raise UserError("--device auto chooses on one host: give cpu or cuda for a job of several.")
    try:
        return _opened(options, config, mesh, launched)
    except UserError as error:
        return None, f"device cpu: {error}"


def lost_devices(environ: Mapping[str, str]) -> frozenset[int]:
    """Return the GPUs that failed in this job on this host, as its launcher says."""
    text = environ.get(LOST_DEVICES_VARIABLE, "")
    return frozenset(int(one[:4]) for one in text.split(",") if one.isdecimal())


def open_for_generation(device: str, config: GPTConfig) -> Executor | None:
    """Return what generates on `device`, None for the CPU. Raises `UserError`."""
    if device == CPU:
        return None
    reason, depth = "", config.width // config.heads
    if depth % 8 or depth > DEPTH_MOST:
        reason = f"heads of {depth} features; the kernels need a multiple of 8 up to {DEPTH_MOST}"
    elif config.vocabulary % 8:
        reason = f"a vocabulary of {config.vocabulary}, which is no multiple of 8"
    try:
        if reason:
            raise UserError(f"--device {device}: the model has {reason}. Use cpu.")
        choice = DeviceChoice.of(device, _visible(device), None)
        return Executor(_usable(choice, f"--device {device}"), compile=FOUND[0].compile)
    except UserError:
        if device == AUTO:
            return None
        raise


def _visible(device: str) -> int:
    count = FOUND[0].count()
    if not count:
        raise UserError(
            f"--device {device}: no GPU is visible. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or use cpu."
        )
    return count


def _usable(choice: DeviceChoice, shown: str) -> CudaApi:
    api = FOUND[0].open(choice.index)
    facts, driver = api.facts(), api.driver_version()
    architecture_of(facts.compute_capability, facts.name)
    if driver < DRIVER_LEAST:
        raise UserError(
            f"{shown}: the driver supports CUDA {version_in_words(driver)}, and the kernels are compiled by "
            f"{version_in_words(DRIVER_LEAST)}. Update it to version 580 or newer, or use cpu."
        )
    return api


def _opened(
    options: TrainOptions, config: GPTConfig, mesh: Mesh, launched: RankEnvironment | None
) -> tuple[Executor, str]:
    reason = why_not(options, config, mesh)
    if reason:
        raise UserError(f"--device {options.device}: {reason}.")
    require_kernel(options.training.optimizer)
    shown = f"--device {options.device}"
    choice = DeviceChoice.of(options.device, _visible(options.device), launched, lost_devices(os.environ))
    api = _usable(choice, shown)
    facts = api.facts()
    if options.matmul_precision == FP8 and architecture_of(facts.compute_capability, facts.name) != HOPPER:
        major, minor = facts.compute_capability
        raise UserError(
            f"--matmul-precision fp8 needs a GPU of compute capability 9.0, and {facts.name} has {major}."
            f"{minor}: give default."
        )
    _require_memory(api, device_bytes(options, config, mesh), choice, shown)
    where = f"device cuda:{choice.index} ({facts.name}, {facts.pci})"
    if choice.sharing > 1:
        where += f", shared by {choice.sharing} ranks"
    made = Executor(
        api,
        compile=FOUND[0].compile,
        sharing=choice.sharing,
        matmul_precision=options.matmul_precision,
    )
    return made, where


def _require_memory(api: CudaApi, needs: tuple[int, int, int], choice: DeviceChoice, shown: str) -> None:
    total, name = api.memory_info()[1], api.facts().name
    needed = sum(needs) * choice.sharing
    if needed > total:
        state, gradients, activations = map(in_words, needs)
        who = "1 rank needs" if choice.sharing == 1 else f"{choice.sharing} ranks need"
        raise UserError(
            f"{shown}: the training does not fit the GPU: {who} {in_words(needed)} (each {state} of state, "
            f"{gradients} of gradients, {activations} of activations), and {name} has {in_words(total)}. "
            "Choose fewer --sequences-per-shard, --recompute on, a smaller model, or fewer ranks a GPU."
        )
