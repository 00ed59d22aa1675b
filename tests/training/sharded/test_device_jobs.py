"""Jobs with `--device cuda` on modelled GPUs: ranks are real processes, and are killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs.training import modelled_gpu

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.tools.bench.run_ranks import RanksOutput
from zbmd.tools.chaos.small_job import ended_within, failures_of, write_text
from zbmd.training.checkpoint.sharded import load_trained
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.sharded.options import TrainOptions
from zbmd.transport import kill_points as faults

MODEL = GPTConfig(width=64, heads=1, layers=1, context=16)
STEPS = 4


def _options(out: Path, data: Path, **changes: Any) -> TrainOptions:
    given = {
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
    options: TrainOptions, ranks: int, fault: str = "", **environment: str
) -> tuple[int, list[Any], list[str], tuple[str, ...]]:
    """Return the exit code, the results, the lines and the deaths of a job."""
    output = RanksOutput(None)
    config = HostConfig(
        target=modelled_gpu.__file__,
        arguments=(options.encode(),),
        world_size=ranks,
        max_restarts=4,
        environment={faults.FAULT_VARIABLE: fault, **environment},
    )
    ended = asyncio.run(ended_within(Host(config, output=output, observer=output), 300.0))
    results = [one for one in output.reports if one.get("kind") == "result"]
    return ended.exit_code, list(results), list(output.lines), failures_of(ended.failures)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text")


def test_a_rank_that_is_killed_leaves_no_trace(data: Path, tmp_path: Path) -> None:
    """Two ranks, one killed in a step: the weights of an undisturbed run, close to those of the CPU."""
    _, calm, lines, _ = _run(_options(tmp_path / "calm", data), 2)
    assert calm, lines
    assert any("device cuda:1 (Modelled GPU" in line for line in lines), lines
    code, killed, lines, deaths = _run(_options(tmp_path / "killed", data), 2, "rank1:job.begin:2")
    assert code == 0 and len(deaths) == 1, lines
    assert killed[-1]["weights_sha256"] == calm[-1]["weights_sha256"]
    _, on_cpu, lines, _ = _run(_options(tmp_path / "cpu", data, device="cpu"), 1)
    assert on_cpu, lines
    for name in ("loss_last", "held_out_loss"):
        assert abs(on_cpu[-1][name] - calm[-1][name]) < 5e-3
    found, expected = (load_trained(tmp_path / one)[0] for one in ("calm", "cpu"))
    assert np.linalg.norm(found - expected) < 1e-2 * np.linalg.norm(expected)
