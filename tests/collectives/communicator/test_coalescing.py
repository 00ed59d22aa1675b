"""Many arrays by few operations: what goes together, the bits, and ranks that give different arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.collectives.communicator.uneven import PACK_BYTES_MAX, packs_of
from zbmd.collectives.errors import Desynchronised
from zbmd.collectives.programs.reductions import dtype_code, itemsize
from zbmd.transport.errors import UserError

RunRanks = Callable[..., list[Any]]
SHAPES = ((3,), (0,), (17, 5), (), (400_000,), (1,), (30_000,), (250, 31))
DTYPES = (np.float32, np.float64, np.int16, np.float16)
CODES = tuple(dtype_code(np.dtype(dtype)) for dtype in DTYPES)


@given(
    st.lists(st.tuples(st.sampled_from(CODES), st.integers(0, 40)), max_size=60),
    st.integers(1, 200),
)
def test_every_array_is_in_one_pack_with_its_like(arrays: list[tuple[int, int]], bytes_max: int) -> None:
    dtypes, sizes = [dtype for dtype, _ in arrays], [size for _, size in arrays]
    packs = packs_of(dtypes, sizes, bytes_max)
    assert sorted(k for pack in packs for k in pack.arrays) == list(range(len(arrays)))
    assert [pack.arrays[0] for pack in packs] == sorted(pack.arrays[0] for pack in packs)
    for pack in packs:
        assert pack.sizes == tuple(sizes[k] for k in pack.arrays)
        assert {dtypes[k] for k in pack.arrays} == {pack.dtype}
        assert list(pack.arrays) == sorted(pack.arrays)
        assert len(pack.arrays) == 1 or pack.size * itemsize(pack.dtype) <= bytes_max
    for dtype in CODES:
        ours = [pack for pack in packs if pack.dtype == dtype]
        for before, after in pairwise(ours):
            together = (before.size + after.sizes[0]) * itemsize(dtype)
            assert together > bytes_max, "there was room"
            assert before.arrays[-1] < after.arrays[0]


def arrays_of(rank: int) -> list[Any]:
    draw = np.random.default_rng([rank])
    return [
        np.array(draw.standard_normal(shape) * 8, DTYPES[k % len(DTYPES)])
        for k, shape in enumerate(SHAPES * 2)
    ]


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1)])
def test_the_bits_are_those_of_each_array_alone(run_ranks: RunRanks, hosts: Sequence[int]) -> None:
    def body(p: Any) -> int:
        c = p.communicator()
        c.barrier()
        alone = [c.all_reduce(x, algorithm="direct", deadline_ns=p.soon()) for x in arrays_of(p.rank)]
        many = arrays_of(p.rank)
        many[0] = np.asfortranarray(many[0])
        strided = np.zeros((17, 10), many[2].dtype)[:, ::2]
        strided[...] = many[2]
        many[2] = strided
        before = c.sequence
        assert c.all_reduce_many(many, algorithm="direct", deadline_ns=p.soon()) is many
        for x, y in zip(many, alone, strict=True):
            assert x.tobytes() == y.tobytes()
        calls = c.sequence - before
        again = arrays_of(p.rank)
        c.all_reduce_many(again)
        for x, y in zip(again, alone, strict=True):
            assert np.allclose(x.astype(np.float64), y.astype(np.float64), rtol=1e-2, atol=1e-2)
        assert c.all_reduce_many([]) == []
        with pytest.raises(UserError, match="array 1"):
            c.all_reduce_many([np.zeros(3), "text"])
        return int(calls)

    calls = run_ranks(len(hosts), body, hosts=hosts)
    nbytes = sum(x.nbytes for x in arrays_of(0))
    assert set(calls) == {calls[0]} and calls[0] <= len(DTYPES) + nbytes // (PACK_BYTES_MAX // 2)


def test_ranks_that_cut_them_otherwise_are_told(run_ranks: RunRanks) -> None:
    """The same number of elements in all, and of other arrays."""

    def body(p: Any) -> bool:
        sizes = (3, 4) if p.rank == 0 else (4, 3)
        with pytest.raises(Desynchronised):
            p.communicator().all_reduce_many([np.zeros(k, np.float32) for k in sizes], deadline_ns=p.soon())
        return True

    assert all(run_ranks(2, body))
