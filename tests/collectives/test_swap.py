"""Arrays outside of the arena: two ranks reduce them where they lie, whichever way puts write."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from zbmd.collectives import _stepper
from zbmd.collectives.communicator import Communicator

RunRanks = Callable[..., list[Any]]
CACHED, STREAMED = 0, 1


def run(choice: _stepper.StoreChoice, runs: int, costs: Callable[[int], float]) -> list[int]:
    """The ways of so many runs. costs: what a run takes by a way."""
    ways: list[int] = []
    for _ in range(runs):
        ways.append(choice.next())
        choice.note(costs(ways[-1]))
    return ways


@pytest.mark.parametrize("better", [CACHED, STREAMED])
def test_puts_write_the_way_that_is_quicker_and_try_the_other_ever_more_seldom(better: int) -> None:
    ways = run(_stepper.StoreChoice(), 2_000, lambda way: 1.0 if way == better else 5.0)
    tries = [at for at, way in enumerate(ways) if way != better]
    assert len(tries) < 30 and tries[-1] > 1_000
    gaps = [after - before for before, after in pairwise(tries)]
    assert gaps[-1] == max(gaps) <= 129


def test_one_run_that_was_held_up_changes_nothing_and_two_have_the_other_way_tried() -> None:
    choice = _stepper.StoreChoice()
    steady = run(choice, 1_000, lambda way: 1.0 + way)
    last = max(at for at, way in enumerate(steady) if way == STREAMED)
    run(choice, last + 129 - len(steady) + 1, lambda way: 1.0 + way)  # the next trial is as far off as can be
    assert run(choice, 1, lambda way: 50.0) + run(choice, 20, lambda way: 1.0 + way) == [CACHED] * 21
    ways = run(choice, 20, lambda way: 5.0 if way == CACHED else 2.0)  # caches are not shared any more
    assert ways == [CACHED] * 2 + [STREAMED] * 9 + [CACHED] + [STREAMED] * 8


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
        taken = c.lane.taken
        assert taken >= 2 * 4
        c.close()
        assert p.segment.inbox.used_bytes == 0

    run_ranks(2, body)
