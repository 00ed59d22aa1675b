"""Collectives between processes on different hosts: the bits, the errors and the words of one host."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.processes.stopping import await_stop

from zbmd.collectives.algorithms.shard_tree import assign_shards, reduce_shards, shard_tree_nodes
from zbmd.collectives.errors import Desynchronised, MembersLost, OperationAborted
from zbmd.collectives.execution.remote_fetch import Ended, Fetcher
from zbmd.collectives.execution.remote_sending import Slots, slot_payload_bytes
from zbmd.collectives.execution.remote_walk import Walk
from zbmd.collectives.native._remote_stepper import RemoteGroup
from zbmd.collectives.native._stepper import COUNTER_MAX, PUB_BYTES_MAX, STATUS_ABORTED
from zbmd.collectives.programs.reductions import REDUCTIONS, dtypes, reduction_code
from zbmd.transport.bulk.peer import BulkPeer
from zbmd.transport.errors import DeadlineExceeded, RemoteProtocolError, UserError
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native._native import now_ns
from zbmd.transport.rdma.remote_memory import RemoteMemory

RunRanks = Callable[..., list[Any]]
Array = NDArray[Any]
COUNTS = (0, 1, 367, 1_001, 70_003)
LAYOUTS: list[tuple[int, ...]] = [(0, 1), (0, 1, 2), (0, 0, 1), (0, 1, 0, 1), (0, 1, 2, 3)]
PARTS = 2 * len(LAYOUTS)
"""Each layout has, of each count, its part of the reductions of all dtypes; together they have them all."""
IN_OFFSETS_AT = 104
"""In a descriptor: the offset of the first input."""
ASIDE = 5
"""A channel for tests to tell each other something."""
MEETING = 6
"""A channel on which the members meet before an epoch."""
ALGORITHMS = (
    "auto",
    "direct",
    "swap",
    "shared",
    "ring",
    "bidirectional_ring",
    "halving_doubling",
    "tree",
    "double_tree",
)
DTYPES = tuple(dtypes())


def values(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    draw = np.random.default_rng([rank, count])
    if dtype.kind in "fVc":
        return draw.standard_normal(count).astype(dtype)
    return draw.integers(0, 100, count).astype(dtype)


def has(op: str, dtype: np.dtype[Any]) -> bool:
    try:
        reduction_code(op, dtype)
    except UserError:
        return False
    return True


def all_reduces(p: Any, c: Any, part: int) -> list[Array]:
    found: list[Array] = []
    for i, count in enumerate(COUNTS):
        for d, dtype in enumerate(DTYPES):
            for k, op in enumerate(REDUCTIONS):
                if (k + d + 2 * i) % PARTS != part or not has(op, dtype):
                    continue
                algorithm = ALGORITHMS[len(found) % len(ALGORITHMS)]
                make = p.segment.arena.from_array if k % 2 else np.copy
                x = make(values(p.rank, count, dtype))
                out = make(np.zeros_like(x))
                found.append(c.all_reduce(x, out, op=op, algorithm=algorithm, deadline_ns=p.soon()).copy())
                assert (x == values(p.rank, count, dtype)).all(), "an input was touched"
                assert c.all_reduce(x, op=op, algorithm=algorithm).tobytes() == found[-1].tobytes()
    return found


def others(p: Any, c: Any, _: int) -> list[Array]:
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


def uneven(p: Any, c: Any, _: int) -> list[Array]:
    """Operations whose blocks lie by a layout, and those with a root."""
    found: list[Array | None] = []
    n = c.size
    for count in (0, 1, 367, 9_001):
        for make in (p.segment.arena.from_array, np.copy):
            x = make(values(p.rank, count * n, np.dtype(np.float16)).reshape(n, count))
            root = c.members[count % n]
            for algorithm in ("auto", "direct", "swap", "bruck"):
                found.append(c.all_to_all(x, algorithm=algorithm, deadline_ns=p.soon()))
            for algorithm in ("auto", "direct", "shared"):
                found.append(c.gather(x, root, algorithm=algorithm))
                block = np.zeros(count, np.float16)
                found.append(c.scatter(x if p.rank == root else None, root, block, algorithm=algorithm))
            for algorithm in ("auto", "direct", "shared", "tree"):
                found.append(c.reduce(x, root, np.zeros_like(x), algorithm=algorithm))
            rows = [[(s + 2 * d) % 3 * count for d in range(n)] for s in range(n)]
            sent = make(values(p.rank, sum(rows[c.place]), np.dtype(np.float64)))
            found.append(c.all_to_all_v(sent, rows[c.place], [rows[s][c.place] for s in range(n)]))
            found.append(c.all_gather_v(sent))
    return [x for x in found if x is not None]


def shards(p: Any, c: Any, _: int) -> list[Array]:
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
@pytest.mark.parametrize("operations", [all_reduces, others, uneven, shards])
def test_the_bits_are_those_of_one_host(
    run_ranks: RunRanks, operations: Callable[[Any, Any, int], list[Array]], hosts: tuple[int, ...]
) -> None:
    def body(p: Any) -> list[str]:
        found = operations(p, p.communicator(), LAYOUTS.index(hosts))
        return [hashlib.sha256(x.tobytes()).hexdigest()[:16] for x in found]

    assert run_ranks(len(hosts), body, hosts=hosts) == run_ranks(len(hosts), body)


def next_epoch_works(p: Any, epoch: int = 2) -> None:
    """The members are still linked, and their memory is sound.

    As by a view, nobody gets there before all have left the epoch before: who hears of it first is aborted.
    """
    p.communicator(epoch=epoch, channel=MEETING).barrier(deadline_ns=p.soon())
    total = p.communicator(epoch=epoch).all_reduce(np.full(90_000, p.rank, np.int64), deadline_ns=p.soon())
    assert (total == sum(range(p.n))).all()


def test_calls_that_differ_are_named(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        c = p.communicator()
        with pytest.raises(Desynchronised) as caught:
            c.all_reduce(np.zeros(5 + p.rank, np.float32), deadline_ns=p.soon())
        return str(caught.value)

    texts = run_ranks(2, body, hosts=(0, 1))
    assert all("all_reduce(float32[5]" in text and "all_reduce(float32[6]" in text for text in texts)


def test_a_member_that_does_not_come_costs_no_more_than_the_deadline(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        c = p.communicator()
        outcome = ""
        if p.rank == 0:
            with pytest.raises(DeadlineExceeded) as caught:
                c.all_reduce(np.zeros(70_000, np.float32), deadline_ns=now_ns() + 1)
            outcome = str(caught.value)
        else:
            # The other gives up, and says so to whoever comes later.
            p.segment.wait(0, 0, 1 << 32 | COUNTER_MAX, deadline_ns=p.soon())
            with pytest.raises(OperationAborted):
                c.all_reduce(np.zeros(70_000, np.float32), deadline_ns=p.soon())
        next_epoch_works(p)
        return outcome

    assert "entering" in run_ranks(2, body, hosts=(0, 1))[0]


def test_what_a_member_answers_after_the_deadline_goes_nowhere(run_ranks: RunRanks) -> None:
    """One that stands still is not lost: its host acknowledges what is sent to it."""

    def body(p: Any) -> None:
        def stand_still(_: Walk) -> None:
            p.segment.wait(0, ASIDE, 1, deadline_ns=p.soon())  # the other has entered, too
            os.kill(os.getpid(), signal.SIGSTOP)
            raise Ended(STATUS_ABORTED)

        c = p.communicator()
        x = p.segment.arena.from_array(np.ones(900_000, np.float32))
        asked: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            if p.rank == 1:
                patch.setattr(Walk, "run", stand_still)
                with pytest.raises(OperationAborted):
                    c.all_reduce(x, deadline_ns=p.soon())
            else:
                ask = Fetcher.ask

                def ask_one_that_is_stopped(self: Any) -> list[Any]:
                    p.peers[1].notify(ASIDE, 1)
                    await_stop(p.pids[1])
                    found = ask(self)
                    asked.append(len(found))
                    self._deadline_ns = now_ns() + 1
                    return found

                patch.setattr(Fetcher, "ask", ask_one_that_is_stopped)
                try:
                    with pytest.raises(DeadlineExceeded):
                        c.all_reduce(x, deadline_ns=p.soon())
                    x[:] = 7
                finally:
                    os.kill(p.pids[1], signal.SIGCONT)
                assert asked[0] > 0
        next_epoch_works(p)
        assert p.rank == 1 or (x == 7).all()

    run_ranks(2, body, hosts=(0, 1))


def test_who_gives_up_may_change_its_memory_at_once(run_ranks: RunRanks) -> None:
    """Though it is being read: what has been promised goes out as it was, under its MAC."""

    def body(p: Any) -> None:
        x = p.segment.arena.from_array(np.ones(900_000, np.float32))
        for epoch in range(1, 9):
            c = p.communicator(epoch=epoch)
            with pytest.MonkeyPatch.context() as patch:
                if p.rank == 1:

                    def give_up(self: Any, epoch: int = epoch) -> None:
                        for _ in range(epoch * 1000):
                            pass  # let the other get on, each time a little further
                        raise Ended(STATUS_ABORTED)

                    patch.setattr(Walk, "run", give_up)
                with pytest.raises(OperationAborted):
                    c.all_reduce(x, deadline_ns=p.soon())
            for fill in range(5):
                x[:] = fill
            c.close()
        next_epoch_works(p, 9)

    run_ranks(2, body, hosts=(0, 1))


def test_who_gives_up_lends_nothing_more_once_it_lets_go(run_ranks: RunRanks) -> None:
    """A later request would be served from memory that may change, under an older tag."""

    def body(p: Any) -> int:
        x, regions = p.segment.arena.from_array(np.ones(900_000, np.float32)), p.segment.regions
        c, lend, let_go = p.communicator(), regions.lend, RemoteMemory.let_go
        lent: list[RegionHandle] = []
        checked = 0

        def lend_and_tell(*args: Any, **options: Any) -> RegionHandle:
            lent.append(lend(*args, **options))
            return lent[-1]

        def let_go_and_look(self: RemoteMemory, transfers: Iterable[Transfer]) -> None:
            nonlocal checked
            let_go(self, transfers)
            for handle in lent:
                with pytest.raises(RemoteProtocolError):
                    regions.resolve(handle, 0, 1, write=False)
                checked += 1

        def give_up(self: Any) -> None:
            raise Ended(STATUS_ABORTED)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(regions, "lend", lend_and_tell)
            patch.setattr(RemoteMemory, "let_go", let_go_and_look)
            if p.rank == 1:
                patch.setattr(Walk, "run", give_up)
            with pytest.raises(OperationAborted):
                c.all_reduce(x, deadline_ns=p.soon())
        next_epoch_works(p)
        return checked

    assert all(run_ranks(2, body, hosts=(0, 1)))


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        (lambda true: 1 << 50, RemoteProtocolError),
        (lambda true: 8, RemoteProtocolError),
        (lambda true: true + 64, OperationAborted),
    ],
)
def test_a_descriptor_is_not_trusted(
    run_ranks: RunRanks, lie: Callable[[int], int], error: type[Exception]
) -> None:
    """Memory outside of the segment is refused here; memory that was not lent, by its owner."""

    def body(p: Any) -> None:
        c = p.communicator()
        x = p.segment.arena.from_array(np.ones(70_000, np.float32))
        if p.rank == 1:
            descriptor = RemoteGroup.descriptor

            class Lying:
                def __init__(self, group: RemoteGroup) -> None:
                    self._group = group

                def __getattr__(self, name: str) -> Any:
                    return getattr(self._group, name)

                def descriptor(self, program: Any) -> bytes:
                    data = bytearray(descriptor(self._group, program))
                    at = IN_OFFSETS_AT
                    true = int.from_bytes(data[at : at + 8], "little")
                    data[at : at + 8] = lie(true).to_bytes(8, "little")
                    return bytes(data)

            c._executor._group = Lying(c._executor._group)
            with pytest.raises(OperationAborted):
                c.all_reduce(x, x.copy(), algorithm="direct", deadline_ns=p.soon())
        else:
            with pytest.raises(error):
                c.all_reduce(x, x.copy(), algorithm="direct", deadline_ns=p.soon())
        next_epoch_works(p)

    run_ranks(2, body, hosts=(0, 1))


@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 2), (0, 0, 1)])
def test_inputs_travel_with_the_descriptors(run_ranks: RunRanks, hosts: Sequence[int]) -> None:
    """From the second operation on, if no two members share memory; the bits are those of other programs."""

    def body(p: Any) -> list[int]:
        c = p.communicator()
        limits = [c._executor.eager_bytes_max]
        c.barrier()
        limit = c._executor.eager_bytes_max
        limits.append(limit)
        for count in (353, limit // 4, limit // 4 + 1, limit // 4, 1):
            for fill in range(2):
                x = values(10 * p.rank + fill, count, np.dtype(np.float32))
                kept = x.copy()
                direct = c.all_reduce(x, np.empty_like(x), algorithm="direct", deadline_ns=p.soon())
                assert c.all_reduce(x, deadline_ns=p.soon()).tobytes() == direct.tobytes()
                gathered = c.all_gather(kept, algorithm="direct", deadline_ns=p.soon())
                assert c.all_gather(kept, deadline_ns=p.soon()).tobytes() == gathered.tobytes()
        with pytest.raises(UserError, match="eager"):
            c.all_reduce(np.zeros(limit // 4 + 1, np.float32), algorithm="eager")
        return limits

    first, then = run_ranks(len(hosts), body, hosts=hosts)[0]
    apart = len(set(hosts)) == len(hosts)
    assert first == PUB_BYTES_MAX
    assert then == (slot_payload_bytes(len(hosts)) if apart else PUB_BYTES_MAX)


def wide_operations(p: Any, c: Any, count: int, dtype: type[Any], algorithm: str) -> list[bytes]:
    """Each by this algorithm. A rank that returns changes what it gave at once."""
    n, root = c.size, c.members[-1]
    found: list[bytes] = []

    def took(result: Array | None, *given: Array) -> None:
        found.append(b"" if result is None else result.tobytes())
        for array in given:
            array.fill(77)

    def fresh(size: int) -> Array:
        return values(p.rank, size, np.dtype(dtype))

    for _ in range(3):  # the last two by the fast path
        soon = {"algorithm": algorithm, "deadline_ns": p.soon()}
        for out in (np.empty(count, dtype), None):  # apart, and in place
            x = fresh(count)
            took(c.all_reduce(x, out, **soon), x)
            x = fresh(count)
            took(c.reduce(x, root, out, **soon), x)
        x = fresh(count)
        took(c.broadcast(x, root, **soon), x)
        x, whole = fresh(count // n), np.empty((n, count // n), dtype)
        took(c.all_gather(x, whole, **soon), x)
        whole[c.place] = x = fresh(count // n)
        took(c.all_gather(whole[c.place], whole, **soon), x)
        took(c.gather(x, root, **soon), x)
        wide = fresh(count // n * n).reshape(n, count // n)
        took(c.reduce_scatter(wide, **soon), wide)
        wide = fresh(count // n * n).reshape(n, count // n)
        took(c.all_to_all(wide, np.empty_like(wide), **soon), wide)
        wide = fresh(count // n * n).reshape(n, count // n)
        given = wide if p.rank == root else None
        took(c.scatter(given, root, np.empty(count // n, dtype), **soon), wide)
        counts = [[(s + 2 * d) % 3 * (count // (2 * n)) for d in range(n)] for s in range(n)]
        x = fresh(sum(counts[c.place]))
        took(c.all_to_all_v(x, counts[c.place], [counts[s][c.place] for s in range(n)], **soon), x)
    return found


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 2)])
def test_what_a_member_reads_of_an_input_is_what_it_is_sent(
    run_ranks: RunRanks, hosts: Sequence[int], *, at_once: bool
) -> None:
    """The bits are those of another program, whether it leaves at once or not."""

    def body(p: Any) -> None:
        c = p.communicator()
        c.barrier()
        limit = c._executor.eager_bytes_max
        with pytest.MonkeyPatch.context() as patch:
            if not at_once:
                patch.setattr(BulkPeer, "put_now", lambda *_, **__: False)
            for count, dtype in ((190, np.float64), (9_001, np.float16), (limit // 4, np.float32)):
                found = wide_operations(p, c, count, dtype, "eager")
                assert found == wide_operations(p, c, count, dtype, "direct")
        assert c.fast_path.taken > 0

    run_ranks(len(hosts), body, hosts=hosts)


def test_a_member_is_sent_its_own_block_alone(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        c = p.communicator()
        c.barrier()
        sent: list[tuple[int, int]] = []
        send = Slots.send

        def count(self: Any, place: int, at: int, nbytes: int, **rest: Any) -> Transfer:
            sent.append((place, nbytes))
            return send(self, place, at, nbytes, **rest)

        def told(nbytes: Callable[[int], int]) -> None:
            others = [(c.place + k) % 3 for k in range(1, 3)]
            assert sent == [(place, nbytes(place)) for place in others]
            sent.clear()

        x, block = np.zeros((3, 5_000), np.float32), 20_000
        soon = {"algorithm": "eager", "deadline_ns": p.soon()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Slots, "send", count)
            c.all_to_all(x, **soon)
            told(lambda _: block)
            c.reduce_scatter(x, **soon)
            told(lambda _: block)
            c.scatter(x if c.place == 1 else None, c.members[1], np.empty(5_000, np.float32), **soon)
            told(lambda _: block if c.place == 1 else 0)
            c.gather(x[0], c.members[1], **soon)
            told(lambda place: block if place == 1 else 0)
            c.reduce(x[0], c.members[1], np.empty_like(x[0]), **soon)
            told(lambda place: block if place == 1 else 0)

    run_ranks(3, body, hosts=(0, 1, 2))


def test_who_dies_between_an_input_and_its_descriptor_is_lost(run_ranks: RunRanks) -> None:
    """Nobody takes for a result what is in a slot without one."""

    def body(p: Any) -> bool:
        c = p.communicator()
        c.barrier()
        x = np.full((3, 30_000), p.rank, np.float32)
        for _ in range(2):
            c.all_to_all(x, algorithm="eager", deadline_ns=p.soon())
        with pytest.MonkeyPatch.context() as patch:
            if p.rank == 0:
                patch.setattr(Slots, "put", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            out = np.full_like(x, 9)
            with pytest.raises(MembersLost) as caught:
                c.all_to_all(2 * x, out, algorithm="eager", deadline_ns=p.soon())
        return caught.value.ranks == (0,) and bool((out == 9).all())

    found = run_ranks(3, body, hosts=(0, 1, 2), dies=frozenset((0,)))
    assert found == [None, True, True]


def test_who_differs_in_a_wide_operation_is_told_of(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        c = p.communicator()
        c.barrier()
        with pytest.raises(Desynchronised) as caught:
            c.all_reduce(np.zeros(9_000 + p.rank, np.float32), algorithm="eager", deadline_ns=p.soon())
        next_epoch_works(p)
        return str(caught.value)

    texts = run_ranks(2, body, hosts=(0, 1))
    assert all("all_reduce(float32[9000]" in text and "all_reduce(float32[9001]" in text for text in texts)


def test_who_gives_up_a_wide_operation_is_told_of(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        c = p.communicator()
        c.barrier()
        x = np.zeros(9_000, np.float32)
        if p.rank == 0:
            with pytest.raises(DeadlineExceeded):
                c.all_reduce(x, algorithm="eager", deadline_ns=now_ns() + 1)
        else:
            p.segment.wait(0, 0, 1 << 32 | COUNTER_MAX, deadline_ns=p.soon())
            with pytest.raises(OperationAborted):
                c.all_reduce(x, algorithm="eager", deadline_ns=p.soon())
        next_epoch_works(p)

    run_ranks(2, body, hosts=(0, 1))


def broadcast_of(p: Any, c: Any, k: int, root: int = 0) -> bool:
    """Whether all have the root's."""
    x = np.full(300, 10 * k + p.rank, np.float32)
    c.broadcast(x, root, deadline_ns=p.soon())
    return bool((x == 10 * k + root).all())


def test_a_root_that_waits_for_nobody_overwrites_nothing(run_ranks: RunRanks) -> None:
    def body(p: Any) -> bool:
        c = p.communicator()
        right = [broadcast_of(p, c, k, root=k // 20 % 3) for k in range(120)]
        total = c.all_reduce(np.full(20_000, p.rank, np.int64), deadline_ns=p.soon())
        return all(right) and bool((total == 3).all()) and c.fast_path.taken > 0

    assert run_ranks(3, body, hosts=(0, 1, 2)) == [True] * 3


def test_it_is_one_operation_ahead_at_most(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        c, aside = p.communicator(), p.communicator(channel=ASIDE)
        assert broadcast_of(p, c, 1)
        if p.rank:
            aside.barrier(deadline_ns=p.soon())
            with pytest.raises(OperationAborted):
                broadcast_of(p, c, 2)
            return "aborted"
        assert broadcast_of(p, c, 2)
        with pytest.raises(DeadlineExceeded):
            c.broadcast(np.zeros(300, np.float32), 0, deadline_ns=now_ns() + 1)
        aside.barrier(deadline_ns=p.soon())
        return "too late"

    assert run_ranks(2, body, hosts=(0, 1)) == ["too late", "aborted"]


def test_it_learns_at_the_next_call_who_called_something_else(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        c = p.communicator()
        assert broadcast_of(p, c, 1)
        if p.rank == 0:
            assert broadcast_of(p, c, 2)
            with pytest.raises((Desynchronised, OperationAborted)):  # who has found out first gives up
                broadcast_of(p, c, 3)
            return ""
        with pytest.raises(Desynchronised) as caught:
            c.all_reduce(np.zeros(300, np.float32), deadline_ns=p.soon())
        return str(caught.value)

    told = run_ranks(2, body, hosts=(0, 1))[1]
    assert "rank 1 called all_reduce(" in told and "rank 0 called broadcast(" in told


def test_and_who_has_died(run_ranks: RunRanks) -> None:
    def body(p: Any) -> bool:
        c, aside = p.communicator(), p.communicator(channel=ASIDE)
        assert broadcast_of(p, c, 1)
        if p.rank == 1:  # which is not missed until the others are done
            aside.barrier(deadline_ns=p.soon())
            c.kill_at(c.sequence + 1, 0)
        assert broadcast_of(p, c, 2)
        with suppress(MembersLost):
            aside.barrier(deadline_ns=p.soon())
        with pytest.raises(MembersLost) as caught:
            broadcast_of(p, c, 3)
        return caught.value.ranks == (1,)

    found = run_ranks(3, body, hosts=(0, 1, 2), dies=frozenset((1,)))
    assert found == [True, None, True]
