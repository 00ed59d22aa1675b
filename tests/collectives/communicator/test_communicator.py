"""Communicators between real processes, against numpy."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from zbmd.collectives.algorithms.shard_tree import assign_shards, reduce_shards, shard_tree_nodes
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.errors import Desynchronised, OperationAborted
from zbmd.collectives.execution.plan import PIECE_BYTES
from zbmd.collectives.flight.recorder import FLIGHT_RECORDS_MAX, FlightState
from zbmd.collectives.native._fast_path import Turnstile
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, UserError
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native._native import now_ns

RunRanks = Callable[..., list[Any]]
Array = NDArray[Any]
COUNTS = (0, 1, 5, 63, 367, 1_001, 70_003)
RANKS = [1, 2, 3, 4, 5]
DTYPES = tuple(np.dtype(name) for name in ("float32", "float64", "int32", "int64", "uint8"))
REDUCTIONS = ("sum", "prod", "min", "max")


def values(rank: int, count: int, dtype: np.dtype[Any], seed: int = 0) -> Array:
    """The input of a rank, as every rank can compute it."""
    draw = np.random.default_rng([seed, rank, count])
    if dtype.kind == "f":
        return draw.standard_normal(count).astype(dtype)
    return draw.integers(0, 100, count).astype(dtype)


def folded(op: str, inputs: list[Array]) -> Array:
    ufunc = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    total = inputs[0].copy()
    for x in inputs[1:]:
        ufunc(total, x, out=total)
    return total


def digest(*arrays: Array) -> str:
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("algorithm", ["auto", "direct", "ring"])
def test_all_reduce_is_numpys(run_ranks: RunRanks, n: int, algorithm: str) -> None:
    def body(p: Any) -> str:
        c = p.communicator()
        seen = hashlib.sha256()
        for count in COUNTS:
            for dtype in DTYPES:
                inputs = [values(r, count, dtype) for r in range(n)]
                for op in REDUCTIONS:
                    expected = folded(op, inputs)
                    for in_arena in (True, False):
                        make = p.segment.arena.from_array if in_arena else np.copy
                        x = make(inputs[p.rank])
                        y = make(np.zeros_like(x))
                        assert c.all_reduce(x, y, op=op, algorithm=algorithm, deadline_ns=p.soon()) is y
                        assert (x == inputs[p.rank]).all(), "an input was touched"
                        assert c.all_reduce(x, op=op, algorithm=algorithm) is x
                        assert x.tobytes() == y.tobytes()
                        if algorithm == "ring" and dtype.kind == "f":
                            np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5)
                        else:
                            assert x.tobytes() == expected.tobytes(), (count, dtype, op)
                        seen.update(x.tobytes())
        return seen.hexdigest()

    assert len(set(run_ranks(n, body))) == 1


@pytest.mark.parametrize("n", RANKS)
def test_gather_scatter_broadcast_are_numpys(run_ranks: RunRanks, n: int) -> None:
    def body(p: Any) -> None:
        c = p.communicator()
        for count in COUNTS:
            for dtype in (*DTYPES, np.dtype(np.float16), np.dtype(np.bool_)):
                inputs = [values(r, count, dtype) for r in range(n)]
                for make in (p.segment.arena.from_array, np.copy):
                    for algorithm in ("auto", "direct", "ring"):
                        gathered = c.all_gather(
                            make(inputs[p.rank]), algorithm=algorithm, deadline_ns=p.soon()
                        )
                        assert gathered.tobytes() == np.stack(inputs).tobytes()
                        whole = make(np.zeros((n, count), dtype))
                        whole[p.rank] = inputs[p.rank]
                        c.all_gather(whole[p.rank], whole, algorithm=algorithm)
                        assert whole.tobytes() == gathered.tobytes()
                    for root in {0, n - 1}:
                        for algorithm in ("auto", "direct", "tree"):
                            x = make(inputs[p.rank])
                            c.broadcast(x, root, algorithm=algorithm)
                            assert x.tobytes() == inputs[root].tobytes()
        for count in COUNTS:
            for dtype in DTYPES:
                inputs = [values(r, count * n, dtype).reshape(n, count) for r in range(n)]
                expected = folded("sum", inputs)[p.rank]
                for make in (p.segment.arena.from_array, np.copy):
                    for algorithm in ("auto", "ring"):
                        x = make(inputs[p.rank])
                        part = c.reduce_scatter(x, algorithm=algorithm)
                        assert (x == inputs[p.rank]).all()
                        if algorithm == "ring" and dtype.kind == "f":
                            np.testing.assert_allclose(part, expected, rtol=1e-4, atol=1e-5)
                        else:
                            assert part.tobytes() == expected.tobytes()
                        c.reduce_scatter(x, x[p.rank], algorithm=algorithm)
                        assert x[p.rank].tobytes() == part.tobytes()
        c.barrier()

    run_ranks(n, body)


@pytest.mark.parametrize("n", RANKS)
def test_shards_give_the_same_bits_for_every_assignment(run_ranks: RunRanks, n: int) -> None:
    shards = 12
    uneven = [(0, 12), *[(12, 12)] * (n - 1)]
    reverse = assign_shards(shards, n)[::-1]

    def body(p: Any) -> None:
        c = p.communicator()
        for count in (1, 1_001, 70_003):
            data = [values(s, count, np.dtype(np.float32)) for s in range(shards)]
            expected = reduce_shards(data).tobytes()
            for assignment in (assign_shards(shards, n), tuple(uneven), reverse):
                nodes = shard_tree_nodes(shards, *assignment[p.rank])
                for make in (p.segment.arena.from_array, np.copy):
                    partials = {(lo, hi): make(reduce_shards(data[lo:hi])) for lo, hi in nodes}
                    before = digest(*partials.values())
                    out = make(np.zeros(count, np.float32))
                    c.all_reduce_shards(
                        partials, out, shards=shards, assignment=assignment, deadline_ns=p.soon()
                    )
                    assert out.tobytes() == expected
                    assert digest(*partials.values()) == before

    run_ranks(n, body)


def test_large_arrays_go_in_pieces(run_ranks: RunRanks) -> None:
    count = 2 * PIECE_BYTES // 4 + 12_345

    def body(p: Any) -> list[int]:
        c = p.communicator()
        inputs = [values(r, count, np.dtype(np.float32)) for r in range(2)]
        for x in (inputs[p.rank].copy(), p.segment.arena.from_array(inputs[p.rank])):
            c.all_reduce(x, algorithm="direct", deadline_ns=p.soon())
            assert x.tobytes() == folded("sum", inputs).tobytes()
        gathered = c.all_gather(inputs[p.rank])
        assert gathered.tobytes() == np.stack(inputs).tobytes()
        halves = c.reduce_scatter(gathered)
        assert halves.tobytes() == (inputs[p.rank] + inputs[p.rank]).tobytes()
        return [c.sequence, len(c.flight)]

    assert run_ranks(2, body, arena_bytes=24 << 20) == [[3 + 3 + 2 + 2, 4]] * 2


def test_arrays_in_the_arena_and_elsewhere_mix(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        c = p.communicator()
        inputs = [values(r, 70_003, np.dtype(np.float64)) for r in range(3)]
        x = inputs[p.rank].copy() if p.rank == 1 else p.segment.arena.from_array(inputs[p.rank])
        out = p.segment.arena.empty(x.shape, x.dtype) if p.rank == 2 else np.empty_like(x)
        c.all_reduce(x, out, deadline_ns=p.soon())
        assert out.tobytes() == folded("sum", inputs).tobytes()
        assert x.tobytes() == inputs[p.rank].tobytes()

    run_ranks(3, body)


def test_not_a_number_wins_minimum_and_maximum(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        c = p.communicator()
        for op in ("min", "max"):
            x = np.array([np.nan, 1.0, 2.0]) if p.rank == 0 else np.array([1.0, np.nan, 3.0])
            c.all_reduce(x, op=op, deadline_ns=p.soon())
            assert np.isnan(x[:2]).all() and x[2] == (2.0 if op == "min" else 3.0)

    run_ranks(2, body)


def test_groups_of_some_members_on_channels_of_their_own(run_ranks: RunRanks) -> None:
    def body(p: Any) -> list[float]:
        everyone = p.communicator(channel=1)
        pair = p.communicator(members=(0, 2) if p.rank in (0, 2) else (3, 1), channel=2)
        x = np.full(3, float(p.rank))
        pair.all_reduce(x, deadline_ns=p.soon())
        y = x.copy()
        everyone.all_reduce(y, deadline_ns=p.soon())
        assert pair.broadcast(np.array([p.rank]), 1)[0] in (1, 2), "the second of (0, 2) or of (3, 1)"
        return [float(x[0]), float(y[0])]

    assert run_ranks(4, body) == [[2, 12], [4, 12], [2, 12], [4, 12]]


def test_ranks_that_call_different_operations_all_learn_of_it(run_ranks: RunRanks) -> None:
    def body(p: Any) -> list[str]:
        c = p.communicator()
        x = np.zeros(1_000 if p.rank else 999, np.float32)
        before = x.copy()
        with pytest.raises(Desynchronised) as caught:
            c.all_reduce(x, deadline_ns=p.soon())
        assert (x == before).all()
        with pytest.raises(OperationAborted):
            c.barrier()
        return [caught.value.calls[0], caught.value.calls[2], str(caught.value)]

    for mine, theirs, message in run_ranks(3, body):
        assert mine.startswith("all_reduce(float32[999], sum")
        assert theirs.startswith("all_reduce(float32[1000], sum")
        assert all(f"rank {rank} called all_reduce(float32[" in message for rank in range(3)), "two agree"


@pytest.mark.parametrize(
    "calls",
    [
        (lambda c, x: c.all_reduce(x), lambda c, x: c.barrier()),
        (lambda c, x: c.all_reduce(x), lambda c, x: c.all_reduce(x, op="max")),
        (lambda c, x: c.broadcast(x, 0), lambda c, x: c.broadcast(x, 1)),
        (lambda c, x: c.all_reduce(x), lambda c, x: c.all_reduce(x, algorithm="ring")),
        (lambda c, x: c.all_reduce(x), lambda c, x: c.all_reduce(x.view(np.int32))),
        (lambda c, x: c.all_gather(x), lambda c, x: c.all_reduce(x)),
    ],
)
def test_any_difference_between_calls_is_told(
    run_ranks: RunRanks, calls: tuple[Callable[[Communicator, Array], Any], ...]
) -> None:
    def body(p: Any) -> None:
        with pytest.raises(Desynchronised):
            calls[p.rank](p.communicator(), np.ones(8, np.float32))

    run_ranks(2, body)


def test_a_deadline_ends_a_wait_for_a_rank_that_never_calls(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        c = p.communicator()
        if p.rank == 1:
            return ""
        with pytest.raises(DeadlineExceeded) as caught:
            c.all_reduce(np.zeros(4), deadline_ns=now_ns() + 1_000_000)
        assert c.flight[-1].state is FlightState.FAILED
        return str(caught.value)

    assert "rank 0 entering" in run_ranks(2, body)[0]


def test_abort_from_another_thread_ends_an_operation(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        c = p.communicator()
        if p.rank == 1:
            return
        ended: list[BaseException] = []

        def wait() -> None:
            try:
                c.barrier()
            except OperationAborted as error:
                ended.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        c.abort()
        thread.join()
        assert len(ended) == 1
        with pytest.raises(OperationAborted):
            c.barrier()
        c.close()
        c.close()

    run_ranks(2, body)


def test_an_aborted_rank_withdraws_and_the_next_epoch_works(run_ranks: RunRanks) -> None:
    def body(p: Any) -> float:
        first = p.communicator()
        if p.rank == 2:
            first.abort()
        with pytest.raises((OperationAborted, DeadlineExceeded)):
            first.all_reduce(np.zeros(5_000), deadline_ns=now_ns() + 20_000_000)
        first.close()
        second = p.communicator(epoch=2)
        return float(second.all_reduce(np.full(5_000, p.rank + 1.0), deadline_ns=p.soon())[4_999])

    assert run_ranks(3, body) == [6.0] * 3


def test_threads_take_turns_in_the_order_in_which_they_came() -> None:
    turnstile = Turnstile()
    order: list[int] = []
    begun = [threading.Event() for _ in range(5)]

    def pass_through(i: int) -> None:
        with turnstile:
            order.append(i)

    with turnstile:
        threads = [threading.Thread(target=pass_through, args=(i,)) for i in range(5)]
        for i, thread in enumerate(threads):
            thread.start()
            while turnstile.waiting <= i:
                begun[i].wait(0.001)
    for thread in threads:
        thread.join()
    assert order == list(range(5))


@pytest.fixture
def alone() -> Any:
    segment = Segment.create(slot=0, incarnation=1, arena_bytes=1 << 20, inbox_bytes=1 << 16)
    communicator = Communicator(segment=segment, peers={}, members=(0,), rank=0, epoch=1, channel=0)
    yield communicator
    communicator.close()
    segment.close()


BAD_CALLS: list[tuple[str, Callable[[Communicator], object]]] = [
    ("no reduction for dtype", lambda c: c.all_reduce(np.zeros(2, "U3"))),
    ("no reduction 'mean'", lambda c: c.all_reduce(np.zeros(2), op="mean")),
    ("no algorithm 'magic'", lambda c: c.all_reduce(np.zeros(2), algorithm="magic")),
    ("does not take", lambda c: c.all_reduce(np.zeros(1_000), algorithm="eager")),
    ("must have 2 elements", lambda c: c.all_reduce(np.zeros(2), np.zeros(3))),
    ("must have 2 elements of float64", lambda c: c.all_reduce(np.zeros(2), np.zeros(2, np.float32))),
    ("root=1 is not a rank of this group: expected 0", lambda c: c.broadcast(np.zeros(2), 1)),
    ("Python objects", lambda c: c.broadcast(np.array([None]), 0)),
    ("first extent", lambda c: c.reduce_scatter(np.zeros(2))),
    ("names 2 ranks", lambda c: c.all_reduce_shards({}, np.zeros(2), shards=2, assignment=((0, 1), (1, 2)))),
    ("partial sums of", lambda c: c.all_reduce_shards({}, np.zeros(2), shards=2, assignment=((0, 2),))),
]


@pytest.mark.parametrize(("words", "call"), BAD_CALLS, ids=[words for words, _ in BAD_CALLS])
def test_a_bad_argument_is_told_and_harms_nothing(
    alone: Communicator, words: str, call: Callable[[Communicator], object]
) -> None:
    with pytest.raises(UserError, match=words):
        call(alone)
    assert alone.all_reduce(np.ones(3))[0] == 1.0


def test_overlapping_arrays_are_refused(alone: Communicator) -> None:
    x = np.zeros(10)
    for call in (
        lambda: alone.all_reduce(x[:5], x[3:8]),
        lambda: alone.all_reduce(x, x),
        lambda: alone.all_gather(x[1:9], x[:8].reshape(1, 8)),
        lambda: alone.all_reduce_shards({(0, 1): x[:4]}, x[2:6], shards=1, assignment=((0, 1),)),
    ):
        with pytest.raises(UserError, match="overlap"):
            call()


def test_a_channel_serves_one_communicator_an_epoch(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        p.communicator().barrier()
        with pytest.raises(LocalProtocolError, match="channel 0 has been used in epoch 1"):
            p.communicator()
        p.communicator(channel=1).barrier()
        p.communicator(epoch=2).barrier()

    run_ranks(2, body)


def test_members_need_their_segments(alone: Communicator) -> None:
    with pytest.raises(LocalProtocolError, match="no memory"):
        Communicator(segment=alone._segment, peers={}, members=(0, 1), rank=0, epoch=1, channel=1)
    with pytest.raises(LocalProtocolError, match="not one of the members"):
        Communicator(segment=alone._segment, peers={}, members=(1,), rank=0, epoch=1, channel=1)


def test_the_flight_record_tells_what_ran(alone: Communicator) -> None:
    alone.all_reduce(np.ones(3, np.float32))
    alone.barrier()
    first, second = alone.flight
    assert (first.operation, first.algorithm, first.sequence, first.nbytes) == ("all_reduce", "eager", 1, 12)
    assert second.operation == "barrier" and second.sequence == 2
    assert first.state is FlightState.COMPLETE and first.start_ns <= first.end_ns <= second.start_ns
    assert alone.flight.maxlen == FLIGHT_RECORDS_MAX
