"""The checks of the engine for machines with a GPU, run on a modelled one."""

from __future__ import annotations

import re

import pytest
from programs.training import modelled_gpu
from support.devices.cuda_model import ModelHost
from support.devices.cuda_model_launches import ModelLaunch
from support.devices.kernel_numbers import by_numpy, nothing_compiled

from zbmd.tools.lab.gpu import engine, overlap
from zbmd.training.config import GPTConfig
from zbmd.training.ops.cuda.executor import Executor
from zbmd.transport.errors import UserError

MODEL = GPTConfig(context=16, width=64, heads=1, layers=1)


def test_gradients_and_graphs_pass_on_the_model() -> None:
    run = Executor(ModelHost(devices=1, run_kernel=by_numpy).process(), compile=nothing_compiled)
    assert re.match(r"gradients within .*; the same bits again; \d+ launches", engine.gradients(run, MODEL))
    assert engine.graph(run, 64, launches=5).startswith("5 launches: ")
    told = engine.fused(run, MODEL)
    assert re.search(r"same bits when replayed; tape \d\d launches, .*; fused 1 launches", told), told
    with pytest.raises(UserError, match=r"tape: ops took .* of their steps"):
        engine.op_times(run, MODEL, sequences=1, steps=3)  # the model's clock is not the host's
    assert overlap.state(run, 40_000).startswith("0 MiB with the device's digest; ")
    assert overlap.uploads(run, MODEL).startswith("12 batches, the same bits; ")


def test_a_wrong_kernel_is_found() -> None:
    def wrong(launch: ModelLaunch) -> None:
        by_numpy(launch)
        if launch.kernel.name == "rms_norm_grad_bf16":
            launch.arguments[0][:] = 0  # type: ignore[index]

    run = Executor(ModelHost(devices=1, run_kernel=wrong).process(), compile=nothing_compiled)
    with pytest.raises(UserError, match="gradients differ by"):
        engine.gradients(run, MODEL)


@pytest.mark.parametrize("case", engine.MESHES, ids=lambda case: case.mesh)
def test_a_mesh_has_its_bits_although_a_rank_is_killed(case: engine.MeshCase) -> None:
    """Those of one GPU, where no sum is divided: states in shards, and stages. Ranks share two GPUs."""
    told = engine.meshes(modelled_gpu.__file__, is_module=False, cases=[case])
    assert told.endswith("with a rank killed: the weights of undisturbed jobs")


def test_a_job_survives_a_kill_on_the_model() -> None:
    told = engine.job(modelled_gpu.__file__, is_module=False, steps=4)
    assert told == "4 steps of two ranks, rank 1 killed at 2: the same weights"
