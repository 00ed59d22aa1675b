"""Ranks use arrays where they lie, whichever way the bytes go: put, or read."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.native._program import CACHED, READ, STREAMED, StoreChoice

RunRanks = Callable[..., list[Any]]


def run(choice: StoreChoice, runs: int, costs: Callable[[int], float], *, ways: int = 2) -> list[int]:
    """The ways of so many runs. costs: what a run takes by a way."""
    taken: list[int] = []
    for _ in range(runs):
        taken.append(choice.next(ways))
        assert choice.next(ways) == taken[-1]
        choice.note(taken[-1], costs(taken[-1]))
    return taken


@pytest.mark.parametrize(("better", "ways"), [(CACHED, 2), (STREAMED, 2), (STREAMED, 3), (READ, 3)])
def test_the_quickest_way_is_taken_and_the_others_are_tried_ever_more_seldom(better: int, ways: int) -> None:
    taken = run(StoreChoice(), 2_000, lambda way: 1.0 if way == better else 5.0 + way, ways=ways)
    tries = [at for at, way in enumerate(taken) if way != better]
    assert len(tries) < 60 and tries[-1] > 1_000
    seconds = tries[::-2][::-1]
    assert all(at - 1 in tries for at in seconds[-8:]), "the second run of a trial counts"
    assert {taken[at] for at in seconds[-ways + 1 :]} == set(range(ways)) - {better}
    gaps = [after - before for before, after in pairwise(seconds)]
    assert gaps[-1] == max(gaps) <= 130


def test_one_run_that_was_held_up_changes_nothing_and_two_have_the_other_way_tried() -> None:
    choice = StoreChoice()
    steady = run(choice, 1_000, lambda way: 1.0 + way)
    last = max(at for at, way in enumerate(steady) if way == STREAMED)
    run(choice, last + 130 - len(steady) + 1, lambda way: 1.0 + way)  # the next trial is as far off as can be
    assert run(choice, 1, lambda way: 50.0) + run(choice, 20, lambda way: 1.0 + way) == [CACHED] * 21
    ways = run(choice, 20, lambda way: 5.0 if way == CACHED else 2.0)  # caches are not shared any more
    assert ways == [CACHED] * 2 + [STREAMED] * 10 + [CACHED] * 2 + [STREAMED] * 6


@pytest.mark.parametrize("n", [2, 3])
def test_ordinary_arrays_have_the_bits_of_those_in_the_arena(run_ranks: RunRanks, n: int) -> None:
    """Twelve runs of a size try both ways of writing; lengths and places are odd."""

    def body(p: Any) -> list[int]:
        c: Communicator = p.communicator()
        results: list[int] = []
        for count, dtype in ((300_007, np.float32), (100_003, np.float64), (70_001, np.float16)):
            values = np.random.default_rng(p.rank).standard_normal(count).astype(dtype)
            kept = c.all_reduce(p.segment.arena.from_array(values), algorithm="direct", deadline_ns=p.soon())
            used = p.segment.arena.used_bytes
            for turn in range(12):
                given = np.empty(count + 1, dtype)[turn % 2 :][:count]
                given[:] = values
                got = c.all_reduce(given, algorithm="swap", deadline_ns=p.soon())
                assert got is given and given.tobytes() == kept.tobytes(), turn
            out = np.empty(count, dtype)
            assert c.all_reduce(values, out, algorithm="swap", op="max", deadline_ns=p.soon()) is out
            assert p.segment.arena.used_bytes == used
            results.append(zlib.crc32(kept.tobytes()))
        if n == 2:
            c.all_reduce(np.ones(10_000, np.float32), deadline_ns=p.soon())
            assert c.flight[-1].algorithm == "swap"
        return results

    first, *others = run_ranks(n, body)
    assert all(other == first for other in others)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_operation_by_slots_has_the_bits_of_one_that_reads(run_ranks: RunRanks, n: int) -> None:
    """A few elements, a chunk and one more, and several pieces; in the arena of some ranks, or of none."""

    def body(p: Any) -> None:
        c: Communicator = p.communicator()
        for count, dtype in ((1, np.float32), (9_001, np.float16), (131_072 // n + 1, np.float64)):
            values = np.random.default_rng(p.rank).standard_normal((n, count)).astype(dtype)
            for make in (np.copy, p.segment.arena.from_array if p.rank % 2 else np.copy):
                for root in (0, n - 1):
                    check_by_slots(c, make(values), root, p.soon())

    run_ranks(n, body, arena_bytes=64 << 20)


def check_by_slots(c: Communicator, x: Any, root: int, end_ns: int) -> None:
    """Check that what puts to slots leaves what reads. x: an element of the first axis for each rank."""
    given, own, at_root = x.tobytes(), x[0], c.place == root
    found: dict[bool, list[Any]] = {}
    for slots in (True, False):
        swap, shared = ("swap", "shared") if slots else ("direct", "direct")
        found[slots] = [
            c.broadcast(x.copy(), root, algorithm=shared, deadline_ns=end_ns),
            c.gather(own, root, algorithm=shared, deadline_ns=end_ns),
            c.scatter(x if at_root else None, root, np.empty_like(own), algorithm=shared, deadline_ns=end_ns),
            c.all_gather(own, algorithm=swap, deadline_ns=end_ns),
            c.all_to_all(x, algorithm=swap, deadline_ns=end_ns),
            c.reduce_scatter(x, op="max", algorithm=swap, deadline_ns=end_ns),
            c.reduce_scatter(x, op="avg", algorithm=swap, deadline_ns=end_ns),
            c.all_reduce(x.copy(), op="avg", algorithm=shared, deadline_ns=end_ns),
            c.all_reduce(x, np.empty_like(x), algorithm=shared, deadline_ns=end_ns),
        ]
    assert x.tobytes() == given
    for one, other in zip(found[True], found[False], strict=True):
        assert (one is None) == (other is None)
        assert one is None or one.tobytes() == other.tobytes()


PLACES = ("arena", "ordinary", "mixed", "one in, one out", "out elsewhere")


@pytest.mark.parametrize("way", [CACHED, STREAMED, READ])
def test_ranks_read_each_other_only_if_the_arrays_of_all_lie_in_the_arena(
    run_ranks: RunRanks, way: int
) -> None:
    """Calls of one shape one after the other, most by the fast path, whose arrays are here or there."""
    count = 70_001

    def body(p: Any) -> list[list[Any]]:
        c: Communicator = p.communicator()
        c._executor.native.always(way)
        arena = p.segment.arena
        inside = [arena.empty(count, np.float32) for _ in range(2)]
        outside = [np.empty(count, np.float32) for _ in range(2)]
        values = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(2)]
        for turn in range(3 * len(PLACES)):
            place = PLACES[turn % len(PLACES)]
            at = [inside, inside] if place in ("arena", "out elsewhere") else [outside, outside]
            if place == "one in, one out":
                at = [inside, outside]
            elif place == "mixed":
                at = [inside, outside] if turn % 2 else [outside, inside]
            x, out = at[p.rank]
            if place == "out elsewhere":
                out = outside[1] if p.rank == 1 else inside[1]
            for given, target in ((x, out), (x, x)):
                given[:] = values[p.rank]
                got = c.all_reduce(given, None if target is given else target, deadline_ns=p.soon())
                assert got is target
                assert got.tobytes() == (values[0] + values[1]).tobytes(), (turn, place)
        taken = c.fast_path.taken
        assert taken >= 2 * len(PLACES)
        return [[flight.algorithm for flight in c.flight], [place for place in PLACES for _ in range(2)]]

    (first, places), (second, _) = run_ranks(2, body)
    assert first == second
    read = ["direct" if way == READ and place == "arena" else "swap" for place in places]
    read[-1] = "direct" if way == READ else "swap"  # in place, so the output is not elsewhere
    assert first == 3 * read


def test_large_arrays_in_the_arena_are_timed_both_ways_and_keep_their_bits(run_ranks: RunRanks) -> None:
    """More than a piece, odd lengths, 16-bit floats, an average: whatever is tried, the bits are the same."""

    def body(p: Any) -> list[str]:
        c: Communicator = p.communicator()
        kinds = (
            (4_500_001, np.float32, "sum"),
            (700_001, np.float16, "avg"),
            (300_001, np.complex64, "prod"),
        )
        for count, dtype, op in kinds:
            values = np.random.default_rng(p.rank).standard_normal(count).astype(dtype)
            expected = c.all_reduce(values.copy(), op=op, algorithm="swap", deadline_ns=p.soon())
            x = p.segment.arena.empty(count, dtype)
            for turn in range(6):
                x[:] = values
                c.all_reduce(x, op=op, deadline_ns=p.soon())
                assert x.tobytes() == expected.tobytes(), (dtype, turn)
        return sorted({flight.algorithm for flight in c.flight})

    assert run_ranks(2, body, arena_bytes=32 << 20) == [["direct", "swap"]] * 2


def test_a_roots_array_that_cannot_be_written_is_broadcast(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        c: Communicator = p.communicator()
        values = np.arange(1_500_000, dtype=np.float64)  # three pieces, copied through the arena
        x = values if p.rank == 1 else np.zeros_like(values)
        x.flags.writeable = p.rank != 1
        for _ in range(2):
            c.broadcast(x, 1, deadline_ns=p.soon())
            assert (x == np.arange(1_500_000)).all()

    run_ranks(2, body)


def test_an_inbox_that_is_outgrown_or_closed_goes_back(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        c: Communicator = p.communicator()
        for count in (10_000, 500_000, 20_000, 4_500_000, 500_000):
            x = np.ones(count, np.float32)
            for turn in range(3):
                c.all_reduce(x, algorithm="swap", deadline_ns=p.soon())
                assert (x == 2.0 ** (turn + 1)).all()
        c.barrier(deadline_ns=p.soon())
        taken = c.fast_path.taken
        assert taken >= 2 * 4
        c.close()
        assert p.segment.inbox.used_bytes == 0

    run_ranks(2, body)


@pytest.mark.parametrize("tuned", [False, True])
def test_where_the_kernel_lets_ranks_read_each_other_ordinary_arrays_are_read_too(
    run_ranks: RunRanks, tuned: bool
) -> None:
    """The bits are the same, wherever an array lies, by the fast path or not."""
    count = 70_001

    def body(p: Any) -> list[str]:
        c: Communicator = p.communicator()
        if tuned:
            c.tune(deadline_ns=p.soon())
        can = tuned and c.reading.pids
        c._executor.native.always(READ)
        values = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(2)]
        inside, outside = p.segment.arena.from_array(values[p.rank]), values[p.rank].copy()
        before = len(c.flight)
        for turn in range(6):
            mixed = inside if (turn + p.rank) % 2 else outside
            for given in (outside, mixed):
                got = c.all_gather(given, deadline_ns=p.soon())
                assert got.tobytes() == b"".join(each.tobytes() for each in values)
        taken = [flight.algorithm for flight in c.flight][before:]
        return [*taken, "direct" if can else "swap"]

    for *taken, expected in run_ranks(2, body, arena_bytes=32 << 20):
        assert taken == [expected] * 12


@pytest.mark.parametrize("root", [0, 1, 2])
def test_a_rank_that_others_wait_for_chooses_the_way(run_ranks: RunRanks, root: int) -> None:
    """A root that has put its array into slots is done before anybody has it."""

    def body(p: Any) -> list[str]:
        c: Communicator = p.communicator()
        array = p.segment.arena.from_array(np.full(30_000, p.rank, np.float32))
        rows = p.segment.arena.from_array(np.tile(np.arange(3, dtype=np.float32), (10_000, 1)).T.copy())
        out = p.segment.arena.empty(10_000, np.float32)
        found: list[str] = []
        for chooser, call in (
            ((root + 1) % 3, lambda: c.broadcast(array, root, deadline_ns=p.soon())),
            (
                (root + 1) % 3,
                lambda: c.scatter(rows if p.rank == root else None, root, out, deadline_ns=p.soon()),
            ),
            (root, lambda: c.gather(out, root, rows if p.rank == root else None, deadline_ns=p.soon())),
            (0, lambda: c.all_gather(out, rows, deadline_ns=p.soon())),
        ):
            c._executor.native.always(READ if p.rank == chooser else CACHED)
            call()
            found.append(c.flight[-1].algorithm)
        assert array[0] == root and out[0] == p.rank and rows[:, 0].tolist() == [0, 1, 2]
        return found

    assert run_ranks(3, body, arena_bytes=32 << 20) == [["direct"] * 4] * 3
