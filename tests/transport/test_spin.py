"""When a reader spins: only where it pays, and never for long."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.spin import (
    BUSY_CHECK_NS,
    CORES_CHECK_NS,
    MISSES_MAX,
    SpareProcessors,
    SpinChoice,
    SpinPolicy,
    shared_processors,
)

SPIN_NS = 30_000


def loadavg(folder: Path, runnable: int) -> str:
    path = folder / "loadavg"
    path.write_text(f"0.20 0.18 0.12 {runnable}/80 11206\n")
    return str(path)


@pytest.fixture
def spare(tmp_path: Path) -> SpareProcessors:
    return SpareProcessors(loadavg(tmp_path, 2), processors=2)


def spin_in_vain(policy: SpinPolicy, now_ns: int) -> bool:
    """One dry moment; whether it was spun through."""
    if not policy.begins(now_ns):
        return False
    assert policy.goes_on(now_ns + SPIN_NS - 1)
    assert not policy.goes_on(now_ns + SPIN_NS)
    return True


def test_a_reader_that_is_answered_goes_on_spinning(spare: SpareProcessors) -> None:
    policy = SpinPolicy(SPIN_NS, spare=spare, processors=2)
    for now_ns in range(0, 10_000_000, 10_000):
        assert policy.begins(now_ns)
        policy.paid()
    assert policy.choice is SpinChoice.SPIN


def test_spins_in_vain_become_rare_and_one_answer_brings_them_back(spare: SpareProcessors) -> None:
    policy = SpinPolicy(SPIN_NS, spare=spare, processors=2)
    spun = [spin_in_vain(policy, now_ns) for now_ns in range(0, 1_000_000, 1000)]
    assert spun[:2] == [True, True], "one miss is no reason yet"
    assert sum(spun[200:]) in (800 >> MISSES_MAX, (800 >> MISSES_MAX) + 1)
    assert policy.choice is SpinChoice.DID_NOT_PAY
    while not policy.begins(0):
        pass
    policy.paid()
    assert policy.begins(0)


@given(answers=st.lists(st.booleans(), max_size=300))
def test_what_is_lost_by_spinning_is_bounded(answers: list[bool]) -> None:
    """However the answers come, there is no run of vain spins without ever longer pauses in between."""
    policy = SpinPolicy(SPIN_NS, spare=SpareProcessors("/nonexistent", processors=2), processors=2)
    vain = quiet = 0
    for answered in answers:
        if not policy.begins(0):
            quiet += 1
            assert quiet <= (1 << MISSES_MAX) - 2
        elif answered:
            policy.paid()
            vain = quiet = 0
        else:
            assert not policy.goes_on(SPIN_NS)
            assert quiet == (0 if vain == 0 else (1 << min(vain, MISSES_MAX)) - 2)
            vain, quiet = vain + 1, 0


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
