"""The benchmark of activation checkpointing: trials under a limit, and the search for the largest batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.lab.bench.training.recompute import MIB, Trial, largest, run
from zbmd.training.config import GPTConfig
from zbmd.training.data.corpus import prepare_corpus

SMALL = GPTConfig(context=16, width=32, heads=2, layers=2)


@pytest.mark.parametrize(
    ("fitting", "least", "found"), [(0, 0, 0), (1, 0, 1), (13, 0, 13), (13, 5, 13), (5, 5, 5), (99, 0, 64)]
)
def test_the_largest_batch_is_found_by_halving(fitting: int, least: int, found: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= fitting

    assert largest(fits, least=least, most=64) == found
    assert len(tried) <= 14 and len(set(tried)) == len(tried)


def test_a_trial_that_meets_its_limit_is_no_failure(tmp_path: Path) -> None:
    text = prepare_corpus(str(write_text(tmp_path / "text")), tmp_path, context=SMALL.context)

    def trial(limit_bytes: int, *, recompute: bool) -> Trial:
        return Trial(
            model=SMALL, text=str(text), recompute=recompute, batch=2, steps=2, limit_bytes=limit_bytes
        )

    for recompute in (False, True):
        found = run(trial(2048 * MIB, recompute=recompute))
        assert found is not None and len(found.steps_s) == 2 and found.peak_bytes > MIB
        assert run(trial(MIB, recompute=recompute)) is None
