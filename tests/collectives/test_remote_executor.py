"""Collectives between processes on different hosts: the bits, the errors and the words of one host."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from zbmd.collectives.algorithms.shard_tree import assign_shards, reduce_shards, shard_tree_nodes
from zbmd.collectives.executor import DTYPES, REDUCTIONS

RunRanks = Callable[..., list[Any]]
Array = NDArray[Any]
COUNTS = (0, 1, 367, 1_001, 70_003)
LAYOUTS = [(0, 1), (0, 1, 2), (0, 0, 1), (0, 1, 0, 1), (0, 1, 2, 3)]
ALGORITHMS = ("auto", "direct", "ring")


def values(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    draw = np.random.default_rng([rank, count])
    if dtype.kind == "f":
        return draw.standard_normal(count).astype(dtype)
    return draw.integers(0, 100, count).astype(dtype)


def all_reduces(p: Any, c: Any) -> list[Array]:
    found: list[Array] = []
    for count in COUNTS:
        for dtype in DTYPES:
            for k, op in enumerate(REDUCTIONS):
                algorithm = ALGORITHMS[(k + count) % 3]
                make = p.segment.arena.from_array if k % 2 else np.copy
                x = make(values(p.rank, count, dtype))
                out = make(np.zeros_like(x))
                found.append(c.all_reduce(x, out, op=op, algorithm=algorithm, deadline_ns=p.soon()).copy())
                assert (x == values(p.rank, count, dtype)).all(), "an input was touched"
                assert c.all_reduce(x, op=op, algorithm=algorithm).tobytes() == found[-1].tobytes()
    return found


def others(p: Any, c: Any) -> list[Array]:
    found: list[Array] = []
    for count in COUNTS:
        for make in (p.segment.arena.from_array, np.copy):
            x = make(values(p.rank, count, np.dtype(np.float16)))
            for algorithm in ("auto", "direct", "ring"):
                found.append(c.all_gather(x, algorithm=algorithm, deadline_ns=p.soon()))
            for algorithm in ("auto", "direct", "tree"):
                found.append(c.broadcast(x.copy(), c.members[-1], algorithm=algorithm))
            wide = make(values(p.rank, count * c.size, np.dtype(np.float64)).reshape(c.size, count))
            for algorithm in ("auto", "ring"):
                found.append(c.reduce_scatter(wide, algorithm=algorithm))
        c.barrier()
    return found


def shards(p: Any, c: Any) -> list[Array]:
    found: list[Array] = []
    for count in (5, 70_003):
        for number in (1, 6, 7):
            data = [values(s, count, np.dtype(np.float32)) for s in range(number)]
            assignment = assign_shards(number, c.size)
            partials = {
                (lo, hi): p.segment.arena.from_array(reduce_shards(data[lo:hi]))
                for lo, hi in shard_tree_nodes(number, *assignment[c.place])
            }
            out = p.segment.arena.empty(count)
            c.all_reduce_shards(partials, out, shards=number, assignment=assignment, deadline_ns=p.soon())
            assert out.tobytes() == reduce_shards(data).tobytes()
            found.append(out)
    return found


@pytest.mark.parametrize("hosts", LAYOUTS)
@pytest.mark.parametrize("operations", [all_reduces, others, shards])
def test_the_bits_are_those_of_one_host(
    run_ranks: RunRanks, operations: Callable[[Any, Any], list[Array]], hosts: Sequence[int]
) -> None:
    def body(p: Any) -> list[str]:
        found = operations(p, p.communicator())
        return [hashlib.sha256(x.tobytes()).hexdigest()[:16] for x in found]

    assert run_ranks(len(hosts), body, hosts=hosts) == run_ranks(len(hosts), body)
