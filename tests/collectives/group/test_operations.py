"""Every operation, algorithm and dtype against numpy, between real processes."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.reductions import reductions_of

from zbmd.collectives.algorithms.catalogue import ALGORITHMS, Operation
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.errors import Desynchronised, OperationAborted
from zbmd.collectives.execution.plan import PIECE_BYTES
from zbmd.collectives.programs.reductions import DTYPE_NAMES, REDUCTIONS, dtypes
from zbmd.transport.errors import UserError
from zbmd.transport.memory.segment import Segment

RunRanks = Callable[..., list[Any]]
Array = NDArray[Any]
COUNTS = (0, 1, 7, 1_003)
FEW_COUNTS = ((7,), (1_003,), (7,), (1_003,), (0, 7), (1, 1_003))
LARGE = 45_001
BRUCK_BYTES_MAX = 64 << 10
NARROW = ("float16", "bfloat16")
UFUNCS: dict[str, Callable[..., Array]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def algorithms(operation: Operation) -> list[str]:
    return ["auto", *(name for found, name in ALGORITHMS if found is operation and name != "eager")]


def values(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    """The input of a rank, as every rank can compute it."""
    draw = np.random.default_rng([rank, count])
    if dtype.kind in "fV":
        return draw.standard_normal(count).astype(dtype)
    if dtype.kind == "c":
        return (draw.standard_normal(count) + 1j * draw.standard_normal(count)).astype(dtype)
    least, end = (0, 2) if dtype.kind == "b" else (-100, 100) if dtype.kind == "i" else (0, 100)
    return draw.integers(least, end, count).astype(dtype)


def reduced(op: str, inputs: list[Array]) -> Array:
    """The fold over ranks 0..n-1, as the contract says: 16-bit floats in float32, rounded once."""
    dtype = inputs[0].dtype
    wide = [x.astype(np.float32) for x in inputs] if dtype.name in NARROW else inputs
    total = wide[0].copy()
    for x in wide[1:]:
        total = UFUNCS[op](total, x)
    if op == "avg" and dtype.kind in "iu":
        wider = total.astype(np.int64 if dtype.kind == "i" else np.uint64)
        total = np.sign(wider) * (abs(wider) // wider.dtype.type(len(inputs)))
    elif op == "avg" and len(inputs) > 1:
        # numpy multiplies complex numbers by a rounded reciprocal, so: their parts.
        parts: Array = total.view(
            total.dtype.name.replace("complex64", "float32").replace("complex128", "float64")
        )
        total = (parts / parts.dtype.type(len(inputs))).view(total.dtype)
    return total.astype(dtype)


def check(got: Array, expected: Array, *, exact: bool) -> None:
    if exact or got.dtype.kind in "iub":
        assert got.tobytes() == expected.tobytes(), (got.dtype, got, expected)
        return
    rough = got.dtype.name in NARROW
    np.testing.assert_allclose(
        got.astype(np.complex128), expected.astype(np.complex128), rtol=2e-2 if rough else 1e-4, atol=1e-2
    )


def test_there_is_a_kernel_for_every_dtype_that_is_named() -> None:
    assert {dtype.name for dtype in dtypes()} >= set(DTYPE_NAMES) - {"bfloat16"}
    assert reductions_of(np.dtype(bool)) == ["sum", "prod", "min", "max", "band", "bor", "bxor"]
    assert reductions_of(np.dtype(np.complex64)) == ["sum", "prod", "avg"]
    assert reductions_of(np.dtype(np.int8)) == list(REDUCTIONS)
    assert reductions_of(np.dtype(np.float16)) == ["sum", "prod", "min", "max", "avg"]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_reductions_are_numpys(run_ranks: RunRanks, n: int) -> None:
    """all_reduce, reduce and reduce_scatter; "direct", "swap", "shared" and "eager" bit for bit.

    A kernel knows of counts and not of ranks, a program of ranks and not of dtypes. So every dtype and
    reduction meets every count with two ranks and "direct", and every algorithm at one or two counts; with
    more ranks, each dtype meets a third of the reductions, and each reduction some of the dtypes.
    """
    pairs = [
        (d + k, dtype, op) for d, dtype in enumerate(dtypes()) for k, op in enumerate(reductions_of(dtype))
    ]
    kinds = [(dtype, op) for place, dtype, op in pairs if n < 3 or place % 3 == n % 3]
    assert {dtype for dtype, _ in kinds} == set(dtypes()) and {op for _, op in kinds} == set(REDUCTIONS)

    def body(p: Any) -> None:
        c: Communicator = p.communicator(hosts=tuple(r % 2 for r in range(n)))
        for k, (dtype, op) in enumerate(kinds):
            # Complex products of numpy may be fused.
            closed = not (dtype.kind == "c" and op == "prod")
            few = FEW_COUNTS[k % len(FEW_COUNTS)]
            for count in COUNTS if n == 2 else few:
                inputs = [values(r, count, dtype) for r in range(n)]
                expected = reduced(op, inputs)
                mine = inputs[p.rank]
                for algorithm in algorithms(Operation.ALL_REDUCE) if count in few else ["direct"]:
                    kept = c.all_reduce(
                        mine, np.empty_like(mine), op=op, algorithm=algorithm, deadline_ns=p.soon()
                    )
                    # What "auto" stands for between hosts is for the model to say.
                    exact = closed and c.flight[-1].algorithm in ("eager", "direct", "swap", "shared")
                    check(kept, expected, exact=exact)
                    check(c.all_reduce(mine.copy(), op=op, algorithm=algorithm), kept, exact=True)
                for algorithm in algorithms(Operation.REDUCE) if count in few else ["direct"]:
                    exact = closed and algorithm in ("auto", "direct", "shared")
                    root = count % n
                    got = c.reduce(mine, root, np.empty_like(mine), op=op, algorithm=algorithm)
                    assert (got is None) == (p.rank != root)
                    if got is not None:
                        check(got, expected, exact=exact)
                        check(c.reduce(mine.copy(), root, op=op, algorithm=algorithm), got, exact=True)
                    else:
                        c.reduce(mine, root, op=op, algorithm=algorithm)
                assert mine.tobytes() == values(p.rank, count, dtype).tobytes()
            for algorithm in algorithms(Operation.REDUCE_SCATTER):
                blocks = [values(r, 37 * n, dtype).reshape(n, 37) for r in range(n)]
                got = c.reduce_scatter(blocks[p.rank], op=op, algorithm=algorithm)
                exact = closed and algorithm in ("auto", "direct")
                check(got, reduced(op, blocks)[p.rank], exact=exact)

    run_ranks(n, body)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_moving_operations_are_numpys(run_ranks: RunRanks, n: int) -> None:
    """gather, scatter, all_to_all, all_gather, broadcast; in the arena and out of it, in place and not."""

    def body(p: Any) -> None:
        c: Communicator = p.communicator()
        for count in (*COUNTS, LARGE):
            for dtype in (np.dtype(np.float64), np.dtype(np.uint8), np.dtype("M8[s]"), np.dtype("f4,i2")):
                raw = [values(r, count * n * dtype.itemsize, np.dtype(np.uint8)) for r in range(n)]
                whole = [x.view(dtype).reshape(n, count) for x in raw]
                for make in (np.copy, p.segment.arena.from_array):
                    check_moves(c, p, whole, make, root=count % n)

    run_ranks(n, body, arena_bytes=32 << 20)


def check_moves(
    c: Communicator, p: Any, whole: list[Array], make: Callable[[Array], Array], root: int
) -> None:
    n, mine = c.size, whole[p.rank]
    row = make(mine[0])
    for algorithm in algorithms(Operation.GATHER):
        got = c.gather(row, root, algorithm=algorithm, deadline_ns=p.soon())
        assert (got is None) == (p.rank != root)
        if got is not None:
            assert got.tobytes() == b"".join(x[0].tobytes() for x in whole)
        out = make(np.zeros_like(mine))
        out[p.rank] = mine[0]
        got = c.gather(out[p.rank], root, out, algorithm=algorithm)
        if got is not None:
            assert got is out and got.tobytes() == b"".join(x[0].tobytes() for x in whole)
    for algorithm in algorithms(Operation.SCATTER):
        source = make(whole[root]) if p.rank == root else None
        out = make(np.zeros_like(mine[0]))
        assert c.scatter(source, root, out, algorithm=algorithm) is out
        assert out.tobytes() == whole[root][p.rank].tobytes()
        if source is not None:
            c.scatter(source, root, source[root], algorithm=algorithm)
            assert source.tobytes() == whole[root].tobytes()
        else:
            c.scatter(None, root, out, algorithm=algorithm)
    for algorithm in algorithms(Operation.ALL_TO_ALL):
        if algorithm == "bruck" and mine.nbytes > BRUCK_BYTES_MAX:
            continue  # every block on its way has a slot of its own in the inbox
        got = c.all_to_all(make(mine), algorithm=algorithm)
        assert got.tobytes() == b"".join(whole[r][p.rank].tobytes() for r in range(n))
    for algorithm in algorithms(Operation.ALL_GATHER):
        assert c.all_gather(row, algorithm=algorithm).tobytes() == b"".join(x[0].tobytes() for x in whole)
    for algorithm in algorithms(Operation.BROADCAST):
        got = c.broadcast(make(mine), root, algorithm=algorithm)
        assert got.tobytes() == whole[root].tobytes()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_uneven_blocks(run_ranks: RunRanks, n: int) -> None:
    def body(p: Any) -> None:
        c: Communicator = p.communicator()
        for scale in (0, 1, 3, 411):
            rows = [[(3 * s + 5 * d) % 4 * scale for d in range(n)] for s in range(n)]
            sent = [np.random.default_rng(s).standard_normal((sum(rows[s]), 3)) for s in range(n)]
            starts = [np.cumsum([0, *rows[s]]) for s in range(n)]
            expected = np.concatenate([sent[s][starts[s][p.rank] : starts[s][p.rank + 1]] for s in range(n)])
            for make in (np.copy, p.segment.arena.from_array):
                got = c.all_to_all_v(
                    make(sent[p.rank]),
                    rows[p.rank],
                    [rows[s][p.rank] for s in range(n)],
                    deadline_ns=p.soon(),
                )
                assert got.tobytes() == expected.tobytes() and got.shape == expected.shape
            for algorithm in algorithms(Operation.ALL_GATHER):
                gathered = c.all_gather_v(sent[p.rank], algorithm=algorithm)
                assert gathered.tobytes() == np.concatenate(sent).tobytes()
            shares = [(r + 1) % 3 * scale for r in range(n)]
            inputs = [np.random.default_rng(r).standard_normal((sum(shares), 2)) for r in range(n)]
            ends = np.cumsum([0, *shares])
            kept = reduced("sum", inputs)[ends[p.rank] : ends[p.rank + 1]]
            for algorithm in algorithms(Operation.REDUCE_SCATTER):
                got = c.reduce_scatter_v(inputs[p.rank], shares, algorithm=algorithm)
                check(got, kept, exact=algorithm in ("auto", "direct"))

    run_ranks(n, body, arena_bytes=32 << 20)


def test_large_uneven_blocks_go_in_pieces(run_ranks: RunRanks) -> None:
    rows = [[PIECE_BYTES // 3, 11], [5 * PIECE_BYTES + 5, 1]]

    def body(p: Any) -> int:
        c: Communicator = p.communicator()
        sent = [np.random.default_rng(s).integers(0, 255, sum(rows[s]), np.uint8) for s in range(2)]
        got = c.all_to_all_v(sent[p.rank], rows[p.rank], [rows[s][p.rank] for s in range(2)])
        first = sent[0][: rows[0][0]] if p.rank == 0 else sent[0][rows[0][0] :]
        second = sent[1][: rows[1][0]] if p.rank == 0 else sent[1][rows[1][0] :]
        assert got.tobytes() == first.tobytes() + second.tobytes()
        return c.sequence

    sequences = run_ranks(2, body, arena_bytes=32 << 20)
    assert sequences[0] == sequences[1] > 3


def test_what_one_sends_and_another_does_not_expect_is_told_to_all(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        c: Communicator = p.communicator()
        receive = [1, 1, 2 if p.rank == 1 else 1]
        with pytest.raises(Desynchronised) as caught:
            c.all_to_all_v(np.zeros(3), [1, 1, 1], receive, np.zeros(sum(receive)), deadline_ns=p.soon())
        with pytest.raises(OperationAborted):
            c.barrier()
        return str(caught.value)

    for message in run_ranks(3, body):
        assert "rank 2 sends 1 rows to rank 1, which expects 2" in message


def test_arrays_that_are_not_contiguous_are_packed_and_unpacked(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        c: Communicator = p.communicator()
        inputs = [np.arange(24.0).reshape(4, 6) + r for r in range(2)]
        total = inputs[0] + inputs[1]
        x = np.asfortranarray(inputs[p.rank])
        assert c.all_reduce(x, deadline_ns=p.soon()) is x
        np.testing.assert_array_equal(x, total)
        room = np.zeros((4, 12))
        out = room[:, ::2]
        assert c.all_reduce(inputs[p.rank][:, ::-1], out) is out
        np.testing.assert_array_equal(room[:, ::2], total[:, ::-1])
        assert not room[:, 1::2].any()
        strided = np.zeros((2, 8, 6))[:, ::2]
        c.all_gather(inputs[p.rank].T.copy().T, strided)
        np.testing.assert_array_equal(strided, np.stack(inputs))
        y = inputs[p.rank][::2, ::3].copy()[:, ::-1]
        c.broadcast(y, 1)
        np.testing.assert_array_equal(y, inputs[1][::2, ::3][:, ::-1])

    run_ranks(2, body)


class OverDLPack:
    """An array as another library would give it."""

    def __init__(self, x: Array) -> None:
        self._x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._x.__dlpack_device__()


def test_foreign_arrays_come_in_through_dlpack_and_the_buffer_protocol(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        c: Communicator = p.communicator()
        x = np.full(5, p.rank + 1.0)
        foreign = OverDLPack(x)
        assert c.all_reduce(foreign, deadline_ns=p.soon()) is foreign
        assert x.tolist() == [3.0] * 5
        plain = array.array("i", [p.rank, 7])
        assert c.all_reduce(plain, op="max") is plain
        assert plain.tolist() == [1, 7]
        assert c.all_gather(b"ab" if p.rank else b"cd").tobytes() == b"cdab"

    run_ranks(2, body)


def test_sixteen_bits_are_rounded_once(run_ranks: RunRanks) -> None:
    """In float16, 2048 + 1 + 1 + 1 + 1 stays 2048 if every sum is rounded; and the sum of an average
    overflows.
    """

    def body(p: Any) -> None:
        c: Communicator = p.communicator()
        for count in (10, 5_001):
            for algorithm in ("auto", "direct", "ring"):
                x = np.full(count, 2048 if p.rank == 0 else 1, np.float16)
                c.all_reduce(x, algorithm=algorithm, deadline_ns=p.soon())
                assert (x == 2052).all()
                y = np.full(count, 60_000, np.float16)
                c.all_reduce(y, op="avg", algorithm=algorithm)
                assert (y == np.float16(60_000)).all()

    run_ranks(5, body)


def test_every_sixteen_bit_value_is_widened_and_rounded_as_numpy_does(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        c: Communicator = p.communicator()
        for dtype in dtypes():
            if dtype.name not in NARROW:
                continue
            every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
            x = every.copy() if p.rank == 0 else np.ones(1 << 16, dtype)
            same = c.all_reduce(x, np.empty_like(x), op="prod", deadline_ns=p.soon())
            expected = every.astype(np.float32).astype(dtype)
            number = ~np.isnan(expected.astype(np.float32))
            assert (same.view(np.uint16) == expected.view(np.uint16))[number].all()
            assert np.isnan(same.astype(np.float32)).tolist() == (~number).tolist()
            scaled = x.copy() if p.rank == 0 else np.full(1 << 16, 1.2345e-3, dtype)
            c.all_reduce(scaled, op="prod")
            with np.errstate(all="ignore"):
                product = (every.astype(np.float32) * np.float32(dtype.type(1.2345e-3))).astype(dtype)
            assert (scaled.view(np.uint16) == product.view(np.uint16))[number].all()

    run_ranks(2, body)


@pytest.fixture
def alone() -> Any:
    segment = Segment.create(slot=0, incarnation=1, arena_bytes=1 << 20, inbox_bytes=1 << 16)
    communicator = Communicator(segment=segment, peers={}, members=(0,), rank=0, epoch=1, channel=0)
    yield communicator
    communicator.close()
    segment.close()


BAD_CALLS: list[tuple[str, Callable[[Communicator], object]]] = [
    ("no reduction 'avg' for dtype bool", lambda c: c.all_reduce(np.zeros(2, bool), op="avg")),
    ("no reduction 'band' for dtype float64", lambda c: c.reduce(np.zeros(2), 0, op="band")),
    ("no reduction 'max' for dtype complex64", lambda c: c.reduce_scatter(np.zeros((1, 2), "c8"), op="max")),
    ("no reduction for dtype >f4", lambda c: c.all_reduce(np.zeros(2, ">f4"))),
    ("read-only", lambda c: c.all_reduce(b"abc")),
    ("gives no array in host memory", lambda c: c.all_reduce([1.0, 2.0])),
    ("root=3 is not a rank of this group: expected 0", lambda c: c.gather(np.zeros(2), 3)),
    ("root=3 is not a rank of this group: expected 0", lambda c: c.scatter(np.zeros((1, 2)), 3)),
    ("first extent", lambda c: c.all_to_all(np.zeros((2, 2)))),
    ("first extent", lambda c: c.scatter(np.zeros((2, 2)), 0)),
    ("overlap", lambda c: overlapping(c)),
    ("send_rows add up to 2, but x has 3 rows", lambda c: c.all_to_all_v(np.zeros(3), [2], [2])),
    ("one a member", lambda c: c.all_to_all_v(np.zeros(3), [1, 2], [3])),
    ("one a member", lambda c: c.reduce_scatter_v(np.zeros(3), [-3])),
    ("rows add up to 2", lambda c: c.reduce_scatter_v(np.zeros(3), [2])),
    ("has no rows", lambda c: c.all_gather_v(np.float64(3.0))),
]


def overlapping(c: Communicator) -> object:
    x = np.zeros((1, 4))
    return c.all_to_all(x, x)


@pytest.mark.parametrize(("words", "call"), BAD_CALLS, ids=[words for words, _ in BAD_CALLS])
def test_a_bad_argument_is_told_and_harms_nothing(
    alone: Communicator, words: str, call: Callable[[Communicator], object]
) -> None:
    with pytest.raises(UserError, match=words):
        call(alone)
    assert alone.all_reduce(np.ones(3))[0] == 1.0
