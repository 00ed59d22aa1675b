"""The arithmetic of benchmarks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.tools.bench.run import rows_of
from zbmd.tools.bench.stats import (
    ITERATIONS_LEAST,
    OURS,
    SIZE_MAX,
    bandwidth_gbytes_per_s,
    iterations_for,
    median,
    parse_size,
    parse_sizes,
    percentile,
    ratio_of_medians,
    size_in_words,
    turns,
)
from zbmd.transport.errors import UserError

TIMES = st.floats(min_value=1e-3, max_value=1e9)
PAIRS = st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=12)


@given(st.integers(1, SIZE_MAX))
def test_a_size_in_words_is_read_back(nbytes: int) -> None:
    assert parse_size(size_in_words(nbytes)) == nbytes


@given(st.integers(1, 1 << 20), st.integers(0, 10), st.integers(2, 16))
def test_a_range_begins_with_its_first_size_and_ends_at_its_last(first: int, times: int, factor: int) -> None:
    last = min(first << times, SIZE_MAX)
    sizes = parse_sizes(f"{first}:{last}:{factor}")
    assert sizes[0] == first
    assert sizes[-1] <= last < sizes[-1] * factor
    assert all(after == factor * before for before, after in pairwise(sizes))


def test_sizes_are_written_in_any_of_three_ways() -> None:
    assert parse_sizes("8:64") == (8, 16, 32, 64)
    assert parse_sizes("8:16M:1024") == (8, 8 << 10, 8 << 20)
    assert parse_sizes("1M, 8,1KiB,8") == (8, 1 << 10, 1 << 20)
    assert parse_sizes("0,1g", least=0) == (0, 1 << 30)


@pytest.mark.parametrize(
    "text", ["", "0", "8:", "16:8", "8:64:1", "8:64:2:2", "2T", "-8", "8,,9", "1.5M", "2G", "9" * 5000]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_sizes(text)


@given(st.integers(0, 6), st.integers(1, 20))
def test_a_round_begins_and_ends_with_us_and_has_each_peer_once(peer_count: int, rounds: int) -> None:
    peers = [f"peer{number}" for number in range(peer_count)]
    order = turns(peers, rounds)
    assert len(order) == rounds
    for first, *between, last in order:
        assert first == last == OURS
        assert sorted(between) == peers


@given(st.integers(1, 6))
def test_every_peer_has_every_place(peer_count: int) -> None:
    peers = [f"peer{number}" for number in range(peer_count)]
    for place in zip(*turns(peers, peer_count), strict=True):
        assert set(place) in ({OURS}, set(peers))


@given(st.lists(TIMES, min_size=1, max_size=50), st.floats(0, 1))
def test_a_percentile_is_the_inverse_of_the_distribution(samples: list[float], part: float) -> None:
    assert percentile(samples, part) == np.percentile(samples, 100 * part, method="inverted_cdf")


@given(st.lists(TIMES, min_size=1, max_size=50))
def test_a_median_lies_between_the_samples(samples: list[float]) -> None:
    assert min(samples) <= median(samples) <= max(samples)


@given(PAIRS, st.integers(0, 1 << 32))
def test_an_interval_holds_its_ratio_and_nothing_beyond_the_pairs(
    pairs: list[tuple[float, float]], seed: int
) -> None:
    ours, theirs = zip(*pairs, strict=True)
    found = ratio_of_medians(ours, theirs, seed=seed)
    ratios = [mine / other for mine, other in pairs]
    slack = 1e-12 * max(ratios)  # an interpolation rounds
    assert min(ratios) - slack <= found.low <= found.value + slack
    assert found.value - slack <= found.high <= max(ratios) + slack
    assert found == ratio_of_medians(ours, theirs, seed=seed)


@given(PAIRS)
def test_a_ratio_knows_no_unit(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    doubled = ratio_of_medians([2 * time for time in ours], [2 * time for time in theirs])
    assert doubled == ratio_of_medians(ours, theirs)


@given(st.lists(TIMES, min_size=2, max_size=12), st.floats(0.1, 10))
def test_noise_that_both_share_does_not_widen_the_interval(machine: list[float], factor: float) -> None:
    found = ratio_of_medians([factor * time for time in machine], machine)
    assert found.low == pytest.approx(factor)
    assert found.high == pytest.approx(factor)


def test_rows_hold_our_noise_and_each_peers_ratio() -> None:
    ours = [[900.0], [1100.0]] * 4
    ours_row, peer_row = rows_of("p2p-arena", 4096, {OURS: ours, "peer": [[2000.0, 2000.0]] * 4})
    assert (ours_row.who, peer_row.who) == (OURS, "peer")
    assert ours_row.samples == peer_row.samples == 8
    assert ours_row.time_ratio is not None
    assert ours_row.time_ratio.value == pytest.approx(1100 / 900)
    assert peer_row.time_ratio is not None
    assert peer_row.time_ratio.value == pytest.approx(0.5)
    assert peer_row.time_us_p50 == 2.0
    assert peer_row.algbw_gbytes_per_s == pytest.approx(2.048)


@given(st.integers(1, SIZE_MAX))
def test_large_sizes_are_sent_less_often_but_never_just_once(nbytes: int) -> None:
    assert ITERATIONS_LEAST <= iterations_for(SIZE_MAX) <= iterations_for(nbytes) <= iterations_for(1)


def test_bandwidth_is_in_units_of_10_to_the_9() -> None:
    assert bandwidth_gbytes_per_s(10**9, 1e6) == 1.0
