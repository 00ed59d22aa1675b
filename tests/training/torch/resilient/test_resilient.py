"""Resilient loops over DDP: ranks that are killed at any place of a step change no bit. Real processes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.jobs.resilient_loops import (
    PRELOAD,
    check_as_undisturbed,
    steps_in,
    survives_a_stop,
    takes_a_spare,
)
from support.jobs.resilient_loops import train as run_loop
from support.processes.kept_lines import Lines
from support.processes.warm_template import template_of

from zbmd.actors.cluster.jobs.host import Host, HostConfig, RunResult
from zbmd.actors.view import OnLoss, Outcome
from zbmd.training.torch.ballots import DIGEST_EVERY

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

PROGRAM = PROGRAMS / "training/resilient_ddp.py"
RANKS = 3


async def train(mode: str, fault: str = "") -> tuple[RunResult, list[str]]:
    """Return how the run ended, and what its ranks printed of steps and of their final state."""
    result, lines = await run_loop(PROGRAM, mode, fault, RANKS)
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    return result, [line for line in steps_in(lines) if "evaluated" not in line]


@cache
def _undisturbed() -> dict[str, frozenset[str]]:
    return {}


async def undisturbed(mode: str) -> frozenset[str]:
    kept = _undisturbed()
    if mode not in kept:
        result, told = await train(mode)
        assert result.restarts == 0 and len(told) == RANKS * 13
        kept[mode] = frozenset(told)
    return kept[mode]


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("plain", "rank2:loop.begin:1"),
        ("plain", "rank0:loop.prepared:5"),
        ("plain", "rank1:loop.voted:4"),
        ("plain", "rank0:loop.done:16"),
        ("plain", "rank1:loop.begin:5,rank0:loop.meet:1"),
        ("plain", "rank1:loop.begin:5,rank0:loop.give:1"),
        ("plain", "rank1:loop.begin:5,rank1#2:loop.take:1"),
        ("plain", "rank1:loop.prepared:6,rank2:loop.prepared:6"),
        ("plain", "rank0:loop.prepared:3,rank2:loop.begin:6"),
        ("momentum", "rank2:loop.voted:9"),
        ("static", "rank1:loop.prepared:3"),
        ("unused", "rank2:loop.begin:4"),
        ("views", "rank0:loop.begin:4"),
        ("scaler", "rank0:loop.voted:2"),
        ("workers", "rank2:loop.done:3"),
        ("tail", "rank1:loop.voted:5"),
    ],
)
async def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, fault: str
) -> None:
    """Losses, rates, samples and means of every step, once each on those who live; the final state."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted = await undisturbed(mode)
    result, told = await train(mode, fault)
    assert result.restarts == len(fault.split(","))
    check_as_undisturbed(told, wanted, fault)


@pytest.mark.parametrize("fault", ["rank0:loop.updated:2", "rank1:loop.begin:4,rank2:loop.done:5"])
async def test_a_loss_that_only_a_backward_pass_meets_is_recovered_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """In the first epoch, too: its error comes out of C++ as a plain `RuntimeError`."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    result, lines = await run_loop(PROGRAMS / "torch/bare_ddp.py", "plain", fault)
    told = [line for line in lines if "ends with" in line]
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    assert result.restarts == len(fault.split(",")), "\n".join(lines)
    assert len(told) == RANKS and len({line.partition("ends with")[2] for line in told}) == 1


@pytest.mark.parametrize(
    ("what", "after", "named"),
    [("parameter", 0, "weight"), ("parameter", 10, "weight"), ("moment", 60, "exp_avg_sq of weight")],
)
async def test_parameters_and_moments_that_differ_between_ranks_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, after: int, named: str
) -> None:
    """A bit is enough, and all ranks end with the same words."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    output = Lines()
    program = str(PROGRAMS / "torch/differing/ddp.py")
    config = HostConfig(target=program, arguments=(what, str(after)), world_size=3, arena_bytes=32 << 20)
    result = await Host(config, output=output, template=template_of(config)).run()
    version = 0 if after == 0 else DIGEST_EVERY
    words = rf"after {version} steps: {named}: the state of version {version} is not the same on all ranks"
    told = [line for line in output.lines if re.search(words, line)]
    assert result.outcome is Outcome.SUCCEEDED and len(told) == 3, output.lines
    assert all(line.count("most have those of rank 0, not of [1]") == 1 for line in told)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("reduced", "4 steps"),
        (
            "seeds",
            "after 0 steps: weight: the state of version 0 .* differs between ranks before its first step",
        ),
        (
            "collective",
            r"differs: broadcast\(float32\[3\], src=0\) on rank 0; optimizer.step\(\) on rank 1;",
        ),
        ("gradients", "after 1 steps: weight: the state of version 1 .* nothing reduces the gradients"),
    ],
)
async def test_a_model_without_ddp_is_the_same_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, words: str
) -> None:
    """A replacement takes the model of a survivor, so all have to have that one."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    output = Lines()
    program = str(PROGRAMS / "torch/differing/plain.py")
    config = HostConfig(target=program, arguments=(what,), world_size=2, arena_bytes=32 << 20)
    result = await Host(config, output=output, template=template_of(config)).run()
    told = [line for line in output.lines if re.search(words, line)]
    assert result.outcome is Outcome.SUCCEEDED and len(told) == 2, output.lines


@pytest.mark.parametrize(
    ("on_loss", "way", "votes"),
    [(OnLoss.SHRINK, "pass", 3), (OnLoss.REPLACE, "steps", 2)],
)
async def test_a_survivor_ends_as_those_that_have_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_loss: OnLoss, way: str, votes: int
) -> None:
    """It has voted: the commit counts. A replacement finds nobody that has the state, and says so."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    output = Lines()
    config = HostConfig(
        target=str(PROGRAMS / "training/last_vote.py"),
        arguments=(str(tmp_path), way),
        world_size=3,
        on_loss=on_loss,
        arena_bytes=32 << 20,
        environment={"ZBMD_FAULT": f"rank1:loop.voted:{votes}"},
        preload=PRELOAD,
    )
    result = await Host(config, output=output, template=template_of(config)).run()
    told = [line.partition("ends with ")[2] for line in output.lines if "ends with " in line]
    assert len(told) == 2 and len(set(told)) == 1 and told[0].startswith("2 "), output.lines
    if on_loss is OnLoss.SHRINK:
        assert result.outcome is Outcome.SUCCEEDED, output.lines
    else:
        assert result.outcome is Outcome.FAILED, output.lines
        assert "ScriptsEnded: rank 2 finished its script" in "\n".join(output.lines), output.lines


async def test_a_spare_takes_the_place_of_a_killed_rank_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    await takes_a_spare(PROGRAM, tmp_path, await undisturbed("plain"))


async def test_a_rank_that_is_stopped_is_named_and_replaced_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    await survives_a_stop(PROGRAM, await undisturbed("plain"))
