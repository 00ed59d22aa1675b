"""The machine: whom it names for what, when it takes that back, and that all ranks decide alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.training.job.stragglers.machine import (
    Cause,
    Cleared,
    Entered,
    Moved,
    Named,
    Stepped,
    StragglerAction,
    StragglerMachine,
)
from zbmd.training.job.stragglers.samples import SAMPLE_NUMBERS, Field
from zbmd.transport.errors import LocalProtocolError

MS = 1e6
SLOW_FROM, STEPS = 50, 90
KEPT = (Field.KNOWN, Field.ROUND_TRIP, Field.LONGEST_TRIP, Field.INCARNATION)


def samples(draw: np.random.Generator, ranks: int, more: Mapping[Field, float], slow: int) -> np.ndarray:
    made = np.zeros((ranks, SAMPLE_NUMBERS))
    made[:, Field.KNOWN] = 1
    made[:, Field.PASSES] = 80 * MS * (1 + 0.01 * draw.standard_normal(ranks))
    made[:, Field.UPDATE], made[:, Field.DATA], made[:, Field.WAIT] = 15 * MS, 1 * MS, 30 * MS
    made[:, Field.ROUND_TRIP], made[:, Field.OTHERS] = 150, 2 * MS
    made[:, Field.LONGEST_TRIP] = 200
    made[:, Field.INCARNATION] = 1
    for field, value in more.items():
        made[slow, field] += value
    return made


def history(
    more: Mapping[Field, float], *, ranks: int = 4, slow: int = 2, until: int = STEPS
) -> list[StragglerAction]:
    draw, machine = np.random.default_rng(3), StragglerMachine()
    machine.handle(Entered(ranks=tuple(range(ranks)), shards=(2,) * ranks, alike=(0,) * ranks))
    found: list[StragglerAction] = []
    for step in range(1, STEPS + 60):
        is_slow = SLOW_FROM <= step < until
        found += machine.handle(Stepped(step, samples(draw, ranks, more if is_slow else {}, slow)))
        machine.check_invariants()
    return found


@pytest.mark.parametrize(
    ("more", "cause", "words"),
    [
        ({Field.PASSES: 12 * MS}, Cause.COMPUTE, "its processor or memory is slower"),
        ({Field.PASSES: 12 * MS, Field.DELAY: 12 * MS}, Cause.COMPUTE, "another process has its processor"),
        (
            {Field.PASSES: 12 * MS, Field.DELAY: 12 * MS, Field.THROTTLED: 12 * MS},
            Cause.COMPUTE,
            "the quota of its cgroup",
        ),
        ({Field.PASSES: 12 * MS, Field.STEAL: 12 * MS}, Cause.COMPUTE, "the hypervisor takes its processor"),
        ({Field.PASSES: 12 * MS, Field.OTHERS: 12 * MS}, Cause.RUNTIME, "its event loop or other threads"),
        ({Field.COLLECTOR: 12 * MS}, Cause.RUNTIME, "garbage collection takes"),
        ({Field.DATA: 12 * MS}, Cause.DATA, "it waits for its batches"),
        ({Field.CHECKPOINT: 12 * MS}, Cause.CHECKPOINT, "checkpoints hold it up"),
        ({Field.ROUND_TRIP: 5_000}, Cause.LINK, "round trips take 5150 us, where others' take 150 us"),
    ],
)
def test_a_slow_rank_is_named_once_with_its_cause_and_cleared(
    more: dict[Field, float], cause: Cause, words: str
) -> None:
    named, cleared = history(more)
    assert isinstance(named, Named) and isinstance(cleared, Cleared)
    assert (named.rank, named.cause, named.past, named.incarnation) == (2, cause, True, 1)
    assert words in named.evidence and SLOW_FROM + 7 <= named.step <= SLOW_FROM + 20
    assert 1.08 <= named.factor <= 1.35 and f"cause {cause.value}" in named.text
    assert (cleared.rank, cleared.cause) == (2, cause) and cleared.step >= STEPS


def together(
    ranks: int, *, trip: float = 1.0, wait_ns: float = 0.0, linked: int | None = None, jitter: float = 0.3
) -> list[StragglerAction]:
    """Return the reports on links whose round trips grow so many times, and waits by so much, at once."""
    draw, machine = np.random.default_rng(8), StragglerMachine()
    machine.handle(Entered(ranks=tuple(range(3, 3 + ranks)), shards=(2,) * ranks, alike=(0,) * ranks))
    found: list[StragglerAction] = []
    for step in range(1, STEPS + 60):
        made, is_slow = samples(draw, ranks, {}, 0), SLOW_FROM <= step < STEPS
        made[:, Field.ROUND_TRIP] *= 4 * (1 + jitter * draw.random(ranks)) * (trip if is_slow else 1.0)
        made[ranks if linked is None else linked :, Field.ROUND_TRIP] = 0
        made[:, Field.WAIT] += (wait_ns if is_slow else 0.0) + 4 * MS * draw.random(ranks)
        found += machine.handle(Stepped(step, made))
        machine.check_invariants()
    return found


@pytest.mark.parametrize(("ranks", "linked"), [(2, 2), (4, 4), (4, 2)])
def test_links_that_are_slow_at_both_ends_are_named_together_once(ranks: int, linked: int) -> None:
    """Of two hosts both ends are as slow, and nobody is slower than a peer."""
    named, cleared = together(ranks, trip=10.0, wait_ns=30 * MS, linked=linked)
    assert isinstance(named, Named) and isinstance(cleared, Cleared)
    assert named.together == cleared.together == tuple(range(3, 3 + linked)) and named.rank == 3
    assert (named.cause, cleared.cause) == (Cause.LINK, Cause.LINK)
    assert SLOW_FROM + 7 <= named.step <= SLOW_FROM + 20 and cleared.step >= STEPS
    assert 1.1 < named.factor < 1.4 and "all links between hosts (of ranks 3, 4" in named.text
    assert "round trips take" in named.evidence and cleared.text.endswith("no longer slow (cause link)")


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, {}),
        (2, {"jitter": 1.0}),
        (2, {"trip": 10.0}),
        (2, {"wait_ns": 30 * MS}),
        (4, {"trip": 10.0, "wait_ns": 30 * MS, "linked": 1}),
        (4, {"trip": 10.0, "wait_ns": 30 * MS, "linked": 0}),
    ],
    ids=["quiet", "noisy", "late answers alone", "waits alone", "one end", "one host"],
)
def test_links_are_not_blamed_for_one_sign_alone(ranks: int, more: Mapping[str, Any]) -> None:
    assert not together(ranks, **more)


Ends = dict[tuple[int, int], float]
"""Round trips between hosts, us, by pair. Each host has one rank; the number of its address is 10 more."""


def in_two_zones(hosts: int, far_us: float = 150.0) -> Ends:
    """Round trips where the first half of the hosts is in one zone, and `far_us` lie between both."""
    half = hosts // 2
    return {
        (a, b): far_us if (a < half) != (b < half) else 150.0
        for a in range(hosts)
        for b in range(a + 1, hosts)
    }


def on_links(
    trips: Ends,
    slow: Ends,
    *,
    ring: bool = True,
    wait_ns: float = 30 * MS,
    busy_us: float = 0.0,
    seed: int = 9,
) -> list[StragglerAction]:
    """Return the reports on hosts of which some links become slower by so much, us, for a while.

    ring: each host talks to its two neighbours alone. busy_us: all answers of all hosts are later for seconds
    at a time, by up to so much at once, and each host's by as much again.
    """
    draw, machine = np.random.default_rng(seed), StragglerMachine()
    hosts = max(b for _, b in trips) + 1
    names = tuple(f"host{number}" for number in range(hosts))
    machine.handle(Entered(ranks=tuple(range(hosts)), shards=(2,) * hosts, alike=(0,) * hosts, hosts=names))
    found: list[StragglerAction] = []
    for step in range(1, STEPS + 60):
        made, is_slow = samples(draw, hosts, {}, 0), SLOW_FROM <= step < STEPS
        of_all = busy_us * draw.random() if step % 20 < 10 else 0.0
        of_host = of_all * draw.random(hosts)
        for host in range(hosts):
            near = [(host + 1) % hosts, (host - 1) % hosts] if ring else [*range(hosts)]
            us = {}
            for other in (each for each in near if each != host):
                pair = (min(host, other), max(host, other))
                more = slow.get(pair, 0.0) if is_slow else 0.0
                base = trips[pair] * (1 + 0.3 * draw.random()) + of_all + of_host[other]
                us[other] = base + more
            far = max(us, key=lambda other: us[other])
            made[host, Field.ROUND_TRIP], made[host, Field.LONGEST_TRIP] = min(us.values()), us[far]
            made[host, Field.OWN_END], made[host, Field.PEER_END] = 10 + host, 10 + far
        made[:, Field.WAIT] += (wait_ns if is_slow else 0.0) + 4 * MS * draw.random(hosts)
        found += machine.handle(Stepped(step, made))
        machine.check_invariants()
    return found


@pytest.mark.parametrize("hosts", [3, 4, 16])
@pytest.mark.parametrize("busy_us", [0.0, 2_000.0])
def test_a_slow_link_between_two_of_many_hosts_is_named_once(hosts: int, busy_us: float) -> None:
    named, cleared = on_links(in_two_zones(hosts), {(1, 2): 20_000.0}, busy_us=busy_us)
    assert isinstance(named, Named) and isinstance(cleared, Cleared)
    assert named.together == cleared.together == (1, 2) and named.cause is cleared.cause is Cause.LINK
    assert SLOW_FROM + 7 <= named.step <= SLOW_FROM + 20 and cleared.step >= STEPS
    assert named.text.startswith(
        "the link between host1 (rank 1) and host2 (rank 2) is slow: a step takes 1."
    )
    assert " ms for a round trip, where others take " in named.evidence and 1.1 < named.factor < 1.4
    assert cleared.text == "the link between host1 (rank 1) and host2 (rank 2) is no longer slow (cause link)"


def test_a_link_between_two_zones_is_slow_once_it_is_slower_than_it_was() -> None:
    zones = in_two_zones(4, 5_000.0)
    assert not on_links(zones, {}) and not on_links(zones, {}, ring=False)
    for ring in (True, False):
        named, _ = on_links(zones, {(1, 2): 20_000.0}, ring=ring)
        assert isinstance(named, Named) and named.together == (1, 2)
    inside, _ = on_links(zones, {(0, 1): 30_000.0})
    assert isinstance(inside, Named) and inside.together == (0, 1)


def test_two_slow_links_of_one_host_are_named_both() -> None:
    found = on_links(in_two_zones(5), {(1, 2): 20_000.0, (1, 4): 24_000.0}, ring=False)
    assert {each.together for each in found if isinstance(each, Named)} == {(1, 2), (1, 4)}
    assert {each.together for each in found if isinstance(each, Cleared)} == {(1, 2), (1, 4)}


@pytest.mark.parametrize(
    ("hosts", "slow", "more"),
    [
        (4, {}, {"busy_us": 50_000.0}),
        (8, {}, {"busy_us": 50_000.0, "ring": False}),
        (4, {(1, 2): 20_000.0}, {"wait_ns": 0.0}),
        (4, {(0, 2): 20_000.0}, {}),
        (4, {}, {}),
    ],
    ids=[
        "all hosts are late",
        "all are, each to each",
        "nobody waits",
        "the ring has no such link",
        "waits alone",
    ],
)
def test_no_link_is_blamed_for_one_sign_alone(hosts: int, slow: Ends, more: Mapping[str, Any]) -> None:
    for seed in range(4):
        assert not on_links(in_two_zones(hosts), slow, seed=seed, **more), seed


def test_a_host_behind_a_slow_cable_is_named_and_none_of_its_links() -> None:
    """Only the cable: each of its links is as slow, and it has no faster one."""
    for hosts in (3, 5):
        slow = {pair: 20_000.0 for pair in in_two_zones(hosts) if 1 in pair}
        named, _ = on_links(in_two_zones(hosts), slow, ring=False)
        assert isinstance(named, Named) and (named.rank, named.cause, named.link) == (1, Cause.LINK, "")


def test_short_steps_are_judged_several_at_a_time() -> None:
    draw, machine = np.random.default_rng(3), StragglerMachine()
    machine.handle(Entered(ranks=(0, 1), shards=(2, 2), alike=(0, 0)))
    short = [field for field in Field if field not in KEPT]
    found: list[StragglerAction] = []
    for step in range(1, 900):
        made = samples(draw, 2, {Field.PASSES: 12 * MS} if step > 500 else {}, 1)
        made[:, short] /= 10  # steps of 12.6 ms
        found += machine.handle(Stepped(step, made))
    (named,) = found
    assert isinstance(named, Named) and named.rank == 1 and named.cause is Cause.COMPUTE
    assert 500 + 7 * 5 < named.step <= 500 + 20 * 5 and "1.2 ms a step more" in named.evidence


def test_nobody_is_named_who_is_not_slow_nor_when_all_are() -> None:
    assert not history({})
    assert not history({Field.PASSES: 12 * MS}, ranks=1, slow=0), "nobody waits for it"
    draw, machine = np.random.default_rng(4), StragglerMachine()
    machine.handle(Entered(ranks=(0, 1, 2), shards=(2, 2, 2), alike=(0, 0, 0)))
    for step in range(1, 150):
        made = samples(draw, 3, {}, 0)
        made[:, Field.PASSES] *= 1.5 if step > 75 else 1.0
        assert not machine.handle(Stepped(step, made))


def contended(draw: np.random.Generator, means: tuple[float, ...], slower: float) -> np.ndarray:
    """Samples of ranks of one busy machine: each waits for a processor, for so many ms a step on average."""
    made = samples(draw, len(means), {}, 0)
    delays = draw.gamma(2.0, np.array(means) / 2.0) * MS
    made[:, Field.DELAY] = delays
    made[:, Field.PASSES] += delays
    made[1, Field.PASSES] += slower
    return made


@pytest.mark.parametrize("seed", range(6))
def test_a_busy_machine_that_is_not_fair_for_some_seconds_names_nobody(seed: int) -> None:
    """The scheduler gives one rank less of its processors than others for a while, and then another one."""
    draw, machine = np.random.default_rng(seed), StragglerMachine()
    machine.handle(Entered(ranks=(0, 1), shards=(4, 4), alike=(0, 0)))
    for step in range(400):
        means = (1.0, 1.0) if step < 150 else (80.0, 140.0) if step % 80 < 40 else (120.0, 90.0)
        assert not machine.handle(Stepped(step, contended(draw, means, 0.0))), step


def test_on_a_busy_machine_a_rank_that_is_much_slower_is_named() -> None:
    draw, machine = np.random.default_rng(1), StragglerMachine()
    machine.handle(Entered(ranks=(0, 1), shards=(4, 4), alike=(0, 0)))
    named: list[StragglerAction] = []
    for step in range(400):
        busy = (30.0, 30.0) if step >= 100 else (1.0, 1.0)
        named += machine.handle(Stepped(step, contended(draw, busy, 150 * MS if step >= 300 else 0.0)))
    (one,) = named
    assert isinstance(one, Named) and one.rank == 1 and one.cause is Cause.COMPUTE and one.step <= 330


def test_ranks_with_other_work_are_compared_with_their_own_past_alone() -> None:
    machine = StragglerMachine()
    machine.handle(Entered(ranks=(0, 1), shards=(4, 4), alike=(0, 1)))
    draw = np.random.default_rng(5)
    for step in range(1, 120):
        made = samples(draw, 2, {}, 0)
        made[1, Field.PASSES] *= 1.6  # a stage with more layers
        assert not machine.handle(Stepped(step, made))


def test_ranks_with_other_shares_are_compared_by_the_shard() -> None:
    machine = StragglerMachine()
    machine.handle(Entered(ranks=(0, 1), shards=(4, 4), alike=(0, 0)))
    machine.handle(Moved((5, 3)))
    draw = np.random.default_rng(6)
    for step in range(1, 120):
        made = samples(draw, 2, {}, 0)
        made[:, Field.PASSES] *= np.array([5, 3]) / 4
        assert not machine.handle(Stepped(step, made))


def test_a_step_that_a_rank_has_not_measured_counts_for_nobody() -> None:
    machine = StragglerMachine()
    machine.handle(Entered(ranks=(0, 1), shards=(1, 1), alike=(0, 0)))
    draw = np.random.default_rng(7)
    for step in range(1, 100):
        made = samples(draw, 2, {Field.PASSES: 90 * MS}, 1)
        made[0] = 0
        assert not machine.handle(Stepped(step, made)) and not machine.scores.any()


def test_samples_of_other_ranks_than_those_of_the_view_are_refused() -> None:
    machine = StragglerMachine()
    machine.handle(Entered(ranks=(0, 1), shards=(1, 1), alike=(0, 0)))
    with pytest.raises(LocalProtocolError, match="2 ranks"):
        machine.handle(Stepped(1, np.zeros((3, SAMPLE_NUMBERS))))
    with pytest.raises(LocalProtocolError, match="each member"):
        machine.handle(Moved((1, 1, 1)))


@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(2, 5))
def test_all_ranks_decide_alike_whatever_they_are_told(seed: int, ranks: int) -> None:
    draw = np.random.default_rng(seed)
    machines = [StragglerMachine() for _ in range(2)]
    for machine in machines:
        machine.handle(Entered(ranks=tuple(range(ranks)), shards=(1,) * ranks, alike=(0,) * ranks))
    for step in range(1, 60):
        made = 10 ** draw.uniform(0, 12, (ranks, SAMPLE_NUMBERS))
        if draw.random() < 0.1:
            made[draw.integers(ranks), draw.integers(SAMPLE_NUMBERS)] = draw.choice([0.0, np.nan, np.inf])
        one, other = (machine.handle(Stepped(step, made.copy())) for machine in machines)
        assert one == other
        for machine in machines:
            machine.check_invariants()
