"""Collectives of thousands of ranks on a modelled network."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zbmd.collectives.algorithms.catalogue import ROOTED, Operation, Request
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.execution.remote_sending import slot_payload_bytes
from zbmd.collectives.native._stepper import PUB_BYTES_MAX
from zbmd.collectives.scale._timeline import Timeline
from zbmd.collectives.scale.bounds import Fabric, Placement, bound_ns, least_ns, place
from zbmd.collectives.scale.roles import AT_SCALE, code_of, roles_of, schedule_of
from zbmd.collectives.scale.scaling import (
    ROUNDS,
    Recovery,
    ScaleMeasurement,
    eager_bytes_max,
    refusal,
    repeat_after_deaths,
    ring_ends,
    ring_instructions,
    simulate,
    walk,
)
from zbmd.transport.errors import UserError

FABRIC = Fabric()
ALL = [(operation, name) for operation, names in AT_SCALE.items() for name in names]
ALL_REDUCE = Operation.ALL_REDUCE
SIZES = (2, 3, 5, 8, 9, 16, 27)
MIB = 1 << 20


def all_reduce(
    algorithm: str, n: int, nbytes: int, fabric: Fabric, *, skew_ns: float = 0, seed: int = 0
) -> ScaleMeasurement:
    return simulate(ALL_REDUCE, algorithm, n, nbytes, fabric, skew_ns=skew_ns, seed=seed)


def requests(n: int, seed: int) -> list[Request]:
    """Of all algorithms that go to scale, over regular and irregular hosts, few and many chunks."""
    rng = random.Random(seed)
    ragged = tuple(sorted(rng.randrange(1 + n // 4) for _ in range(n)))
    found: list[Request] = []
    for operation, name in ALL:
        base = Request(operation=operation, algorithm=name, n=n)
        if operation is not ALL_REDUCE:
            found.append(replace(base, chunks=base.blocks))
            if name != "eager" and operation is not Operation.BARRIER:
                found.append(replace(base, chunks=3 * base.blocks, root=n - 1 if operation in ROOTED else 0))
    found += [Request(operation=ALL_REDUCE, algorithm=name, n=n, chunks=n) for name in ("direct", "eager")]
    found.append(Request(operation=Operation.ALL_REDUCE, algorithm="ring", n=n, chunks=2 * n))
    for chunks in (1, 2, 7):
        for name in ("tree", "double_tree"):
            found.append(Request(operation=Operation.ALL_REDUCE, algorithm=name, n=n, chunks=chunks))
    for hosts in (tuple(r // 8 for r in range(n)), tuple(r // 3 for r in range(n)), ragged):
        chunks = 2 * min(map(hosts.count, hosts)) * len(set(hosts))
        for name in ("hierarchical", "hierarchical_tree"):
            found.append(
                Request(operation=Operation.ALL_REDUCE, algorithm=name, n=n, chunks=chunks, hosts=hosts)
            )
    return found


@pytest.mark.parametrize("n", SIZES)
def test_ranks_of_one_kind_have_one_program(n: int, seed: int) -> None:
    for request in requests(n, seed):
        schedule, roles = schedule_of(request), roles_of(request)
        for rank in range(n):
            own = code_of(request, rank, roles[rank])
            assert np.array_equal(own, schedule.codes[schedule.which[rank]]), (request, rank)
            first = schedule.first
            for k, peer in enumerate(roles[rank].neighbours):
                assert schedule.peers[first[rank] + k] == peer
                assert schedule.peers[first[peer] + schedule.back[first[rank] + k]] == rank


@pytest.mark.parametrize("n", (8, 20, 133, 512))
@pytest.mark.parametrize("turns", (1, 3))
@pytest.mark.parametrize("operation", list(ROUNDS))
def test_the_ring_by_vectors_is_the_ring_by_events(operation: Operation, n: int, turns: int) -> None:
    placement, chunk_bytes = place(n, FABRIC), 3e5 / turns
    rng = np.random.default_rng(n)
    begin, nobody_dies = rng.uniform(0, 1e5, n), np.full(n, np.inf)
    request = Request(operation=operation, algorithm="ring", n=n, chunks=turns * n)
    ends, steps = walk(request, placement, chunk_bytes, begin, nobody_dies)
    vectors = ring_ends(operation, placement, chunk_bytes=chunk_bytes, turns_a_hop=turns, begin=begin)
    np.testing.assert_allclose(vectors, ends, rtol=1e-12)
    assert steps == ring_instructions(operation, n, turns) == schedule_of(request).instructions
    for share in (0.2, 0.9, 0.999) if n < 512 else (0.9,):
        dies = nobody_dies.copy()
        dies[rng.integers(n, size=2)] = share * ends.min()
        stopped, _ = walk(request, placement, chunk_bytes, begin, dies)
        vectors = ring_ends(
            operation, placement, chunk_bytes=chunk_bytes, turns_a_hop=turns, begin=begin, dies=dies
        )
        np.testing.assert_allclose(vectors, stopped, rtol=1e-12)


def test_a_small_ring_is_not_walked_by_vectors() -> None:
    with pytest.raises(ProgramError, match="one rank at a time"):
        ring_ends(ALL_REDUCE, place(4, FABRIC), chunk_bytes=1.0, turns_a_hop=1, begin=np.zeros(4))


@pytest.mark.parametrize(("operation", "algorithm"), ALL)
@pytest.mark.parametrize("ports", (1, 8))
def test_nothing_is_faster_than_its_bound(operation: Operation, algorithm: str, ports: int) -> None:
    fabric, simulated = Fabric(ports=ports), 0
    for n in (2, 7, 8, 9, 24, 64) if ports > 1 else (2, 9, 120):
        for nbytes in (1, 1024, MIB, 256 * MIB) if n < 64 else (1, 64 * MIB):
            if refusal(operation, algorithm, n, nbytes, fabric):
                continue
            simulated += 1
            found = simulate(operation, algorithm, n, nbytes, fabric)
            assert found.time_ns >= found.entered_ns
            assert found.time_ns >= max(found.bound_ns, found.least_ns), (n, nbytes)
            assert found.bound_ns >= 0 and found.instructions > 0
    assert simulated >= 3


@pytest.mark.parametrize(("name", "most"), [("tree", 2.0), ("hierarchical_tree", 2.5), ("double_tree", 2.5)])
def test_trees_come_near_their_bound_in_latency(name: str, most: float) -> None:
    # Up and down at one latency a level: the bound, the meeting of all, and what is posted.
    for n in (64, 512):
        found = all_reduce(name, n, 1024, FABRIC)
        assert found.time_ns - found.entered_ns < (most - 0.5) * found.bound_ns, name


@pytest.mark.parametrize("n", [16, 64, 512])
def test_reads_of_one_batch_are_asked_for_at_once(n: int) -> None:
    # A root that gathers waits for one round trip to the other hosts, and to let go, whatever their number.
    found = simulate(Operation.GATHER, "direct", n, n, FABRIC)
    # each of n - 1 questions and n - 1 good-byes is posted
    most_ns = 3 * FABRIC.far_ns + 2 * n * FABRIC.post_ns + 2 * FABRIC.near_ns
    assert found.time_ns - found.entered_ns < most_ns


def test_what_travels_with_descriptors_is_one_message() -> None:
    for operation in (Operation.GATHER, Operation.REDUCE):
        found = simulate(operation, "eager", 64, 64, FABRIC)
        assert found.entered_ns == 0 and found.time_ns < 1.5 * FABRIC.far_ns
    assert eager_bytes_max(64, FABRIC) == PUB_BYTES_MAX
    assert eager_bytes_max(4, Fabric(ranks_per_host=1)) == slot_payload_bytes(4) > PUB_BYTES_MAX
    assert "with descriptors" in refusal(Operation.BROADCAST, "eager", 64, PUB_BYTES_MAX + 1, FABRIC)
    assert not refusal(Operation.BROADCAST, "eager", 64, PUB_BYTES_MAX, FABRIC)


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    assert "99,990,000 pairs" in refusal(Operation.ALL_TO_ALL, "direct", 10_000, MIB, FABRIC)
    assert "no two ranks' programs" in refusal(Operation.REDUCE_SCATTER, "direct", 4096, MIB, FABRIC)
    assert not refusal(Operation.ALL_TO_ALL, "direct", 4096, MIB, FABRIC)
    with pytest.raises(ProgramError, match="99,990,000 pairs"):
        simulate(Operation.ALL_TO_ALL, "direct", 10_000, MIB, FABRIC)


@pytest.mark.parametrize("algorithm", ("ring", "hierarchical"))
def test_large_operations_come_near_their_bound(algorithm: str) -> None:
    # What is left is the entry, and what each chunk takes in own memory.
    found = all_reduce(algorithm, 256, 1 << 30, FABRIC)
    assert found.time_ns < 1.25 * found.bound_ns


def test_bandwidth_stays_as_hosts_are_added() -> None:
    few, many = (all_reduce("hierarchical", n, 1 << 30, FABRIC) for n in (64, 1024))
    assert many.bus_bytes_per_ns > 0.85 * few.bus_bytes_per_ns


def test_equal_seeds_make_equal_runs() -> None:
    one, same, other = (
        all_reduce("hierarchical_tree", 100, MIB, FABRIC, skew_ns=1e6, seed=seed) for seed in (5, 5, 6)
    )
    assert one == same and one.time_ns != other.time_ns


@pytest.mark.parametrize("n", [16, 60])
@pytest.mark.parametrize(("operation", "algorithm"), ALL)
def test_survivors_finish_what_a_death_has_stopped(
    operation: Operation, algorithm: str, seed: int, n: int
) -> None:
    recovery = Recovery()
    nbytes = 1024 if algorithm == "eager" else 0 if operation is Operation.BARRIER else MIB
    whole = simulate(operation, algorithm, n, nbytes, FABRIC)
    found = repeat_after_deaths(whole, FABRIC, deaths=3, recovery=recovery, seed=seed)
    assert len(found.dead) == 3 and found.again.n == n - 3
    assert operation not in ROOTED or 0 not in found.dead
    assert 0 <= found.stalled <= n - 3
    least_ns = recovery.agreed_ns(n - 3) + found.again.bound_ns
    assert found.recovered_ns == 0 if not found.stalled else found.recovered_ns > least_ns


def test_one_early_death_stops_every_rank_of_a_ring() -> None:
    placement = place(40, FABRIC)
    dies = np.full(40, np.inf)
    dies[17] = 0.0
    request = Request(operation=Operation.ALL_REDUCE, algorithm="ring", n=40, chunks=40)
    ends, _ = walk(request, placement, 1e3, np.zeros(40), dies)
    assert np.isnan(ends).all()


def test_survivors_stay_where_they_are() -> None:
    left = place(20, Fabric(ports=2)).without({0, 9})
    assert left.hosts == (0,) * 7 + (1,) * 7 + (2,) * 4
    assert left.ports[:3] == (1, 0, 1) and left.port_count == 6


def test_bounds_of_one_rank_and_of_one_host_have_no_network() -> None:
    alone = Placement((0,), (0,), FABRIC)
    assert least_ns(ALL_REDUCE, alone, MIB) == 0
    inside = Request(operation=Operation.ALL_REDUCE, algorithm="hierarchical", n=8, chunks=8, hosts=(0,) * 8)
    assert bound_ns(inside, place(8, FABRIC), MIB) < MIB / FABRIC.far_bytes_per_ns


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(ProgramError, match="choose from ring, tree"):
        roles_of(Request(operation=Operation.ALL_REDUCE, algorithm="swap", n=8))
    with pytest.raises(UserError, match="9 ports"):
        Fabric(ports=9)
    with pytest.raises(UserError, match="above 0"):
        Fabric(far_bytes_per_ns=0)
    whole = all_reduce("ring", 8, MIB, FABRIC)
    with pytest.raises(ValueError, match="8 deaths among 8"):
        repeat_after_deaths(whole, FABRIC, deaths=8, recovery=Recovery())


def test_a_timeline_checks_its_tables_and_runs_once() -> None:
    code = np.zeros((1, 12), np.int32)
    code[0, :3] = 1, 0, 3  # notify neighbour 3
    one, first = np.zeros(1, np.int32), np.array([0, 1])
    sound = {"near_ns": 1.0, "far_ns": 1.0, "post_ns": 1.0, "near_ns_per_byte": 1.0}
    sound |= {"far_ns_per_byte": 1.0, "own_ns_per_byte": 1.0, "chunk_bytes": 1.0}

    def timeline(code: Any, first: Any, peers: Any, back: Any, port: Any) -> Timeline:
        return Timeline([code], one, first, peers, back, one, port, ports=1, reads_ahead=1, **sound)

    with pytest.raises(ValueError, match="neighbour that rank 0 does not have"):
        timeline(code, np.array([0, 0]), one[:0], one[:0], one)
    with pytest.raises(ValueError, match="a neighbour that is none"):
        timeline(code, first, one + 7, one, one)
    with pytest.raises(ValueError, match="a neighbour that is none"):
        timeline(code, first, one, one + 1, one)
    with pytest.raises(ValueError, match="order of the ranks"):
        timeline(code, first + 1, one, one, one)
    with pytest.raises(ValueError, match="port is out of bounds"):
        timeline(code, first, one, one, one + 1)
    empty = timeline(code[:0], first, one, one, one)
    assert empty.run(np.array([7.0]), np.array([np.inf]))[0] == [7.0]
