"""The progress machine: what is stuck is reported once, after its limit, and never for want of looks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.hangs.progress import (
    LATE_LOOKS,
    LOOKS,
    TRACKED_MAX,
    Looked,
    MovedOn,
    ProgressAction,
    ProgressMachine,
    Sample,
    Stuck,
    look_ns,
)
from zbmd.transport.errors import LocalProtocolError

DEADLINE_NS = 1600
LOOK_NS = 100


class Watch:
    """A machine on a clock of its own."""

    def __init__(self) -> None:
        self.machine = ProgressMachine(deadline_ns=DEADLINE_NS, look_ns=LOOK_NS)
        self.now_ns = 0

    def look(self, *samples: Sample, allowed_ns: int = 0, after_ns: int = LOOK_NS) -> list[ProgressAction]:
        self.now_ns += after_ns
        actions = self.machine.handle(Looked(samples=samples, allowed_ns=allowed_ns), now_ns=self.now_ns)
        self.machine.check_invariants()
        return actions

    def looks_until_told(self, *samples: Sample, allowed_ns: int = 0) -> int:
        for number in range(1, 1000):
            if self.look(*samples, allowed_ns=allowed_ns):
                return number
        return 0


def test_what_keeps_its_mark_is_told_of_once_and_again_when_it_goes_on() -> None:
    watch, still, moved = Watch(), Sample(key="a", mark=1), Sample(key="a", mark=2)
    assert watch.looks_until_told(still) == 1 + DEADLINE_NS // LOOK_NS
    assert watch.machine.is_stuck("a")
    assert all(not watch.look(still) for _ in range(100))
    assert watch.look(moved) == [MovedOn(key="a")]
    assert watch.machine.still_ns("a") == 0
    assert watch.looks_until_told(moved) == DEADLINE_NS // LOOK_NS
    assert watch.look() == [MovedOn(key="a")]
    assert not watch.look()


def test_each_has_its_own_limit_and_an_allowance_holds_for_all() -> None:
    quick, slow = Sample(key="quick", mark=0, limit_ns=200), Sample(key="slow", mark=0, limit_ns=10_000)
    assert Watch().looks_until_told(quick, slow) == 1 + 2
    assert Watch().looks_until_told(slow) == 1 + 100
    assert Watch().looks_until_told(quick, allowed_ns=5000) == 1 + 50


def test_a_machine_that_slept_accuses_nobody() -> None:
    watch, sample = Watch(), Sample(key="a", mark=1)
    watch.look(sample)
    assert not watch.look(sample, after_ns=1000 * DEADLINE_NS)
    assert watch.machine.still_ns("a") == LATE_LOOKS * LOOK_NS


def test_more_than_can_be_watched_wait_for_their_turn() -> None:
    watch = Watch()
    first = [Sample(key=f"a{i}", mark=0) for i in range(TRACKED_MAX)]
    watch.look(*first)
    watch.look(*first, Sample(key="b", mark=0))
    for _ in range(3):
        watch.look(*first[1:], Sample(key="b", mark=0))
    assert watch.machine.still_ns("b") > 0


def test_misuse_is_named() -> None:
    watch = Watch()
    watch.look()
    with pytest.raises(LocalProtocolError, match="behind one at"):
        watch.look(after_ns=-1)
    with pytest.raises(LocalProtocolError, match="does not fit"):
        ProgressMachine(deadline_ns=1, look_ns=2)


def test_looks_are_many_and_never_rare() -> None:
    assert look_ns(1_600_000_000) == 1_600_000_000 // LOOKS
    assert look_ns(60_000_000_000) == 1_000_000_000


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(1, 3 * LOOK_NS)), min_size=1, max_size=80
    )
)
def test_told_if_and_only_if_still_for_its_limit(steps: list[tuple[str, bool, int]]) -> None:
    """Against a plain model: the time since the last change of each mark, in looks that are on time."""
    watch, marks, still = Watch(), dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    told: set[str] = set()
    watch.look(*(Sample(key=key, mark=0) for key in marks))
    for key, moves, after_ns in steps:
        still = {name: age_ns + after_ns for name, age_ns in still.items()}
        if moves:
            marks[key] += 1
            still[key] = 0
        actions = watch.look(*(Sample(key=k, mark=m) for k, m in marks.items()), after_ns=after_ns)
        expected = {name for name, age_ns in still.items() if age_ns >= DEADLINE_NS}
        assert {a.key for a in actions if isinstance(a, Stuck)} == expected - told
        assert {a.key for a in actions if isinstance(a, MovedOn)} == told - expected
        told = expected
