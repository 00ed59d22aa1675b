"""Shares of ranks of unequal speed."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.training.job.stragglers.policy import shares_for
from zbmd.transport.errors import LocalProtocolError


@given(shards=st.integers(3, 8), costs=st.lists(st.floats(0.5, 4.0), min_size=1, max_size=3))
def test_the_slowest_rank_takes_as_little_time_as_any_division_allows(
    shards: int, costs: list[float]
) -> None:
    shares = shares_for(shards, costs)
    assert sum(shares) == shards and min(shares) >= 1
    divisions = (one for one in product(range(1, shards + 1), repeat=len(costs)) if sum(one) == shards)
    best = min(max(n * cost for n, cost in zip(one, costs, strict=True)) for one in divisions)
    assert max(n * cost for n, cost in zip(shares, costs, strict=True)) == best


@given(shards=st.integers(1, 64), ranks=st.integers(1, 9))
def test_equal_costs_give_even_shares(shards: int, ranks: int) -> None:
    shares = shares_for(shards, [1.0] * ranks)
    assert sum(shares) == shards and max(shares) - min(shares) <= 1


def test_a_cost_that_is_not_positive_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="positive"):
        shares_for(4, [1.0, 0.0])
