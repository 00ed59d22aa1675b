"""Ordinary arrays of peers are read where they lie, if the members of a group have found that they can."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.processes.program_points import points_of

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.group_trials import NOT_TRIED, Reading
from zbmd.collectives.errors import MembersLost, OperationAborted
from zbmd.collectives.native._program import CACHED, READ
from zbmd.collectives.native._stepper import read_memory
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.native._native import WAIT_OK, address_of, wait

RunRanks = Callable[..., list[Any]]
COUNT = 100_003
MEMFD_SECRET = 447
"""The number of the system call, on every architecture."""
SHARED_ADDRESS = bytes(8 * COUNT)
"""Made before the ranks are forked: it lies at one address in all of them."""


def reading(p: Any) -> Communicator:
    """A communicator whose members have found that they can read each other's memory."""
    c: Communicator = p.communicator()
    c.tune(deadline_ns=p.soon())
    assert c._executor.reads_peers
    return c


def checksum(x: Any) -> int:
    return zlib.crc32(x.tobytes())


def every_operation(c: Communicator, x: Any, make: Callable[[Any], Any], end: int) -> list[int]:
    """The checksums of what each operation gives this rank; `make` puts an array where it is to lie."""
    n, rank = c.size, c.rank
    rows = np.stack([np.roll(x, at) for at in range(n)])
    results = []
    for _ in range(2):  # the second time by the fast path
        for root in (0, n - 1):
            results.append(checksum(c.broadcast(make(x), root, deadline_ns=end)))
            reduced = c.reduce(make(x), root, make(np.zeros_like(x)), deadline_ns=end)
            results.append(0 if reduced is None else checksum(reduced))
            gathered = c.gather(make(x), root, make(np.zeros_like(rows)), deadline_ns=end)
            results.append(0 if gathered is None else checksum(gathered))
            block = make(np.zeros_like(x))
            c.scatter(make(rows) if rank == root else None, root, block, deadline_ns=end)
            results.append(checksum(block))
        results += [
            checksum(c.all_gather(make(x), make(np.zeros_like(rows)), deadline_ns=end)),
            checksum(c.reduce_scatter(make(rows), make(np.zeros_like(x)), op="max", deadline_ns=end)),
            checksum(c.all_to_all(make(rows), make(np.zeros_like(rows)), deadline_ns=end)),
            checksum(c.all_reduce(make(x), op="avg", algorithm="direct", deadline_ns=end)),
            checksum(c.all_reduce(make(x), make(np.zeros_like(x)), algorithm="direct", deadline_ns=end)),
            checksum(c.all_reduce(make(x), algorithm="double_tree", deadline_ns=end)),
            checksum(c.broadcast(make(x), n - 1, algorithm="tree", deadline_ns=end)),
        ]
    return results


@pytest.mark.parametrize("n", [2, 3])
def test_every_operation_has_the_bits_of_arrays_in_the_arena(run_ranks: RunRanks, n: int) -> None:
    def body(p: Any) -> None:
        c, arena = reading(p), p.segment.arena
        for dtype in (np.float32, np.float16):
            x = np.random.default_rng(p.rank).standard_normal(COUNT).astype(dtype)
            expected = every_operation(c, x, arena.from_array, p.soon())
            used = arena.used_bytes
            assert every_operation(c, x, np.copy, p.soon()) == expected
            # Some ranks' arrays in the arena, others' not.
            mixed = arena.from_array if p.rank == 1 else np.copy
            assert every_operation(c, x, mixed, p.soon()) == expected
            assert arena.used_bytes <= used
        assert c.fast_path.taken > 0

    run_ranks(n, body, arena_bytes=64 << 20)


@pytest.mark.parametrize("n", [2, 3])
def test_arrays_in_the_own_inbox_are_read_as_ordinary_ones(run_ranks: RunRanks, n: int) -> None:
    """As a stage of a pipeline has them, which computes on what lies in the slots of its rings."""

    def body(p: Any) -> None:
        c, arena, inbox = reading(p), p.segment.arena, p.segment.inbox

        def received(x: Any) -> Any:
            made = inbox.empty(x.shape, x.dtype)
            made[...] = x
            return made

        x = np.random.default_rng(p.rank).standard_normal(1003).astype(np.float32)
        assert every_operation(c, x, received, p.soon()) == every_operation(c, x, np.copy, p.soon())
        mixed = (arena.from_array, received, np.copy)[p.rank]
        assert every_operation(c, x, mixed, p.soon()) == every_operation(c, x, np.copy, p.soon())

    run_ranks(n, body, arena_bytes=8 << 20)


def test_nothing_is_staged_and_an_array_larger_than_the_arena_will_do(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        c = reading(p)
        x = np.full(3_000_000, p.rank + 1, np.float32)  # 12 MB, with an arena of 64 KiB
        assert (c.broadcast(x, 1, deadline_ns=p.soon()) == 2).all()
        assert (c.all_reduce(x, algorithm="direct", deadline_ns=p.soon()) == 4).all()
        rows = c.all_gather(x, deadline_ns=p.soon())
        assert rows.shape == (2, x.size) and (rows == 4).all()
        assert p.segment.arena.used_bytes == 0

    run_ranks(2, body, arena_bytes=1 << 16)


def test_a_subset_of_the_members_reads_as_all_do(run_ranks: RunRanks) -> None:
    def body(p: Any) -> bool:
        whole = reading(p)
        if p.rank == 1:
            return False
        part: Communicator = p.communicator(members=(2, 0), channel=1)
        part.read_peers(whole.reading)
        x = np.full(COUNT, p.rank, np.float64)
        assert (part.broadcast(x, 0, deadline_ns=p.soon()) == 2).all()
        return part._executor.reads_peers

    assert run_ranks(3, body) == [True, False, True]


def test_a_trial_has_a_number_of_its_own_which_all_of_its_members_know(run_ranks: RunRanks) -> None:
    def body(p: Any) -> tuple[int, int]:
        first, second = p.communicator(), p.communicator(members=(0, 1, 2), channel=1)
        for c in (first, second):
            c.try_reading(deadline_ns=p.soon())
        return first.reading.number, second.reading.number

    every = run_ranks(3, body)
    assert every == [every[0]] * 3 and len({*every[0], NOT_TRIED.number}) == 3


def test_where_one_cannot_be_read_all_are_staged(run_ranks: RunRanks) -> None:
    """The kernel refuses one of them, as it does where they are of different users."""

    def body(p: Any) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            if p.rank == 1:
                refused = OSError(1, "Operation not permitted")
                patch.setattr("zbmd.collectives.communicator.group_trials.read_memory", _raise(refused))
            c: Communicator = p.communicator()
            c.tune(deadline_ns=p.soon())
        x = np.full(COUNT, p.rank, np.float64)
        assert (c.broadcast(x, 0, deadline_ns=p.soon()) == 0).all()
        return c._executor.reads_peers

    assert run_ranks(2, body) == [False, False]


def _raise(error: OSError) -> Callable[..., bytes]:
    def refuse(*_: int) -> bytes:
        raise error

    return refuse


def test_memory_is_read_or_the_kernels_error_told() -> None:
    kept = np.arange(1_000)
    assert read_memory(os.getpid(), address_of(kept), kept.nbytes) == kept.tobytes()
    with pytest.raises(OSError, match="cannot be read"):
        read_memory(os.getpid(), 4096, 8)


def test_an_array_that_has_gone_is_told_and_ends_the_group(run_ranks: RunRanks) -> None:
    """Rank 1 describes an address that nothing is mapped at: it is not taken for rank 1's end."""

    def body(p: Any) -> str:
        c = reading(p)
        x = np.zeros(COUNT)
        if p.rank == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("zbmd.collectives.communicator.pieces.address", lambda array: 1 << 40)
                with pytest.raises((OperationAborted, RemoteProtocolError)):
                    c.broadcast(x, 1, algorithm="direct", deadline_ns=p.soon())
            return ""
        with pytest.raises(RemoteProtocolError, match="cannot be read") as told:
            c.broadcast(x, 1, algorithm="direct", deadline_ns=p.soon())
        return str(told.value)

    assert "rank 1" in run_ranks(2, body)[0]


def secret_array(count: int) -> Any:
    """Memory that its process uses like any other, and no other process reads; None: there is none."""
    fd = ctypes.CDLL(None, use_errno=True).syscall(MEMFD_SECRET, 0)
    if fd < 0:
        return None
    os.ftruncate(fd, 4 * count)
    mapped = mmap.mmap(fd, 4 * count)
    os.close(fd)
    return np.frombuffer(mapped, np.float32)


@pytest.mark.parametrize("owners", [(0,), (1,), (0, 1)])
def test_arrays_that_only_their_rank_can_read_are_put(run_ranks: RunRanks, owners: tuple[int, ...]) -> None:
    """One after the other with arrays that can be read, most of them by the fast path."""
    if secret_array(1) is None:
        pytest.skip("the kernel has no memfd_secret(2), or it is switched off")
    count = 5_000

    def body(p: Any) -> list[list[str]]:
        c, plain = reading(p), np.zeros(count, np.float32)
        own = secret_array(count) if p.rank in owners else np.zeros(count, np.float32)
        c._executor.native.always(READ)
        before = len(c.flight)
        for turn in range(6):
            for x in (own, plain):
                x[:] = p.rank + turn
                got = c.all_reduce(x, deadline_ns=p.soon())
                assert got is x and (x == 1 + 2 * turn).all()
        taken = [flight.algorithm for flight in c.flight][before:]
        with pytest.raises((OperationAborted, RemoteProtocolError)):  # it cannot be read indeed
            c.all_reduce(own, algorithm="direct", deadline_ns=p.soon())
        return [taken[::2], taken[1::2]]

    assert run_ranks(2, body) == [[["swap"] * 6, ["direct"] * 6]] * 2


def test_what_was_read_of_another_process_with_the_number_of_a_dead_one_does_not_count(
    run_ranks: RunRanks,
) -> None:
    """Rank 2 stands for it: a living process, forked as rank 1 was, with something at the same address."""

    def body(p: Any) -> str:
        if p.rank == 2:
            p.await_death(1)
            return ""
        c: Communicator = p.communicator(members=(0, 1))
        c.read_peers(Reading(1, {0: p.pids[0], 1: p.pids[2]}))
        x = np.frombuffer(SHARED_ADDRESS, np.float64)
        if p.rank == 1:
            c.broadcast(x, 1, deadline_ns=p.soon())
        begun = wait(p.segment.base, 1, 0, c.epoch << 32 | 1, deadline_ns=p.soon())
        assert begun == WAIT_OK  # it has told where its array lies, and waits for us
        os.kill(p.pids[1], signal.SIGKILL)
        p.await_death(1)
        assert read_memory(p.pids[2], address_of(x), 8) == x[:1].tobytes()
        with pytest.raises(MembersLost) as lost:
            c.broadcast(np.empty_like(x), 1, deadline_ns=p.soon())
        assert lost.value.ranks == (1,)
        return "lost"

    assert run_ranks(3, body, dies=frozenset((1,))) == ["lost", None, ""]


@pytest.mark.parametrize(
    ("name", "way"),
    [("gather", READ), *((name, way) for name in ("broadcast", "reduce_scatter") for way in (CACHED, READ))],
)
def test_a_reader_learns_of_the_end_of_whom_it_reads(run_ranks: RunRanks, name: str, way: int) -> None:
    """A member is killed at each point of a run over ordinary arrays: results are right, or none."""

    def call(c: Communicator, rank: int, end: int) -> Any:
        rows = np.arange(2 * COUNT, dtype=np.float64).reshape(2, COUNT) + rank
        if name == "broadcast":
            return c.broadcast(rows[0], 1, deadline_ns=end)
        if name == "gather":
            return c.gather(rows[0], 0, deadline_ns=end)
        return c.reduce_scatter(rows, deadline_ns=end)

    def body(p: Any, point: int) -> str:
        c = reading(p)
        c._executor.native.always(way)
        if p.rank == 1:
            c.kill_at(c.sequence + 1, point)
        try:
            outcome = str(checksum(call(c, p.rank, p.soon())))
        except MembersLost as lost:
            assert lost.ranks == (1,)
            outcome = "lost"
        except OperationAborted:
            outcome = "aborted"
        p.await_death(1)
        return outcome

    def undisturbed(p: Any) -> list[str]:
        c = reading(p)
        c._executor.native.always(way)
        result = checksum(call(c, p.rank, p.soon())) if p.rank == 0 else call(c, p.rank, p.soon()) is None
        return [str(result), c.flight[-1].algorithm]

    right, algorithm = run_ranks(2, undisturbed)[0]
    assert (algorithm == "direct") == (way == READ)
    points = points_of(run_ranks, lambda p: call(reading(p), p.rank, p.soon()), 2)[1]
    outcomes = [
        run_ranks(2, lambda p, at=point: body(p, at), dies=frozenset((1,)), arena_bytes=1 << 16)[0]
        for point in range(points)
    ]
    assert set(outcomes) <= {"lost", "aborted", right} and "lost" in outcomes
