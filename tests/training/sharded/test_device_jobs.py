"""Jobs with `--device cuda` on modelled GPUs: ranks are real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from programs.training import modelled_gpu

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.tools.bench.run_ranks import RanksOutput
from zbmd.tools.chaos.small_job import ended_within, write_text
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.training.checkpoint.sharded import load_trained
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.job.records import METRICS_NAME
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.run import run_plain
from zbmd.transport import kill_points as faults

MODEL = GPTConfig(width=64, heads=1, layers=1, context=16)
STEPS = 3


def _options(out: Path, data: Path, **changes: Any) -> TrainOptions:
    given: dict[str, Any] = {
        "mesh": "dp=-1",
        "model": MODEL,
        "training": TrainingConfig(steps=STEPS, shards=4, sequences_per_shard=1),
        "precision": "bfloat16",
        "device": "cuda",
        "evaluate_every": 2,
        "evaluate_windows": 2,
        "checkpoint_every": 2,
    }
    return TrainOptions(out=out, data=str(data), **{**given, **changes})


def _run(
    options: TrainOptions,
    ranks: int,
    *,
    restarts: int = 0,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, dict[str, Any], list[str]]:
    """Return the exit code, the result and the lines of a job."""
    output = RanksOutput(None)
    config = HostConfig(
        target=modelled_gpu.__file__,
        arguments=(options.encode(),),
        world_size=ranks,
        max_restarts=restarts,
        environment=dict(environment),
    )
    ended = asyncio.run(ended_within(Host(config, output=output, observer=output), 300.0))
    results = [one for one in output.reports if one.get("kind") == "result"]
    return ended.exit_code, results[-1] if results else {}, list(output.lines)


def _check_profile(out: Path) -> None:
    """Both ranks have the times of the device for the ops of the last step, its copies and the update."""
    with RunDatabase(out) as database:
        database.update()
        rows = database.connection.execute(
            "SELECT rank, op, pass, execute_ns, enqueue_ns, flops FROM op_profile WHERE kind = 'op'"
        ).fetchall()
        assert database.connection.execute("SELECT min(flops) FROM step_timing").fetchone() > (0,)
    for rank in range(2):
        own = [row[1:] for row in rows if row[0] == rank]
        assert {"host_to_device", "device_to_host", "attention", "update"} <= {row[0] for row in own}
        products = [row for row in own if row[4]]
        assert {row[1] for row in products} == {"forward", "backward"}
        assert all(row[2] > 0 and row[3] > 0 for row in products)


def _counted(out: Path) -> list[tuple[int, int]]:
    """Return the launches and kernels of each step after the first."""
    rows = [msgspec.json.decode(row) for row in (out / METRICS_NAME).read_bytes().splitlines()]
    return [(row["launches"], row["kernels"]) for row in rows if row.get("step", 0) > 1 and "loss" in row]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text")


def test_a_job_on_gpus_is_near_the_one_on_cpus_also_if_a_gpu_fails(data: Path, tmp_path: Path) -> None:
    """Two ranks, a GPU each; the bound is that of bf16 activations. Kills: `test_gpu_engine`.

    A device error costs the process, as CUDA demands; its replacement goes on, on another GPU, with the same
    bits.
    """
    code, found, lines = _run(_options(tmp_path / "cuda", data, profile_ops=STEPS), 2)
    assert code == 0 and found, lines
    _check_profile(tmp_path / "cuda")
    for rank in range(2):
        assert any(f"rank {rank}: device cuda:{rank} (Modelled GPU" in line for line in lines), lines
    *replayed, sampled = _counted(tmp_path / "cuda")
    assert replayed and all(4 * launches < kernels for launches, kernels in replayed), "graphs are replayed"
    assert sampled[0] == sampled[1], "a step whose ops are sampled launches each kernel"
    expected = run_plain(_options(tmp_path / "cpu", data, device="cpu", plain=True))
    assert abs(expected.loss_last - found["loss_last"]) < 5e-3
    assert abs(expected.held_out_loss - found["held_out_loss"]) < 5e-3
    ours, theirs = (load_trained(tmp_path / one)[0] for one in ("cuda", "cpu"))
    assert np.linalg.norm(ours - theirs) < 1e-2 * np.linalg.norm(theirs)
    failing = {modelled_gpu.FAIL_VARIABLE: "250"}  # in the second step
    code, again, lines = _run(_options(tmp_path / "failing", data), 2, restarts=2, environment=failing)
    assert code == 0 and "uncorrectable ECC" in "".join(lines), lines
    shown = "\n".join(lines)
    assert "rank 1: device cuda:0 (Modelled GPU, 0000:01:00.0), shared by 2 ranks" in shown, "it has moved"
    assert again["weights_sha256"] == found["weights_sha256"], "in a new process, with a new context"


def test_gpus_that_reach_each_other_exchange_directly_also_after_a_death(data: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"evaluate_every": 0, "checkpoint_every": 0}
    code, calm, lines = _run(_options(tmp_path / "alone", data, **given), 1)
    assert code == 0, lines
    reaching = {modelled_gpu.SHARES_VARIABLE: "1", faults.FAULT_VARIABLE: "rank1:zero.updated:2"}
    code, found, lines = _run(
        _options(tmp_path / "two", data, zero=3, profile_ops=STEPS, **given),
        2,
        restarts=2,
        environment=reaching,
    )
    assert code == 0, lines
    told = [line for line in lines if "between devices: " in line]
    assert told and all("dp: direct, 2 ranks on 2 devices" in line for line in told), told
    assert found["weights_sha256"] == calm["weights_sha256"]
    with RunDatabase(tmp_path / "two") as database:
        database.update()
        asked = "SELECT count(*) FROM op_profile WHERE op = 'update' AND execute_ns > 0 AND rank = ?"
        assert all(database.connection.execute(asked, (rank,)).fetchone() > (0,) for rank in range(2))
    launches, kernels = _counted(tmp_path / "two")[-2]  # of the last step ops are sampled
    assert 2 * launches < kernels, "each pass of a unit is replayed"


def test_layers_multiply_in_fp8_with_the_same_bits_on_ranks_that_die(data: Path, tmp_path: Path) -> None:
    """Nothing of FP8 is a state: scales are those of the values that are multiplied."""
    given: dict[str, Any] = {"evaluate_every": 0, "checkpoint_every": 0, "matmul_precision": "fp8"}
    code, calm, lines = _run(_options(tmp_path / "one", data, **given), 1)
    assert code == 0, lines
    killed = {faults.FAULT_VARIABLE: "rank1:zero.updated:2"}
    options = _options(tmp_path / "two", data, zero=3, **given)
    code, found, lines = _run(options, 2, restarts=2, environment=killed)
    assert code == 0, lines
    assert found["weights_sha256"] == calm["weights_sha256"]
    plain = run_plain(_options(tmp_path / "cpu", data, device="cpu", plain=True))
    assert abs(plain.loss_last - found["loss_last"]) < 3e-2
    losses = [msgspec.json.decode(row) for row in (tmp_path / "one" / METRICS_NAME).read_bytes().splitlines()]
    first, *_, last = [row["loss"] for row in losses if "loss" in row]
    assert last < first


def test_a_gpu_that_is_too_small_ends_the_job_before_it_begins(data: Path, tmp_path: Path) -> None:
    given = {modelled_gpu.MEMORY_VARIABLE: str(1 << 20)}
    code, _, lines = _run(_options(tmp_path / "small", data), 1, environment=given)
    assert code != 0
    assert any("the training does not fit the GPU: 1 rank needs" in line for line in lines), lines
