"""Resilient loops whose models are on devices: kills change no bit. Real processes, modelled devices.

The model raises where a copy of the state and a step that writes it are not in order (`cuda_model`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.jobs.resilient_loops import check_as_undisturbed, shrink, steps_in
from support.jobs.resilient_loops import train as run_loop

from zbmd.actors.view import Outcome
from zbmd.tools.runs.commands import audit_run

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

PROGRAM = PROGRAMS / "torch/devices/resilient.py"
RANKS, STEPS = 3, 8


@pytest.fixture(autouse=True)
def cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))


async def train(mode: str, fault: str = "", *, restarts: int = 0, **more: str) -> list[str]:
    """Return what its ranks printed of steps and of their final state, and what else they did."""
    result, lines = await run_loop(PROGRAM, mode, fault, RANKS, more)
    assert result.outcome is Outcome.SUCCEEDED and result.restarts == restarts, "\n".join(lines)
    return lines


@cache
def _undisturbed() -> dict[str, frozenset[str]]:
    return {}


async def undisturbed(mode: str) -> frozenset[str]:
    kept = _undisturbed()
    if mode not in kept:
        told = steps_in(await train(mode))
        assert len(told) == RANKS * (STEPS + 1), told
        kept[mode] = frozenset(told)
    return kept[mode]


@pytest.mark.parametrize(
    ("mode", "fault", "on_stream"),
    [
        ("plain", "rank1:loop.voted:4", "0"),
        ("plain", "rank0:loop.prepared:5", "1"),
        ("plain", "rank1:loop.begin:3,rank1#2:loop.take:1", "1"),
        ("capturable", "rank2:loop.updated:3", "0"),
    ],
)
async def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(
    mode: str, fault: str, on_stream: str
) -> None:
    """Also where streams alone wait for collectives, and threads do not."""
    wanted = await undisturbed(mode)
    lines = await train(mode, fault, restarts=len(fault.split(",")), ZBMD_WAIT_ON_STREAM=on_stream)
    check_as_undisturbed(steps_in(lines), wanted, fault)


async def test_a_rank_whose_device_fails_is_replaced(tmp_path: Path) -> None:
    """It votes for no step that its device has not made."""
    wanted = await undisturbed("plain")
    lines = await train("plain", restarts=1, LOSES="1")
    told = set(steps_in(lines))
    assert told <= wanted and {one for one in wanted if one.startswith("final")} <= told, told - wanted
    assert any("DeviceLost: the device has fallen off the bus" in line for line in lines), lines


async def test_a_run_that_shrinks_ends_with_the_bits_of_all_ranks() -> None:
    wanted = {line.partition(": ")[2] for line in await undisturbed("exact") if line.startswith("final")}
    lines = await shrink(PROGRAM, "rank2:loop.begin:4", RANKS, {"MODE": "exact"})
    final = [line.partition(": ")[2] for line in steps_in(lines) if line.startswith("final")]
    assert len(final) == RANKS - 1 and {*final} == wanted, lines


async def test_a_checkpoint_has_what_was_on_the_device(tmp_path: Path) -> None:
    """Moments are on the device again, where another run goes on from it."""
    wanted = await undisturbed("plain")
    fault = "+".join(f"rank{rank}:loop.prepared:7" for rank in range(RANKS))
    out = str(tmp_path / "run")
    result, lines = await run_loop(PROGRAM, "plain", fault, RANKS, {"OUT": out, "EVERY": "4"})
    assert result.outcome is Outcome.FAILED and "continue that run by resume=True" in "\n".join(lines)
    told = {*steps_in(await train("plain", RESUME="1", OUT=out, EVERY="4"))}
    final = {line for line in wanted if line.startswith("final")}
    assert final <= told <= wanted and len(told) == RANKS * (STEPS - 4 + 1), sorted(told)
    assert audit_run(tmp_path / "run").is_whole


async def test_a_model_whose_state_buddies_would_keep_is_refused() -> None:
    result, lines = await run_loop(PROGRAM, "mirror", "", RANKS)
    text = "\n".join(lines)
    assert result.outcome is Outcome.FAILED
    assert "a model on a GPU that is sharded by fully_shard, or trained with mirror=True" in text, text
