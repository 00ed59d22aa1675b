"""Loops of libraries survive kills of ranks with the same bits: the script's own, and those that they own."""

from __future__ import annotations

import importlib.util
import tempfile
from functools import cache
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.jobs.resilient_loops import check_as_undisturbed, steps_in, train

from zbmd.actors.view import Outcome
from zbmd.transport import kill_points

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

RANKS = 2
LIBRARIES = PROGRAMS / "torch" / "libraries"
PRELOADS = {
    "accelerate": ("accelerate",),
    "transformers": ("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    "lightning": ("lightning",),
    "titan": ("torch.distributed.checkpoint", "torchdata.stateful_dataloader"),
}
PACKAGES = {"titan": "torchdata"}
"""The package that a program needs, if it is not called so."""
OWNED = "rank1:loop.prepared:4,rank0:loop.voted:9"
"""Of loops that a library owns: a kill in a step, and one in what follows it: logs, validation, a save."""
FAULTS = {
    ("accelerate", "whole"): (16, "rank0:loop.begin:3,rank1:loop.prepared:8,rank0#2:loop.voted:6"),
    ("transformers", "whole"): (8, OWNED),
    ("transformers", "sharded"): (8, OWNED),
    ("lightning", "whole"): (8, OWNED),
    ("lightning", "sharded"): (10, OWNED),
    ("titan", "sync"): (8, "rank1:loop.delivered:3,rank0:loop.prepared:8"),
}
"""The steps that each rank reports of a whole run, and where ranks are killed."""
REFUSED = {
    ("lightning", "manual"): "this fit cannot be made resilient: manual optimization",
    (
        "transformers",
        "counted",
    ): "TrainingArguments(include_num_input_tokens_seen='all') cannot be made resilient",
    ("transformers", "accelerate_shards"): "TrainingArguments(fsdp=…) cannot be made resilient",
}


async def run(library: str, mode: str, out: str, fault: str = "", **more: str) -> tuple[int, list[str]]:
    """Return how many ranks were replaced, and what the ranks printed of steps and of their final state."""
    program, given = LIBRARIES / f"resilient_{library}.py", {"OUT": out, **more}
    result, lines = await train(program, mode, fault, RANKS, given, preload=PRELOADS[library])
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    lost = any("a save beside the loop is lost" in line for line in lines)
    assert lost == ("DIES" in more), "\n".join(lines)
    return result.restarts, steps_in(lines)


@pytest.fixture(autouse=True)
def _own_cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))


def require(library: str) -> None:
    package = PACKAGES.get(library, library)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@cache
def _undisturbed() -> dict[tuple[str, str], frozenset[str]]:
    return {}


async def undisturbed(library: str, mode: str, tmp_path: Path) -> frozenset[str]:
    kept = _undisturbed()
    if (library, mode) not in kept:
        restarts, told = await run(library, mode, tempfile.mkdtemp(dir=tmp_path))
        assert restarts == 0 and len(told) == RANKS * (FAULTS[library, mode][0] + 1), told
        kept[library, mode] = frozenset(told)
    return kept[library, mode]


@pytest.mark.parametrize(("library", "mode"), FAULTS)
async def test_a_loop_survives_kills(library: str, mode: str, tmp_path: Path) -> None:
    require(library)
    wanted, fault = await undisturbed(library, mode, tmp_path), FAULTS[library, mode][1]
    restarts, told = await run(library, mode, tempfile.mkdtemp(dir=tmp_path), fault)
    assert restarts == len(kill_points.parse(fault))
    check_as_undisturbed(told, wanted, fault)


async def test_a_rank_that_is_killed_while_threads_write_costs_their_save_alone(tmp_path: Path) -> None:
    """A survivor's thread goes on when the rank is replaced; the last save is whole, and read again."""
    require("titan")
    wanted, fault = await undisturbed("titan", "sync", tmp_path), "rank0:loop.updated:7"
    restarts, told = await run("titan", "async", tempfile.mkdtemp(dir=tmp_path), fault, DIES="3")
    assert restarts == 2
    check_as_undisturbed(told, wanted, f"{fault},rank1:loop.begin:4")


@pytest.mark.parametrize(("library", "mode"), REFUSED)
async def test_what_cannot_be_repeated_is_refused_before_the_first_step(
    library: str, mode: str, tmp_path: Path
) -> None:
    require(library)
    program, more = LIBRARIES / f"resilient_{library}.py", {"OUT": str(tmp_path)}
    result, lines = await train(program, mode, "", RANKS, more, preload=PRELOADS[library])
    assert result.outcome is not Outcome.SUCCEEDED
    assert any(REFUSED[library, mode] in line for line in lines), "\n".join(lines)
    assert not steps_in(lines)
