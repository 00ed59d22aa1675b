"""SIGKILL at every instruction of small programs, in real processes.

A survivor ends with the right result or with a typed error, never with a mixed result called complete;
then the survivors form the next epoch's group on the same segments and it works.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.processes.program_points import points_of

from zbmd.collectives.algorithms.shard_tree import assign_shards, reduce_shards, shard_tree_nodes
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.errors import MembersLost, OperationAborted
from zbmd.collectives.native._program import READ

RunRanks = Callable[..., list[Any]]
Array = NDArray[np.float32]
COUNT = 1_000
SHARDS = 4


def inputs(n: int) -> list[Array]:
    return [np.random.default_rng(rank).standard_normal(COUNT).astype(np.float32) for rank in range(n)]


def all_reduce(algorithm: str) -> Callable[[Any, Communicator], Array]:
    def call(p: Any, c: Communicator) -> Array:
        x = p.segment.arena.from_array(inputs(c.size)[c.place])
        return c.all_reduce(x, algorithm=algorithm, deadline_ns=p.soon())

    return call


def eager(p: Any, c: Communicator) -> Array:
    x = inputs(c.size)[c.place][:100].copy()
    return c.all_reduce(x, algorithm="eager", deadline_ns=p.soon())


def read(p: Any, c: Communicator) -> Array:
    """Two programs to choose from, of which the one that reads in place is taken."""
    c._executor.native.always(READ)
    x = p.segment.arena.from_array(inputs(c.size)[c.place])
    return c.all_reduce(x, deadline_ns=p.soon())


def put_after_all(p: Any, c: Communicator) -> Array:
    """The same, but for a rank whose array lies elsewhere."""
    c._executor.native.always(READ)
    x = inputs(c.size)[c.place]
    return c.all_reduce(p.segment.arena.from_array(x) if c.place else x.copy(), deadline_ns=p.soon())


def shard_tree(p: Any, c: Communicator) -> Array:
    assignment = assign_shards(SHARDS, c.size)
    data = inputs(SHARDS)
    nodes = shard_tree_nodes(SHARDS, *assignment[c.place])
    partials = {(lo, hi): p.segment.arena.from_array(reduce_shards(data[lo:hi])) for lo, hi in nodes}
    out = p.segment.arena.empty(COUNT)
    return c.all_reduce_shards(partials, out, shards=SHARDS, assignment=assignment, deadline_ns=p.soon())


def shared_reduce(p: Any, c: Communicator) -> Array:
    x = p.segment.arena.from_array(inputs(c.size)[c.place])
    total = c.reduce(x, c.members[-1], algorithm="shared", deadline_ns=p.soon())
    return np.zeros(0, np.float32) if total is None else total


def tree_broadcast(p: Any, c: Communicator) -> Array:
    x = p.segment.arena.from_array(inputs(c.size)[c.place])
    return c.broadcast(x, c.members[-1], algorithm="tree", deadline_ns=p.soon())


def ring_all_gather(p: Any, c: Communicator) -> Array:
    return c.all_gather(inputs(c.size)[c.place], algorithm="ring", deadline_ns=p.soon())


def barrier(p: Any, c: Communicator) -> Array:
    c.barrier(deadline_ns=p.soon())
    return np.zeros(0, np.float32)


OPERATIONS: dict[str, Callable[[Any, Communicator], Array]] = {
    "direct": all_reduce("direct"),
    "swap": all_reduce("swap"),
    "ring": all_reduce("ring"),
    "halving_doubling": all_reduce("halving_doubling"),
    "double_tree": all_reduce("double_tree"),
    "eager": eager,
    "shard_tree": shard_tree,
    "tree_broadcast": tree_broadcast,
    "shared_reduce": shared_reduce,
    "ring_all_gather": ring_all_gather,
    "barrier": barrier,
}


OPERATIONS_OF_TWO = {"read": read, "put_after_all": put_after_all}


@pytest.mark.parametrize(
    ("name", "n"),
    [(name, n) for n in (2, 3) for name in OPERATIONS if (name, n) != ("halving_doubling", 2)]
    + [("direct", 4), ("shard_tree", 4), ("eager", 4)]
    + [("read", 2), ("put_after_all", 2)],
)
def test_a_kill_at_any_instruction_leaves_no_mixed_result(run_ranks: RunRanks, name: str, n: int) -> None:
    kill_at_every_point(run_ranks, (OPERATIONS | OPERATIONS_OF_TWO)[name], n)


@pytest.mark.parametrize(
    ("name", "hosts"),
    [(name, (0, 1)) for name in ("ring", "eager", "tree_broadcast", "barrier")]
    + [("shard_tree", (0, 0, 1)), ("direct", (0, 1, 2))],
)
def test_nor_does_it_between_hosts(run_ranks: RunRanks, name: str, hosts: tuple[int, ...]) -> None:
    kill_at_every_point(partial(run_ranks, hosts=hosts), OPERATIONS[name], len(hosts))


@pytest.mark.parametrize(
    ("name", "hosts"), [*((name, (0, 0)) for name in OPERATIONS_OF_TWO), ("eager", (0, 1))]
)
def test_nor_does_it_in_a_call_by_the_lane(run_ranks: RunRanks, name: str, hosts: tuple[int, ...]) -> None:
    operation = (OPERATIONS | OPERATIONS_OF_TWO)[name]
    kill_at_every_point(partial(run_ranks, hosts=hosts), operation, 2, calm=1)


@pytest.mark.parametrize(
    ("name", "hosts"),
    [(name, (0, 0)) for name in ("direct", "swap", "eager", *OPERATIONS_OF_TWO)] + [("ring", (0, 1))],
)
def test_nobody_dies_behind_the_last_point(run_ranks: RunRanks, name: str, hosts: tuple[int, ...]) -> None:
    """Neither in a first call nor in one by the fast path: a sweep up to the last point tries them all."""
    operation = (OPERATIONS | OPERATIONS_OF_TWO)[name]
    run_hosts = partial(run_ranks, hosts=hosts)
    points = points_of(run_hosts, lambda p: operation(p, p.communicator()), len(hosts))

    def body(p: Any) -> int:
        c = p.communicator()
        for beyond in (0, 1):
            c.kill_at(c.sequence + 1, points[p.rank] + beyond)
            assert operation(p, c).any()
        return c.fast_path.taken

    assert run_hosts(len(hosts), body) == [int(hosts == (0, 0))] * len(hosts)


def kill_at_every_point(
    run_ranks: RunRanks, operation: Callable[[Any, Communicator], Array], n: int, calm: int = 0
) -> None:
    """calm: calls before that in which a rank dies."""
    points = points_of(run_ranks, lambda p: operation(p, p.communicator()), n)
    covered: set[tuple[int, int]] = set()
    for point in range(max(points)):
        # All ranks run nearly the same program: each point is tried on one rank, on both if there are two.
        for victim in range(n) if n == 2 else [point % n]:
            if point < points[victim]:
                kill_at(run_ranks, operation, n, victim, point, calm)
                covered.add((victim, point))
    assert {point for _, point in covered} >= set(range(min(points)))


def kill_at(
    run_ranks: RunRanks,
    operation: Callable[[Any, Communicator], Array],
    n: int,
    victim: int,
    point: int,
    calm: int,
) -> None:
    survivors = tuple(rank for rank in range(n) if rank != victim)

    def body(p: Any) -> str:
        first = p.communicator()
        if p.rank == victim:
            first.kill_at(1 + calm, point)
        try:
            for _ in range(calm):
                operation(p, first)
            outcome = operation(p, first).tobytes().hex()
        except MembersLost as lost:
            assert lost.ranks == (victim,) and lost.peer == victim
            outcome = "lost"
        except OperationAborted:
            outcome = "aborted"
        p.await_death(victim)
        first.close()
        second = p.communicator(members=survivors, epoch=2)
        total = second.all_reduce(np.full(700, p.rank, np.float64), algorithm="ring", deadline_ns=p.soon())
        assert (total == sum(survivors)).all()
        return outcome

    def undisturbed(p: Any) -> str:
        return operation(p, p.communicator()).tobytes().hex()

    outcomes = run_ranks(n, body, dies=frozenset((victim,)), arena_bytes=1 << 16)
    if any(outcome not in ("lost", "aborted", None) for outcome in outcomes):
        expected = EXPECTED.setdefault((id(operation), n), run_ranks(n, undisturbed))
        for rank in survivors:
            assert outcomes[rank] in ("lost", "aborted", expected[rank]), f"rank {rank}: a mixed result"
    if point < n - 1:  # dead before it had entered for all: the last peer cannot complete
        untold = (victim + n - 1) % n
        assert outcomes[untold] == "lost"


EXPECTED: dict[tuple[int, int], list[Any]] = {}
