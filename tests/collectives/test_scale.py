"""Collectives of thousands of ranks on a modelled network."""

from __future__ import annotations

import random

import numpy as np
import pytest

from zbmd.collectives._timeline import Timeline
from zbmd.collectives.algorithms import Operation, Request
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.scale.bounds import bound_ns, least_ns
from zbmd.collectives.scale.fabric import Fabric
from zbmd.collectives.scale.flat_ring import ring_ends, ring_instructions
from zbmd.collectives.scale.placement import Placement, place
from zbmd.collectives.scale.roles import AT_SCALE, roles_of
from zbmd.collectives.scale.scaling import Recovery, all_reduce, repeat_after_deaths, walk
from zbmd.collectives.scale.schedules import code_of, schedule_of
from zbmd.transport.errors import UserError

FABRIC = Fabric()
SIZES = (2, 3, 5, 8, 9, 16, 24, 33)
MIB = 1 << 20


def requests(n: int, seed: int) -> list[Request]:
    """Of all algorithms that go to scale, over regular and irregular hosts, few and many chunks."""
    rng = random.Random(seed)
    ragged = tuple(sorted(rng.randrange(1 + n // 4) for _ in range(n)))
    found = [Request(operation=Operation.BARRIER, algorithm="dissemination", n=n)]
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
            for k, peer in enumerate(roles[rank].neighbours):
                assert schedule.peers[rank, k] == peer
                assert schedule.peers[peer, schedule.back[rank, k]] == rank


@pytest.mark.parametrize("n", (8, 16, 20, 64, 133, 512))
@pytest.mark.parametrize("turns", (1, 3))
def test_the_ring_by_vectors_is_the_ring_by_events(n: int, turns: int) -> None:
    placement, chunk_bytes = place(n, FABRIC), 3e5 / turns
    begin = np.random.default_rng(n).uniform(0, 1e5, n)
    request = Request(operation=Operation.ALL_REDUCE, algorithm="ring", n=n, chunks=turns * n)
    ends, steps = walk(request, placement, chunk_bytes, begin, np.full(n, np.inf))
    vectors = ring_ends(placement, chunk_bytes=chunk_bytes, turns_a_hop=turns, begin=begin)
    np.testing.assert_allclose(vectors, ends, rtol=1e-12)
    assert steps == ring_instructions(n, turns) == schedule_of(request).instructions


def test_a_small_ring_is_not_walked_by_vectors() -> None:
    with pytest.raises(ProgramError, match="one rank at a time"):
        ring_ends(place(4, FABRIC), chunk_bytes=1.0, turns_a_hop=1, begin=np.zeros(4))


@pytest.mark.parametrize("algorithm", AT_SCALE)
@pytest.mark.parametrize("ports", (1, 8))
def test_nothing_is_faster_than_its_bound(algorithm: str, ports: int) -> None:
    fabric = Fabric(ports=ports)
    for n in (2, 7, 8, 9, 24, 64, 200):
        for nbytes in (1, 4096, MIB, 256 * MIB) if n < 64 else (1, 64 * MIB):
            found = all_reduce(algorithm, n, nbytes, fabric)
            assert found.time_ns >= found.entered_ns
            assert found.time_ns >= max(found.bound_ns, found.least_ns), (n, nbytes)
            assert found.bound_ns >= 0 and found.instructions > 0


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


@pytest.mark.parametrize("algorithm", AT_SCALE)
def test_survivors_finish_what_a_death_has_stopped(algorithm: str, seed: int) -> None:
    recovery = Recovery()
    for n in (16, 60):
        whole = all_reduce(algorithm, n, MIB, FABRIC)
        found = repeat_after_deaths(whole, FABRIC, deaths=3, recovery=recovery, seed=seed)
        assert len(found.dead) == 3 and found.again.n == n - 3
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
    assert least_ns(alone, MIB) == 0
    inside = Request(operation=Operation.ALL_REDUCE, algorithm="hierarchical", n=8, chunks=8, hosts=(0,) * 8)
    assert bound_ns(inside, place(8, FABRIC), MIB) < MIB / FABRIC.far_bytes_per_ns


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(ProgramError, match="choose from ring, tree"):
        roles_of(Request(operation=Operation.ALL_REDUCE, algorithm="direct", n=8))
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
    one = np.zeros(1, np.int32)
    sound = {"near_ns": 1.0, "far_ns": 1.0, "post_ns": 1.0, "near_ns_per_byte": 1.0}
    sound |= {"far_ns_per_byte": 1.0, "own_ns_per_byte": 1.0, "chunk_bytes": 1.0}
    with pytest.raises(ValueError, match="neighbour that rank 0 does not have"):
        Timeline([code], one, np.full((1, 1), -1, np.int32), one[:, None], one, one, ports=1, **sound)
    with pytest.raises(ValueError, match="port is out of bounds"):
        Timeline([code], one, one[:, None], one[:, None], one, one + 1, ports=1, **sound)
    empty = Timeline([code[:0]], one, one[:, None], one[:, None], one, one, ports=1, **sound)
    assert empty.run(np.array([7.0]), np.array([np.inf]))[0] == [7.0]
