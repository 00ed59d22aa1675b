"""Out of memory: an estimate that holds against real passes, and a step that exceeds it."""

from __future__ import annotations

import hashlib
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from programs import PROGRAMS
from support.jobs.by_words import plain_by
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.tools.chaos.small_job import SHAPE, write_text
from zbmd.tools.train.command import recipe_of
from zbmd.training.autograd.rng import Noise
from zbmd.training.checkpoint.sharded import checkpoint_in
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model.weights import load_weights
from zbmd.training.step.memory_estimate import StepOutOfMemory, activation_bytes, naming_step
from zbmd.transport.memory.arena import Allocator

OURS = GPTConfig(context=32, width=64, heads=4, layers=3)
GPT2 = replace(OURS, family="gpt2", activation="gelu")
WIDE = replace(OURS, width=128, layers=6)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("config", [OURS, replace(OURS, dropout=0.1), GPT2, WIDE])
def test_the_estimate_is_near_the_peak_of_a_real_pass_and_below(config: GPTConfig, recompute: bool) -> None:
    model = GPT(config, recompute=recompute)
    params = model.init(0)
    grads, tokens = np.zeros_like(params), np.zeros((4, config.context + 1), np.int64)
    noise = Noise(0, 0, np.arange(4))
    model.loss_and_grads(params, grads, tokens, global_batch=4, noise=noise)
    tracemalloc.start()
    model.loss_and_grads(params, grads, tokens, global_batch=4, noise=noise)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    estimate = activation_bytes(config, rows=4 * config.context, recompute=recompute)
    assert 0.85 * peak_bytes <= estimate <= peak_bytes


def test_an_arena_that_is_full_at_a_step_is_told_by_rank_and_step() -> None:
    arena = Allocator(0, 1 << 20)
    with (
        pytest.raises(
            StepOutOfMemory, match=r"rank 3 ran out of memory at step 7: no room for 2\.0 MiB in the arena"
        ),
        naming_step(3, 7),
    ):
        arena.allocate(2 << 20)


async def test_a_rank_that_is_short_of_memory_at_a_step_loses_nothing(tmp_path: Path) -> None:
    """It says so, and is replaced; the state that was committed is at its peer."""
    script, output = PROGRAMS / "training/short_of_memory.py", Lines()
    data = write_text(tmp_path / "text")
    shared = (*SHAPE, "--steps", "4", "--data", str(data), "--evaluate-every", "0")
    plain = plain_by([*shared, "--out", str(tmp_path)])
    out = tmp_path / "run"
    config = HostConfig(
        target=str(script),
        arguments=(*shared, "--out", str(out)),
        world_size=2,
        preload=("zbmd.training.sharded.run",),
    )
    ended = await Host(config, output=output).run()
    told = "\n".join(output.lines)
    assert ended.exit_code == 0, told
    assert "rank 1 ran out of memory at step 2: Unable to allocate 256. MiB" in told, told
    assert [down.rank for down in ended.failures] == [1]
    weights = load_weights(out / "weights.safetensors")[0]
    assert hashlib.sha256(weights.data).hexdigest() == plain.weights_sha256


@pytest.mark.parametrize("kind", ["zero", "mesh"])
async def test_a_rank_that_is_short_of_memory_each_time_ends_the_job_at_its_second_failure(
    kind: str, tmp_path: Path
) -> None:
    """Once it is replaced, and not as often as it may be; what there is to go on from is named."""
    output, out = Lines(), tmp_path / "run"
    script = PROGRAMS / "training/always_short_of_memory.py"
    data = str(write_text(tmp_path / "text"))
    every = {"steps": "40", "data": data, "out": str(out), "evaluate_every": "0", "checkpoint_every": "1"}
    pairs = ((f"--{name.replace('_', '-')}", value) for name, value in every.items())
    arguments = (*SHAPE, *(text for pair in pairs for text in pair))
    sharded = ("--zero", "2") if kind == "zero" else ()
    arguments = (recipe_of((*arguments, *sharded), ranks=2).encode(),)
    config = HostConfig(
        target=str(script),
        arguments=arguments,
        world_size=2,
        max_restarts=8,
        preload=("zbmd.training.sharded.run",),
    )
    ended = await Host(config, output=output).run()
    told = "\n".join([*output.lines, ended.reason])
    assert ended.exit_code != 0, told
    assert [down.rank for down in ended.failures if down.rank == 1] == [1, 1], told
    assert "rank 1 ran out of memory at step " in told and "Unable to allocate 1.00 PiB" in told, told
    assert "It was replaced for this before, at step " in told, told
    named = checkpoint_in(out)
    assert named is not None and f"resume with --resume {named}" in told, told
    assert not list(out.glob("out-of-memory-*"))
