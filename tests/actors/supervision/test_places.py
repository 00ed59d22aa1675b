"""The placement of supervised children: the machine of places, by cases and by any history."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.process_pool.placement import (
    Assigned,
    Placement,
    PlacementMachine,
    PlacementState,
    Probe,
    Probed,
    Quarantined,
    QuarantineEnded,
    Refused,
    Released,
    Reopened,
    Wanted,
)
from zbmd.transport.errors import LocalProtocolError

SECOND_NS = 1_000_000_000


class World:
    """A machine and its clock."""

    def __init__(self, names: str, *, capacity: int = 1, failures: int = 2) -> None:
        self.machine = PlacementMachine(
            [Placement(name=name, capacity=capacity) for name in names],
            failures=failures,
            period_ns=60 * SECOND_NS,
            quarantine_ns=5 * SECOND_NS,
        )
        self.now_ns = 0

    def want(self, child: str) -> str:
        (action,) = self.machine.handle(Wanted(child=child), now_ns=self.now_ns)
        self.machine.check_invariants()
        return action.place if isinstance(action, Assigned) else "-"

    def ends(self, child: str, *, failed: bool = True) -> list[str]:
        actions = self.machine.handle(Released(child=child, failed=failed, reason="test"), now_ns=self.now_ns)
        self.machine.check_invariants()
        return [f"{a.place} until {a.until_ns // SECOND_NS}" for a in actions if isinstance(a, Quarantined)]

    def probe(self, place: str, problem: str = "") -> list[str]:
        assert self.machine.handle(QuarantineEnded(place=place), now_ns=self.now_ns) == [Probe(place=place)]
        (action,) = self.machine.handle(Probed(place=place, problem=problem), now_ns=self.now_ns)
        self.machine.check_invariants()
        return (
            [f"{place} until {action.until_ns // SECOND_NS}"]
            if isinstance(action, Quarantined)
            else [f"{type(action).__name__}"]
        )


def test_children_spread_and_go_elsewhere_when_they_fail() -> None:
    w = World("abc", capacity=2)
    assert [w.want(child) for child in "12345"] == ["a", "b", "c", "a", "b"]
    assert w.ends("1") == [] and w.want("1") == "c", "not where it failed"
    assert w.want("6") == "a" and w.want("7") == "-", "all are full"
    w.ends("2", failed=False)
    assert w.want("2") == "b", "it did not fail there"


def test_one_place_is_better_than_none() -> None:
    w = World("a", failures=3)
    assert w.want("1") == "a"
    w.ends("1")
    assert w.want("1") == "a"


def test_a_place_where_children_fail_is_in_quarantine_until_a_probe_finds_it_healthy() -> None:
    w = World("ab")
    assert w.want("x") == "a" and w.ends("x") == []
    assert w.want("y") == "a" and w.ends("y") == ["a until 5"]
    assert w.want("z") == "b" and w.want("x") == "-"
    assert w.machine.states == {"a": PlacementState.QUARANTINED, "b": PlacementState.OPEN}
    w.now_ns = 5 * SECOND_NS
    assert w.probe("a", "no answer") == ["a until 15"], "twice as long"
    w.now_ns = 15 * SECOND_NS
    assert w.probe("a", "no answer") == ["a until 35"]
    w.now_ns = 35 * SECOND_NS
    assert w.probe("a") == [Reopened.__name__]
    assert w.want("x") == "a"


def test_failures_long_ago_do_not_count() -> None:
    w = World("a", failures=2)
    w.want("1")
    assert w.ends("1") == []
    w.now_ns = 61 * SECOND_NS
    w.want("1")
    assert w.ends("1") == []
    w.want("1")
    assert w.ends("1") == ["a until 66"]


@given(seed=st.integers(0, 2**64 - 1))
def test_any_history_keeps_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    w = World("abcd"[: rng.randint(1, 4)], capacity=rng.randint(1, 3), failures=rng.randint(1, 3))
    placed, quarantined = dict[str, str](), set[str]()
    for _ in range(rng.randint(0, 120)):
        w.now_ns += rng.randint(0, 30 * SECOND_NS)
        dice, child = rng.random(), rng.choice("uvwxyz")
        if dice < 0.5 and child not in placed:
            place = w.want(child)
            assert place not in quarantined
            if place != "-":
                placed[child] = place
            else:
                taken = [p for p in placed.values() if p not in quarantined]
                free = [p for p in w.machine.states if p not in quarantined]
                assert len(taken) == len(free) * w.machine._places["a"].place.capacity
        elif dice < 0.85 and placed:
            child = rng.choice(sorted(placed))
            del placed[child]
            quarantined |= {text.split()[0] for text in w.ends(child, failed=rng.random() < 0.7)}
        elif quarantined:
            place, healthy = rng.choice(sorted(quarantined)), rng.random() < 0.6
            w.probe(place, "" if healthy else "sick")
            if healthy:
                quarantined.discard(place)
    assert {name for name, s in w.machine.states.items() if s is not PlacementState.OPEN} == quarantined


def test_misuse_is_told() -> None:
    w = World("a")
    w.want("1")
    for event in (Wanted(child="1"), Released(child="2", failed=True, reason=""), QuarantineEnded(place="a")):
        with pytest.raises(LocalProtocolError):
            w.machine.handle(event, now_ns=0)
    (refused,) = w.machine.handle(Wanted(child="2"), now_ns=0)
    assert refused == Refused(child="2", reason="no place for 2: a open with 1")
    for places in ([], [Placement(name="a"), Placement(name="a")], [Placement(name="a", capacity=0)]):
        with pytest.raises(LocalProtocolError):
            PlacementMachine(places)
