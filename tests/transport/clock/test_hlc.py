"""The hybrid clock: monotonic, causal, close to the wall clock, and not to be carried away."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.clock.hlc import LOGICAL_BITS, MAX_DRIFT_NS, STAMP_MAX, HybridClock
from zbmd.transport.errors import LocalProtocolError

LOGICAL_MASK = (1 << LOGICAL_BITS) - 1
NOW_NS = 1_790_000_000_000_000_000
walls = st.integers(0, 2**62)


def physical_ns(stamp: int) -> int:
    """The wall-clock time of a stamp, ns since 1970, rounded down to a tick."""
    return stamp & ~LOGICAL_MASK


def logical(stamp: int) -> int:
    """The stamp's counter: orders the events of one tick."""
    return stamp & LOGICAL_MASK


@given(st.lists(st.one_of(walls, st.tuples(st.integers(0, STAMP_MAX), walls)), max_size=50))
def test_stamps_only_grow_whatever_the_clocks_do(steps: list[int | tuple[int, int]]) -> None:
    clock = HybridClock()
    for step in steps:
        before = clock.last
        if isinstance(step, int):
            assert clock.tick(step) == clock.last > before
            continue
        remote, wall_ns = step
        refused = clock.refused
        stamp = clock.merge(remote, wall_ns)
        assert stamp == clock.last > before
        if remote - wall_ns > MAX_DRIFT_NS:
            assert clock.refused == refused + 1
        else:
            assert clock.refused == refused
            assert stamp > remote


@given(wall_ns=walls)
def test_a_stamp_reads_as_the_wall_clock(wall_ns: int) -> None:
    stamp = HybridClock().tick(wall_ns)
    assert 0 <= wall_ns - physical_ns(stamp) <= LOGICAL_MASK
    assert stamp == physical_ns(stamp) + logical(stamp)


def test_a_clock_that_stands_still_counts() -> None:
    clock = HybridClock()
    stamps = [clock.tick(NOW_NS) for _ in range(4)]
    assert [logical(stamp) for stamp in stamps] == [0, 1, 2, 3]
    assert len({physical_ns(stamp) for stamp in stamps}) == 1


def test_a_full_counter_carries_into_the_next_tick() -> None:
    clock = HybridClock()
    clock.last = physical_ns(NOW_NS) | LOGICAL_MASK
    stamp = clock.tick(NOW_NS)
    assert (physical_ns(stamp), logical(stamp)) == (physical_ns(NOW_NS) + LOGICAL_MASK + 1, 0)


@given(st.integers(0, 2**32))
def test_causality_over_skewed_clocks(seed: int) -> None:
    """Messages between five clocks up to 50 ms apart: a cause is always stamped below its effect, and no
    clock is ahead of the fastest wall clock by more than one tick."""
    rng = random.Random(seed)
    skew_ns = [rng.randint(-50_000_000, 50_000_000) for _ in range(5)]
    clocks = [HybridClock() for _ in skew_ns]
    true_ns = NOW_NS
    for _ in range(60):
        true_ns += rng.randint(0, 200_000)
        sender, receiver = rng.sample(range(5), 2)
        sent = clocks[sender].tick(true_ns + skew_ns[sender])
        true_ns += rng.randint(0, 100_000)
        assert clocks[receiver].merge(sent, true_ns + skew_ns[receiver]) > sent
        assert max(clock.last for clock in clocks) <= true_ns + max(skew_ns) + LOGICAL_MASK


def test_a_clock_far_ahead_is_not_followed_but_counted() -> None:
    clock = HybridClock(max_drift_ns=1000)
    before = clock.tick(NOW_NS)
    assert clock.merge(NOW_NS + 1001, NOW_NS) == before + 1
    assert clock.merge(STAMP_MAX, NOW_NS) == before + 2
    assert (clock.refused, clock.refused_ahead_ns_max) == (2, STAMP_MAX - NOW_NS)
    assert clock.merge(NOW_NS + 1000, NOW_NS) == NOW_NS + 1001
    # A peer far behind, or one whose clock went back, is no danger.
    assert clock.merge(0, 0) == NOW_NS + 1002


@pytest.mark.parametrize("remote", [-1, STAMP_MAX + 1])
def test_what_is_no_stamp_is_refused(remote: int) -> None:
    with pytest.raises(LocalProtocolError):
        HybridClock().merge(remote, NOW_NS)


@pytest.mark.parametrize("wall_ns", [-1, STAMP_MAX + 1])
def test_what_is_no_time_is_refused(wall_ns: int) -> None:
    with pytest.raises(LocalProtocolError):
        HybridClock().tick(wall_ns)
