"""Calls that have been made before: the fast path takes them, and nothing is different but the time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zbmd
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.errors import Desynchronised, MembersLost, OperationAborted
from zbmd.collectives.flight.recorder import FlightState
from zbmd.transport.errors import DeadlineExceeded, UserError
from zbmd.transport.native._native import now_ns

RunRanks = Callable[..., list[Any]]
WAIT_S_MAX = 60.0


@pytest.mark.parametrize(
    ("hosts", "count"),
    [((0,) * n, count) for n in (1, 2, 3, 4) for count in (1, 300, 60_000)]
    + [((0, 1), 300), ((0, 1), 30_000), ((0, 1, 2), 300), ((0, 0, 1), 90)],
)
def test_every_operation_is_numpys_on_the_lane(
    run_ranks: RunRanks, hosts: tuple[int, ...], count: int
) -> None:
    n, far = len(hosts), len(set(hosts)) > 1

    def body(p: Any) -> int:
        c: Communicator = p.communicator(hosts=hosts)
        make = p.segment.arena.from_array
        small, large = make(np.zeros(count, np.float32)), make(np.zeros((n, count), np.float32))
        kept, many = make(np.zeros(count, np.float32)), make(np.zeros((n, count), np.float32))
        root = n - 1
        for turn in range(4):
            end = p.soon()
            inputs = [np.full(count, 10 * turn + rank, np.float32) for rank in range(n)]
            total = np.add.reduce(inputs)
            blocks = np.array([[100 * rank + turn] * count for rank in range(n)], np.float32)
            small[:] = inputs[p.rank]
            assert c.all_reduce(small, kept, deadline_ns=end) is kept and (kept == total).all()
            assert c.all_gather(small, many, deadline_ns=end) is many and (many == np.stack(inputs)).all()
            at_root = c.reduce(small, root, kept, op="max", deadline_ns=end)
            assert (at_root is kept) if p.rank == root else (at_root is None)
            assert p.rank != root or (kept == inputs[-1]).all()
            c.gather(small, root, many, deadline_ns=end)
            large[:] = blocks + p.rank
            c.reduce_scatter(large, kept, deadline_ns=end)
            assert (kept == n * blocks[p.rank] + n * (n - 1) / 2).all()
            c.all_to_all(large, many, deadline_ns=end)
            assert all((many[rank] == blocks[p.rank] + rank).all() for rank in range(n))
            c.scatter(large if p.rank == root else None, root, kept, deadline_ns=end)
            assert (kept == blocks[p.rank] + root).all()
            c.broadcast(small, root, deadline_ns=end)
            assert (small == inputs[root]).all()
            assert c.all_reduce(small, deadline_ns=end) is small and (small == n * inputs[root]).all()
            c.barrier(deadline_ns=end)
        return c.fast_path.taken

    # Between hosts, those whose data travels with the descriptors.
    least = 0 if far and count > 300 else 3 * (8 if far else 9)
    assert all(taken >= least for taken in run_ranks(n, body, hosts=hosts))


@pytest.mark.parametrize("n", [2, 3])
def test_calls_that_leave_their_result_to_the_group_take_the_lane(run_ranks: RunRanks, n: int) -> None:
    """As layers that are cut over ranks call them; each result is an array of its own."""

    def body(p: Any) -> int:
        c: Communicator = p.communicator()
        small = p.segment.arena.from_array(np.zeros((5, 60), np.float32))
        large = p.segment.arena.from_array(np.zeros((n, 5, 60), np.float32))
        results: list[Any] = []
        for turn in range(4):
            small[:], large[:] = turn + p.rank, 10 * turn + p.rank
            end, every = p.soon(), [turn + rank for rank in range(n)]
            gathered, scattered = (
                c.all_gather(small, deadline_ns=end),
                c.reduce_scatter(large, deadline_ns=end),
            )
            exchanged, at_root = c.all_to_all(large, deadline_ns=end), c.gather(small, 1, deadline_ns=end)
            out = None if p.rank == 1 else np.empty((5, 60), np.float32)
            own = c.scatter(large if p.rank == 1 else None, 1, out, deadline_ns=end)
            assert gathered.shape == (n, 5, 60) and (gathered[:, 0, 0] == every).all()
            assert scattered.shape == (5, 60) and (scattered == 10 * n * turn + n * (n - 1) / 2).all()
            assert (
                exchanged.shape == large.shape
                and (exchanged[:, 0, 0] == large[0, 0, 0] - p.rank + range(n)).all()
            )
            assert (at_root is None) == (p.rank != 1) and (at_root is None or (at_root == gathered).all())
            assert own.shape == (5, 60) and (own == 10 * turn + 1).all()
            results += [gathered, scattered, exchanged]
        assert len({x.ctypes.data for x in results}) == len(results), "none is written again"
        assert c.all_gather(np.zeros((), np.int32), deadline_ns=p.soon()).shape == (n,)
        return c.fast_path.taken

    assert all(taken >= 3 * 5 for taken in run_ranks(n, body))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("root", [0, "last"])
def test_a_call_in_place_teaches_nothing_about_the_call_on_two_arrays(
    run_ranks: RunRanks, n: int, root: int | str
) -> None:
    """Each operation first within one array and then, alike in all but that, from one to another."""

    def body(p: Any) -> None:
        c: Communicator = p.communicator()
        end, at = p.soon(), 0 if root == 0 else n - 1
        make = p.segment.arena.from_array
        rows = np.arange(n * 300, dtype=np.float32).reshape(n, 300)
        whole, mine = make(rows), make(rows[p.rank])
        here = make(np.zeros_like(rows))
        for turn in range(3):
            out = whole[at] if p.rank == at else make(np.zeros(300, np.float32))
            source = whole if p.rank == at else None
            c.scatter(source, at, out, deadline_ns=end)
            assert (out == rows[p.rank]).all(), turn
            apart = make(np.zeros(300, np.float32))
            c.scatter(source, at, apart, deadline_ns=end)
            assert (apart == rows[p.rank]).all(), turn

            here[:] = 0
            here[p.rank] = mine
            for given in (here[p.rank], mine):
                kept = here if given is not mine else make(np.zeros_like(rows))
                c.all_gather(given, kept, deadline_ns=end)
                assert (kept == rows).all(), turn
                kept = here if given is not mine else make(np.zeros_like(rows))
                c.gather(given, at, kept, deadline_ns=end)
                assert p.rank != at or (kept == rows).all(), turn

            terms = make(rows.copy())
            c.reduce_scatter(terms, terms[p.rank], deadline_ns=end)
            assert (terms[p.rank] == n * rows[p.rank]).all(), turn
            c.reduce_scatter(make(rows), apart, deadline_ns=end)
            assert (apart == n * rows[p.rank]).all(), turn

    run_ranks(n, body)


def test_what_the_lane_cannot_take_goes_the_long_way(run_ranks: RunRanks) -> None:
    def body(p: Any) -> list[int]:
        c: Communicator = p.communicator()
        end = p.soon()
        plain, shared = np.ones(50_000), p.segment.arena.from_array(np.ones(50_000))
        c.all_reduce(shared, deadline_ns=end)
        c.all_reduce(shared, deadline_ns=end)
        seen = [c.fast_path.taken]
        c.all_reduce(plain, deadline_ns=end)  # outside of the arena, and used where it lies
        for given in (shared, plain):  # what peers read is staged
            c.all_reduce(given, algorithm="direct", deadline_ns=end)
        c.all_reduce(np.ones((50_000, 2))[:, 0], deadline_ns=end)  # not contiguous
        c.all_reduce(shared.astype(np.float32), deadline_ns=end)  # another dtype
        c.all_reduce(shared, op="max", deadline_ns=end)  # another reduction
        few = np.ones(100)
        for _ in range(2):
            c.all_reduce(few[:50], few[50:], deadline_ns=end)
        seen.append(c.fast_path.taken)
        few.flags.writeable = False
        with pytest.raises(UserError, match="read-only"):
            c.all_reduce(few[:50], few[50:])
        both = np.ones(99)
        with pytest.raises(UserError, match="overlap"):
            c.all_reduce(both[:50], both[49:])
        c.barrier(deadline_ns=end)
        return seen

    assert run_ranks(2, body) == [[1, 3]] * 2


def test_a_kill_at_every_point_of_a_call_on_the_lane(run_ranks: RunRanks) -> None:
    """A survivor ends with the error that names the dead, or has the whole sum."""

    def body_for(point: int, count: int) -> Callable[[Any], str]:
        def body(p: Any) -> str:
            c: Communicator = p.communicator()
            x = p.segment.arena.from_array(np.ones(count, np.float32))
            try:
                for _ in range(3):
                    c.all_reduce(x, deadline_ns=p.soon())
            except (MembersLost, OperationAborted):
                assert p.rank != 1, "who is slow may hear in the third of a death in the fourth"
                return "lost"
            taken = c.fast_path.taken
            x.fill(p.rank + 1)
            if p.rank == 1:
                c.kill_at(c.sequence + 1, point)
            try:
                c.all_reduce(x, deadline_ns=p.soon())
            except (MembersLost, OperationAborted) as error:  # aborted: the other survivor has given up first
                assert not isinstance(error, MembersLost) or error.ranks == (1,)
                assert c.flight[-1].state is FlightState.FAILED
                with pytest.raises(OperationAborted, match="has ended"):
                    c.all_reduce(x)
                answer = "lost"
            else:
                assert (x == 6).all()
                answer = "complete"
            assert c.fast_path.taken == taken + 1
            return answer

        return body

    outcomes: set[str] = set()
    for count in (1, 3_000):
        for point in range(6):
            outcomes.update(filter(None, run_ranks(3, body_for(point, count), dies=frozenset({1}))))
    assert "lost" in outcomes and outcomes <= {"lost", "complete"}


def test_ranks_that_call_differently_are_told_so_on_the_lane(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        c: Communicator = p.communicator()
        one, two = np.ones(1), np.ones(2)
        for _ in range(2):
            c.all_reduce(one, deadline_ns=p.soon())
            c.all_reduce(two, deadline_ns=p.soon())
        with pytest.raises(Desynchronised) as caught:
            c.all_reduce(one if p.rank == 0 else two, deadline_ns=p.soon())
        assert c.fast_path.taken == 3 and one[0] == 4.0
        return str(caught.value)

    for text in run_ranks(2, body):
        assert "rank 0 called all_reduce(float64[1]" in text and "rank 1 called all_reduce(float64[2]" in text


def test_a_deadline_and_an_abort_end_a_call_on_the_lane(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        first: Communicator = p.communicator(channel=0)
        second: Communicator = p.communicator(channel=1)
        x = np.ones(4)
        for c in (first, second):
            for _ in range(2):
                c.all_reduce(x, deadline_ns=p.soon())
        if p.rank == 0:
            with pytest.raises(DeadlineExceeded):
                first.all_reduce(x, deadline_ns=now_ns() + 1_000_000)
            assert first.flight[-1].state is FlightState.FAILED and first.fast_path.taken == 2
            aborter = threading.Thread(target=second.abort)
            started = threading.Event()

            def call() -> None:
                started.set()
                with pytest.raises(OperationAborted):
                    second.all_reduce(x, deadline_ns=p.soon())

            caller = threading.Thread(target=call)
            caller.start()
            started.wait(WAIT_S_MAX)
            aborter.start()
            caller.join(WAIT_S_MAX)
            assert not caller.is_alive()
        return "done"

    assert run_ranks(2, body) == ["done"] * 2


def test_the_lane_records_its_flights(run_ranks: RunRanks) -> None:
    def body(p: Any) -> list[tuple[str, str, int, int, bool]]:
        c: Communicator = p.communicator()
        for _ in range(2):
            c.all_reduce(np.ones(3, np.float32), deadline_ns=p.soon())
        x = p.segment.arena.from_array(np.ones(50_000, np.float32))
        for _ in range(2):
            c.all_reduce(x, deadline_ns=p.soon())
        assert all(r.state is FlightState.COMPLETE and r.start_ns <= r.end_ns for r in c.flight)
        assert all(r.start_ns <= r.met_ns <= r.end_ns for r in list(c.flight)[2:])
        return [(r.operation, r.algorithm, r.sequence, r.nbytes, r.met_ns > 0) for r in c.flight]

    small = [["all_reduce", "eager", at, 12, False] for at in (1, 2)]
    large = [["all_reduce", "swap", at, 200_000, True] for at in (3, 4)]
    assert run_ranks(2, body) == [small + large] * 2


async def test_a_blocking_call_comes_after_what_was_submitted_before() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        x = np.ones(3)
        for _ in range(2):
            assert group.blocking.all_reduce(x) is x
        group.blocking.barrier()
        assert group.communicator.fast_path.taken >= 1
        order: list[str] = []
        gate = threading.Event()
        group.submit(lambda _: gate.wait(WAIT_S_MAX))
        group.submit(lambda _: order.append("submitted"))

        def call() -> None:
            group.blocking.all_reduce(x)
            order.append("blocking")

        caller = threading.Thread(target=call)
        caller.start()
        gate.set()
        caller.join(WAIT_S_MAX)
        assert order == ["submitted", "blocking"]
        with pytest.raises(UserError, match="timeout"):
            group.blocking.barrier(timeout=-1)
        await group.close()
        with pytest.raises(OperationAborted):
            group.blocking.all_reduce(x)
