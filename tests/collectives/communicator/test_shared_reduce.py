"""All ranks of a host reduce for the root, and long results leave past the caches: the bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.cost_model import Model
from zbmd.collectives.communicator.planning import choose
from zbmd.collectives.native._program import CACHED, READ, STREAMED

RunRanks = Callable[..., list[Any]]

KINDS = (
    (300_007, np.float32, "sum"),
    (200_003, np.float16, "avg"),
    (100_001, np.complex64, "avg"),
    (150_001, np.int32, "prod"),
)


def values(rank: int, count: int, dtype: Any) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng([rank, count]).standard_normal(2 * count)
    if np.dtype(dtype).kind == "c":
        return drawn.view(np.complex128).astype(dtype)
    return (100 * drawn[:count]).astype(dtype)


@pytest.mark.parametrize("n", [2, 3])
def test_the_root_gets_what_it_would_have_reduced_alone(run_ranks: RunRanks, n: int) -> None:
    """Some chunks a rank, in place and not, in the arena and out of it, at every root."""

    def body(p: Any) -> None:
        c: Communicator = p.communicator()
        for count, dtype, op in KINDS:
            given = values(p.rank, count, dtype)
            for root in range(n):
                alone = c.reduce(given.copy(), root, op=op, algorithm="direct", deadline_ns=p.soon())
                for make in (np.copy, p.segment.arena.from_array):
                    x, out = make(given), make(np.zeros_like(given))
                    kept = c.reduce(x, root, out, op=op, algorithm="shared", deadline_ns=p.soon())
                    assert x.tobytes() == given.tobytes()
                    got = c.reduce(x, root, op=op, algorithm="shared", deadline_ns=p.soon())
                    assert (kept is None) == (got is None) == (p.rank != root)
                    if alone is not None:
                        assert kept is out and got is x
                        assert kept.tobytes() == got.tobytes() == alone.tobytes(), (dtype, op, root)

    run_ranks(n, body, arena_bytes=32 << 20)


@pytest.mark.parametrize("way", [CACHED, STREAMED, READ])
def test_whichever_way_the_bytes_go(run_ranks: RunRanks, way: int) -> None:
    """A rank that is not the root has no output, and still its peers read in the arena."""
    count = 1_500_001

    def body(p: Any) -> list[str]:
        c: Communicator = p.communicator()
        c.tune(deadline_ns=p.soon())
        c.model = Model(cores=2)
        c._executor.native.always(way)
        x = p.segment.arena.from_array(values(p.rank, count, np.float32))
        out = p.segment.arena.empty(count, np.float32)
        for turn in range(4):  # most of them by the fast path
            got = c.reduce(x, 1, out if p.rank == 1 or turn % 2 else None, deadline_ns=p.soon())
            if got is not None:
                expected = values(0, count, np.float32) + values(1, count, np.float32)
                assert got.tobytes() == expected.tobytes()
        return [flight.algorithm for flight in c.flight][-4:]

    taken = "direct" if way == READ else "shared"
    assert run_ranks(2, body, arena_bytes=32 << 20) == [[taken] * 4] * 2


@pytest.mark.parametrize("shift", [0, 1, 7])
def test_long_results_leave_past_the_caches_with_all_their_elements(run_ranks: RunRanks, shift: int) -> None:
    """Results of 12 MiB that begin anywhere in a line; an average is divided on the way."""

    def body(p: Any) -> None:
        c: Communicator = p.communicator()
        c.tune(deadline_ns=p.soon())  # ordinary arrays are read, and so not cut into short pieces
        for dtype, op in ((np.float32, "avg"), (np.float64, "sum"), (np.complex128, "sum"), (np.int8, "max")):
            count = (12 << 20) // np.dtype(dtype).itemsize + 3
            inputs = [values(rank, count, dtype) for rank in range(2)]
            room = np.zeros(count + 16, dtype)
            out = room[shift : shift + count]
            got = c.reduce(inputs[p.rank], 0, out, op=op, algorithm="direct", deadline_ns=p.soon())
            if got is None:
                continue
            total = np.maximum(*inputs) if op == "max" else inputs[0] + inputs[1]
            expected = total / np.float32(2) if op == "avg" else total
            assert got.tobytes() == expected.tobytes(), dtype
            assert not room[:shift].any() and not room[shift + count :].any()

    run_ranks(2, body, arena_bytes=64 << 20)


def test_all_reduce_for_the_root_where_each_has_a_core_and_a_chunk() -> None:
    def chosen(n: int, nbytes: int, cores: int, hosts: int = 1) -> str:
        choice = choose(
            Operation.REDUCE,
            n=n,
            nbytes=nbytes,
            published_bytes=nbytes,
            hosts=hosts,
            model=Model(alpha_ns=300.0, beta_ns_per_byte=0.05, gamma_ns_per_byte=0.015, cores=cores),
            override="",
            far=hosts > 1,
        )
        assert choice.in_arena == ("direct" if choice.algorithm == "shared" else "")
        return choice.algorithm

    assert chosen(2, 256 << 10, cores=2) == chosen(8, 1 << 20, cores=8) == "shared"
    assert chosen(2, 128 << 10, cores=2) == "direct"
    assert chosen(4, 16 << 20, cores=2) == chosen(2, 16 << 20, cores=1) == "direct"
    assert chosen(2, 16 << 20, cores=2, hosts=2) != "shared"
