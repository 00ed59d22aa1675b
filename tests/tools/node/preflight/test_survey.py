"""The survey of a job's hosts: in any network with some bad hosts, these are named, and no other."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.tools.node.preflight.survey import (
    ROUND_NS,
    Began,
    HostSpeed,
    LinkSpeed,
    LinkSurvey,
    MeasurePairs,
    Pair,
    PairMeasured,
    Surveyed,
)
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

GOOD = LinkSpeed(bytes_per_s=1e9, trip_ns=100_000)
HOST = HostSpeed(flops_per_s=1e11, memory_per_s=1e10)
FAULTS: dict[str, LinkSpeed | str | None] = {
    "slow": LinkSpeed(bytes_per_s=1e8, trip_ns=100_000),
    "late": LinkSpeed(bytes_per_s=1e9, trip_ns=20_000_000),
    "refuses": "refused",
    "silent": None,
}


class Network:
    """Hosts with faults, which a survey measures in an order that the seed chooses."""

    def __init__(self, hosts: int, bad: dict[int, str], seed: int = 0) -> None:
        self.hosts, self.bad, self.random = hosts, bad, random.Random(seed)
        self.paths: dict[Pair, str] = {}
        self.speeds = dict.fromkeys(range(hosts), HOST)
        self.until_ns = 1 << 62
        self.rounds: list[tuple[Pair, ...]] = []

    def survey(self) -> Surveyed:
        machine, now_ns = LinkSurvey(), 0
        names = tuple(f"host{n}" for n in range(self.hosts))
        actions = machine.handle(
            Began(hosts=names, speeds=self.speeds, until_ns=self.until_ns), now_ns=now_ns
        )
        while True:
            (measure, *rest) = actions
            if isinstance(measure, Surveyed):
                assert machine.is_over and not rest
                self.ended_ns = now_ns
                return measure
            assert isinstance(measure, MeasurePairs) and [type(one) for one in rest] == [SetTimer]
            places = [place for pair in measure.pairs for place in pair]
            assert len(set(places)) == len(places), "a host is in one pair at a time"
            self.rounds.append(measure.pairs)
            actions = []
            for pair in self.random.sample(measure.pairs, len(measure.pairs)):
                assert not actions
                found = self.found(pair)
                if found is not None:
                    event = PairMeasured(pair=pair, found=found)
                    actions = machine.handle(event, now_ns=now_ns)
            if not actions:
                (timer,) = rest
                assert isinstance(timer, SetTimer)
                due_ns = timer.at_ns
                assert due_ns == min(now_ns + ROUND_NS, self.until_ns)
                assert machine.handle(TimerFired(), now_ns=due_ns - 1) == []
                now_ns = due_ns
                actions = machine.handle(TimerFired(), now_ns=now_ns)

    def found(self, pair: Pair) -> LinkSpeed | str | None:
        faults = [self.bad[place] for place in pair if place in self.bad] or [self.paths.get(pair, "")]
        if faults == [""]:
            factor = self.random.uniform(0.6, 1.4)  # a noisy network
            return LinkSpeed(bytes_per_s=GOOD.bytes_per_s * factor, trip_ns=round(GOOD.trip_ns * factor))
        return FAULTS[self.random.choice(faults)]


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Of 4 to 32 hosts with up to a third of their pairs bad, at least one of them fast."""
    hosts = draw(st.integers(4, 32))
    places = draw(st.permutations(range(hosts)))[: draw(st.integers(0, max(1, hosts // 6)))]
    bad = {place: draw(st.sampled_from(sorted(FAULTS))) for place in places}
    return Network(hosts, bad, draw(st.integers(0, 1 << 30)))


@given(networks())
def test_bad_hosts_are_named_and_no_other(network: Network) -> None:
    verdict = network.survey()
    assert {one.place for one in verdict.bad} == set(network.bad)
    assert all("its link to host" in one.reason for one in verdict.bad) and not verdict.notes
    measured = [pair for pairs in network.rounds for pair in pairs]
    assert len(measured) <= network.hosts + 2


def test_a_bad_path_between_good_hosts_excludes_none_of_them() -> None:
    network = Network(6, {})
    network.paths[0, 1] = "slow"
    verdict = network.survey()
    assert not verdict.bad
    assert [note.partition(":")[0] for note in verdict.notes] == ["the link between host0 and host1 is bad"]
    assert "with others both are fast" in verdict.notes[0]


@pytest.mark.parametrize("fault", ["refuses", "silent"])
def test_of_two_hosts_the_pair_is_named(fault: str) -> None:
    verdict = Network(2, {1: fault}).survey()
    assert not verdict.bad and not verdict.usable and "host0 and host1 is bad" in verdict.notes[0]
    assert "which of them is at fault is not known" in verdict.notes[0]
    assert Network(2, {}).survey() == Surveyed(bad=(), notes=())


@pytest.mark.parametrize("field", ["flops_per_s", "memory_per_s"])
def test_a_host_that_is_slower_than_the_others_is_named(field: str) -> None:
    network = Network(5, {})
    slow = {"flops_per_s": HOST.flops_per_s, "memory_per_s": HOST.memory_per_s}
    slow[field] *= 0.3
    network.speeds[3] = HostSpeed(**slow)
    (bad,) = network.survey().bad
    assert bad.place == 3 and bad.reason.startswith("its ")
    two = Network(2, {})
    two.speeds[1] = HostSpeed(**slow)
    assert not two.survey().bad, "nothing says which of two is usual"


def test_what_comes_too_late_or_twice_changes_nothing() -> None:
    machine = LinkSurvey()
    measured = PairMeasured(pair=(0, 1), found=GOOD)
    machine.handle(Began(hosts=("a", "b", "c"), speeds={}, until_ns=1 << 62), now_ns=0)
    (again, _) = machine.handle(measured, now_ns=1)
    assert isinstance(again, MeasurePairs) and again.pairs == ((0, 2),)
    assert machine.handle(measured, now_ns=2) == []
    assert machine.handle(PairMeasured(pair=(0, 2), found=GOOD), now_ns=3) == [Surveyed(bad=(), notes=())]
    assert (
        machine.handle(measured, now_ns=4) == [] and machine.handle(TimerFired(), now_ns=9 * ROUND_NS) == []
    )
    with pytest.raises(LocalProtocolError):
        machine.handle(Began(hosts=("a", "b"), speeds={}, until_ns=1 << 62), now_ns=5)
    with pytest.raises(LocalProtocolError):
        LinkSurvey().handle(Began(hosts=("a",), speeds={}, until_ns=1 << 62), now_ns=0)


@pytest.mark.parametrize("silent", [{0: "silent", 2: "silent"}, {4: "silent", 0: "silent", 7: "silent"}])
def test_a_survey_ends_in_time_and_what_was_not_measured_by_then_is_not_good(silent: dict[int, str]) -> None:
    network = Network(9, silent)
    network.until_ns = ROUND_NS + ROUND_NS // 2
    verdict = network.survey()
    assert set(silent) <= {one.place for one in verdict.bad}
    assert network.ended_ns <= network.until_ns
