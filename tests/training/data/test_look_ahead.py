"""Samples of a step to come, drawn on the loop while one is computed: they are the step's own."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from zbmd.tools.chaos.small_job import write_text
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import SampleOrder
from zbmd.training.replicated import job, workload


def options_of(directory: Path, data: Path) -> job.JobOptions:
    directory.mkdir()
    return job.JobOptions(
        out=directory,
        data=str(data),
        model=GPTConfig(context=12, width=16, heads=2, layers=2),
        training=TrainingConfig(steps=12, shards=3, sequences_per_shard=1, warmup_steps=2),
        checkpoint_every=0,
        evaluate_every=0,
    )


@pytest.mark.parametrize("least_ns", [0, 1 << 62], ids=["ahead", "on time"])
async def test_samples_drawn_ahead_are_the_steps_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least_ns: int
) -> None:
    data = write_text(tmp_path / "text")
    wanted = job.run_plain(options_of(tmp_path / "plain", data))
    drawn: list[tuple[int, bool]] = []
    draw, loop = SampleOrder.sample_ids, threading.get_ident()

    def noted(self: SampleOrder, step: int) -> npt.NDArray[np.int64]:
        drawn.append((step, threading.get_ident() == loop))
        return draw(self, step)

    monkeypatch.setattr(SampleOrder, "sample_ids", noted)
    monkeypatch.setattr(workload, "AHEAD_NS", least_ns)
    found = await job.run_job(options_of(tmp_path / "run", data))
    assert found is not None and found.weights_sha256 == wanted.weights_sha256
    ahead = [step for step, on_loop in drawn if on_loop]
    assert {step for step, _ in drawn} == set(range(12))
    assert bool(ahead) == (least_ns == 0) and len(set(ahead)) == len(ahead), drawn
