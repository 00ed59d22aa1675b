"""The layers of each part of a pipeline."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.training.pipeline.part import balanced_cuts, layers_of_parts
from zbmd.training.pipeline.program import Shape
from zbmd.transport.errors import UserError


@given(costs=st.lists(st.floats(0, 100), min_size=1, max_size=9), draw=st.data())
def test_cuts_are_the_best_there_are(costs: list[float], draw: st.DataObject) -> None:
    parts = draw.draw(st.integers(1, len(costs)))
    cuts = balanced_cuts(costs, parts)
    assert [layer for cut in cuts for layer in cut] == list(range(len(costs)))
    assert all(cuts)
    dearest = max(sum(costs[layer] for layer in cut) for cut in cuts)
    best = min(
        max(sum(costs[start:end]) for start, end in pairwise([0, *inner, len(costs)]))
        for inner in combinations(range(1, len(costs)), parts - 1)
    )
    assert dearest == pytest.approx(best)


def test_a_model_too_small_to_cut_is_told() -> None:
    with pytest.raises(UserError, match="cannot divide 3 layers into 4 parts"):
        balanced_cuts([1, 1, 1], 4)


def test_layers_divide_or_that_is_told() -> None:
    shape = Shape(stages=2, chunks=2, microbatches=1)
    assert layers_of_parts(8, shape) == (2, 2, 2, 2)
    with pytest.raises(UserError, match="such as 4 or 8"):
        layers_of_parts(6, shape)
