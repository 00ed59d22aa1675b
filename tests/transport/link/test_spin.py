"""When a reader spins: only where it pays, and never for long."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.link.spin import (
    BUSY_CHECK_NS,
    CORES_CHECK_NS,
    WAIT_SPINS_MAX,
    SpareProcessors,
    SpinChoice,
    SpinPolicy,
    shared_processors,
)

SPIN_NS = 200_000
AT_ONCE_NS = 10_000
LATE_NS = 50 * SPIN_NS


def loadavg(folder: Path, runnable: int) -> str:
    path = folder / "loadavg"
    path.write_text(f"0.20 0.18 0.12 {runnable}/80 11206\n")
    return str(path)


@pytest.fixture
def spare(tmp_path: Path) -> SpareProcessors:
    return SpareProcessors(loadavg(tmp_path, 2), processors=2)


class Reader:
    """Runs dry, and gets a frame some time later, again and again."""

    def __init__(self, policy: SpinPolicy) -> None:
        self._policy = policy
        self._now_ns = 0

    def wait(self, wait_ns: int) -> bool:
        """One wait; whether it was begun with a spin."""
        spun = self._policy.begins(self._now_ns)
        if spun:
            assert self._policy.goes_on(self._now_ns + SPIN_NS - 1), "no spin is shorter"
            if wait_ns > SPIN_NS:
                assert not self._policy.goes_on(self._now_ns + SPIN_NS), "nor longer"
            else:
                self._policy.goes_on(self._now_ns + wait_ns)
        self._now_ns += wait_ns
        self._policy.came(self._now_ns)
        return spun


@pytest.fixture
def policy(spare: SpareProcessors) -> SpinPolicy:
    return SpinPolicy(SPIN_NS, spare=spare, processors=2)


def test_a_reader_that_is_answered_goes_on_spinning(policy: SpinPolicy) -> None:
    reader = Reader(policy)
    assert all(reader.wait(AT_ONCE_NS) for _ in range(1000))
    assert policy.choice is SpinChoice.SPIN and not policy.parks[SpinChoice.SPIN]


def test_who_is_answered_late_parks_and_spins_for_what_comes_soon_again(policy: SpinPolicy) -> None:
    reader = Reader(policy)
    assert [reader.wait(LATE_NS) for _ in range(10)] == [True, True] + 8 * [False]
    assert policy.choice is SpinChoice.TOO_LONG
    assert [reader.wait(AT_ONCE_NS) for _ in range(10)].index(True) <= 6, "it sees that from its sleep"
    assert reader.wait(AT_ONCE_NS)


def test_two_that_sleep_find_each_other(policy: SpinPolicy) -> None:
    """The frame that each waits for takes two wake-ups, of 50 us each, until one of them spins."""
    reader = Reader(policy)
    for _ in range(10):
        reader.wait(LATE_NS)
    assert any(reader.wait(SPIN_NS - 80_000) for _ in range(10))


def test_who_is_held_up_for_a_moment_is_waited_for(policy: SpinPolicy) -> None:
    """A tick of the kernel or a collection of the peer's is no reason to park."""
    reader = Reader(policy)
    for _ in range(40):
        reader.wait(AT_ONCE_NS)
        assert reader.wait(SPIN_NS // 2)
    assert not policy.parks[SpinChoice.SPIN]


@given(waits=st.lists(st.sampled_from([AT_ONCE_NS, SPIN_NS // 2, 2 * SPIN_NS, LATE_NS]), max_size=300))
def test_what_is_lost_by_spinning_is_bounded(waits: list[int]) -> None:
    """However the frames come: of those that come late no more are spun for than others come soon."""
    spare = SpareProcessors("/nonexistent", processors=2)
    reader = Reader(SpinPolicy(SPIN_NS, spare=spare, processors=2))
    in_vain = sum(reader.wait(wait_ns) and wait_ns > SPIN_NS for wait_ns in waits)
    assert in_vain <= 3 + sum(wait_ns <= SPIN_NS for wait_ns in waits)


def test_a_wait_counts_for_no_more_than_its_bound(policy: SpinPolicy) -> None:
    reader = Reader(policy)
    reader.wait(1 << 60)
    assert policy._wait_ns <= WAIT_SPINS_MAX * SPIN_NS


def test_nobody_spins_where_the_peer_needs_the_processor(tmp_path: Path, spare: SpareProcessors) -> None:
    off = SpinPolicy(0, spare=spare, processors=8)
    assert not off.begins(0) and off.choice is SpinChoice.OFF
    alone = SpinPolicy(SPIN_NS, spare=spare, processors=1)
    assert not alone.begins(0) and alone.choice is SpinChoice.ONE_PROCESSOR
    busy = SpareProcessors(loadavg(tmp_path, 3), processors=2)
    policy = SpinPolicy(SPIN_NS, spare=busy, processors=2)
    assert not policy.begins(0) and policy.choice is SpinChoice.NO_SPARE_PROCESSOR
    loadavg(tmp_path, 1)
    assert not policy.begins(BUSY_CHECK_NS - 1)
    assert policy.begins(BUSY_CHECK_NS), "it was busy for a moment only"
    loadavg(tmp_path, 3)
    assert policy.begins(BUSY_CHECK_NS + CORES_CHECK_NS - 1), "looked up rarely"
    assert not policy.begins(BUSY_CHECK_NS + CORES_CHECK_NS)
    assert policy.parks[SpinChoice.NO_SPARE_PROCESSOR] == 3


def test_a_machine_that_stays_busy_is_looked_at_ever_more_rarely(tmp_path: Path) -> None:
    path = Path(loadavg(tmp_path, 3))
    processors = SpareProcessors(str(path), processors=2)
    looks: list[int] = []
    for now_ns in range(0, 20 * CORES_CHECK_NS, BUSY_CHECK_NS // 2):
        before = processors._check_at_ns
        assert not processors.spare(now_ns)
        if processors._check_at_ns != before:
            looks.append(now_ns)
    pauses = [later - earlier for earlier, later in pairwise(looks)]
    assert pauses[0] == BUSY_CHECK_NS and pauses[-1] == CORES_CHECK_NS
    assert pauses == sorted(pauses) and len(looks) < 30
    loadavg(tmp_path, 2)
    spare_ns = 21 * CORES_CHECK_NS
    assert processors.spare(spare_ns)
    loadavg(tmp_path, 3)
    assert not processors.spare(spare_ns + CORES_CHECK_NS)
    loadavg(tmp_path, 2)
    assert processors.spare(spare_ns + CORES_CHECK_NS + BUSY_CHECK_NS), "from the beginning again"


@pytest.mark.parametrize("text", ["", "0.20", "0.2 0.2 0.1 x/80 1"])
def test_a_kernel_that_does_not_tell_counts_as_idle(tmp_path: Path, text: str) -> None:
    path = tmp_path / "loadavg"
    path.write_text(text)
    assert SpareProcessors(str(path), processors=1).spare(0)
    assert SpareProcessors(str(tmp_path / "none"), processors=1).spare(0)


def test_this_machine_tells() -> None:
    assert shared_processors() is shared_processors()
    assert isinstance(shared_processors().spare(0), bool)
    assert SpareProcessors().spare(0) in (True, False)
