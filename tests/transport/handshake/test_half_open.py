"""Places at the door: bounded, and a crowd drives out itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.handshake.acceptor import Admit, HalfOpen, WaitUntil

FAIR_NS = 100


def full(sources: str) -> HalfOpen[int]:
    """One connection a letter, one a ns, from the source that the letter names."""
    table: HalfOpen[int] = HalfOpen(places=len(sources), fair_ns=FAIR_NS)
    for at_ns, source in enumerate(sources):
        assert table.decide(at_ns) == Admit()
        table.enter(at_ns, source, at_ns)
    return table


def test_the_oldest_of_the_most_crowded_source_goes_first() -> None:
    table = full("habbcbc")
    assert table.decide(1000) == Admit(evict=2, source="b")
    table.enter(7, "c", 1000)
    assert table.decide(1000) == Admit(evict=4, source="c"), "c has three by now"
    table.enter(8, "a", 1000)
    assert table.decide(1000) == Admit(evict=1, source="a"), "of equals the one that waits longest"
    assert 0 in table


def test_none_goes_before_its_fair_time_and_another_may_leave_meanwhile() -> None:
    table = full("aab")
    assert table.decide(FAIR_NS - 1) == WaitUntil(until_ns=FAIR_NS)
    table.leave(2)
    table.leave(2)
    assert table.decide(FAIR_NS - 1) == Admit()


def test_one_honest_connection_outlives_any_crowd_of_others() -> None:
    table: HalfOpen[int] = HalfOpen(places=4, fair_ns=FAIR_NS)
    table.enter(0, "honest", 0)
    for at_ns in range(1, 10_000):
        decision = table.decide(at_ns)
        if isinstance(decision, Admit):
            assert decision.evict != 0
            table.enter(at_ns, "stranger", at_ns)
    assert 0 in table
    assert len(table) == 4


@given(
    places=st.integers(1, 5),
    knocks=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.booleans()), max_size=60),
)
def test_the_bound_holds_and_the_evicted_were_of_a_largest_source(
    places: int, knocks: list[tuple[str, int, bool]]
) -> None:
    table: HalfOpen[int] = HalfOpen(places=places, fair_ns=FAIR_NS)
    inside: dict[int, tuple[str, int]] = {}
    now_ns = 0
    for key, (source, pause_ns, leaves) in enumerate(knocks):
        now_ns += pause_ns
        decision = table.decide(now_ns)
        if isinstance(decision, WaitUntil):
            assert len(inside) == places
            assert now_ns < decision.until_ns <= now_ns + FAIR_NS
            continue
        if decision.evict is not None:
            gone, since_ns = inside.pop(decision.evict)
            counts = [sum(s == other for s, _ in inside.values()) for other in "abc"]
            assert sum(s == gone for s, _ in inside.values()) + 1 >= max(counts)
            assert now_ns - since_ns >= FAIR_NS
            assert all(since_ns <= at_ns for s, at_ns in inside.values() if s == gone)
        table.enter(key, source, now_ns)
        inside[key] = (source, now_ns)
        if leaves:
            table.leave(key)
            del inside[key]
        table.check_invariants()
