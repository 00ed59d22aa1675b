"""Libraries whose loop is the script's own: a resilient one survives kills of ranks with the same bits."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.jobs.resilient_loops import check_as_undisturbed, steps_in, train

from zbmd.actors.view import Outcome

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

RANKS, STEPS = 2, 16


async def run(fault: str = "") -> tuple[int, list[str]]:
    """Return how many ranks were replaced, and what the ranks printed of steps and of their final state."""
    program = PROGRAMS / "torch/libraries/resilient_accelerate.py"
    result, lines = await train(program, "plain", fault, RANKS)
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    return result.restarts, steps_in(lines)


@cache
def _undisturbed() -> list[str]:
    return []


@pytest.mark.parametrize("fault", ["rank0:loop.begin:3", "rank1:loop.prepared:5", "rank0:loop.voted:6"])
async def test_a_loop_of_accelerate_survives_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    if not _undisturbed():
        restarts, told = await run()
        assert restarts == 0 and len(told) == RANKS * (STEPS + 1), told
        _undisturbed().extend(told)
    restarts, told = await run(fault)
    assert restarts == 1
    check_as_undisturbed(told, frozenset(_undisturbed()), fault)
