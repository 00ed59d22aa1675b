"""Loops of libraries survive kills of ranks with the same bits: the script's own, and those that they own."""

from __future__ import annotations

import importlib.util
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
}
REPORTS = {"accelerate": 16, "transformers": 8, "lightning": 8}
"""Steps that each rank reports of a whole run."""
FAULTS = {
    "accelerate": "rank0:loop.begin:3,rank1:loop.prepared:8,rank0#2:loop.voted:6",
    "transformers": "rank1:loop.prepared:4,rank0:loop.voted:9",
    "lightning": "rank1:loop.prepared:4,rank0:loop.voted:9",
}
"""Of the owned loops each kill is one in a step, and one in what follows a step: logs, validation, a save."""
REFUSED = {
    ("lightning", "manual"): "this fit cannot be made resilient: manual optimization",
    (
        "transformers",
        "counted",
    ): "TrainingArguments(include_num_input_tokens_seen='all') cannot be made resilient",
}


async def run(library: str, out: Path, fault: str = "") -> tuple[int, list[str]]:
    """Return how many ranks were replaced, and what the ranks printed of steps and of their final state."""
    program, more = LIBRARIES / f"resilient_{library}.py", {"OUT": str(out)}
    result, lines = await train(program, "whole", fault, RANKS, more, preload=PRELOADS[library])
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    return result.restarts, steps_in(lines)


@pytest.fixture(autouse=True)
def _own_cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))


def require(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


@pytest.mark.parametrize("library", FAULTS)
async def test_a_loop_survives_kills(library: str, tmp_path: Path) -> None:
    require(library)
    restarts, wanted = await run(library, tmp_path / "calm")
    assert restarts == 0 and len(wanted) == RANKS * (REPORTS[library] + 1), wanted
    restarts, told = await run(library, tmp_path / "killed", FAULTS[library])
    assert restarts == len(kill_points.parse(FAULTS[library]))
    check_as_undisturbed(told, frozenset(wanted), FAULTS[library])


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
