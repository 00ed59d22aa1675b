"""Blocks that an arena keeps are found by the next one in the same memory, and by no other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
from programs import PROGRAMS

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.memory.kept import (
    KEPT_FDS_VARIABLE,
    KeptFile,
    block_of,
    exclusively,
    take_kept_fd,
)
from zbmd.transport.memory.memfd import TABLE_BYTES, HugePageSupport, PageKind, place
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native import _native

ARENA_BYTES = 1 << 20
BLOCK_BYTES = 100_000


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("kept", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


def incarnation_of(memory: int, number: int, *, arena_bytes: int = ARENA_BYTES) -> Segment:
    return Segment.create(
        slot=2, incarnation=number, arena_bytes=arena_bytes, inbox_bytes=4096, kept_fd=os.dup(memory)
    )


def test_a_replacement_finds_blocks_where_they_were(memory: int) -> None:
    with_noise = np.random.default_rng(1)
    first = incarnation_of(memory, 1)
    assert first.kept is not None
    other = first.arena.empty(1000)  # the order of what else there is does not matter
    state, is_old = first.kept.block("state", BLOCK_BYTES)
    assert not is_old
    second, _ = first.kept.block("second", BLOCK_BYTES)
    state[:], second[:] = with_noise.integers(256, size=(2, BLOCK_BYTES), dtype=np.uint8)
    offset, written = first.arena.offset_of(state), state.copy()
    del other, state, second
    first.close()

    next_one = incarnation_of(memory, 2)
    assert next_one.kept is not None
    filled = next_one.arena.zeros(next_one.arena.capacity_bytes // 2, np.uint8)
    assert not filled.any(), "what is asked for as zeros is zero in memory that was used"
    found, is_old = next_one.kept.block("state", BLOCK_BYTES)
    assert is_old
    assert (found == written).all()
    assert offset is not None and next_one.arena.offset_of(found) is not None
    changed, is_old = next_one.kept.block("second", BLOCK_BYTES + 64)
    assert not is_old and changed.nbytes == BLOCK_BYTES + 64
    with pytest.raises(LocalProtocolError, match="in use already"):
        next_one.kept.block("state", BLOCK_BYTES)
    next_one.arena.check_invariants()
    del filled, found, changed
    next_one.close()

    third = incarnation_of(memory, 3)
    assert third.kept is not None
    assert third.kept.block("second", BLOCK_BYTES + 64)[1]
    assert not third.kept.block("third", 64)[1]
    third.close()
    block = block_of(memory, "second")
    assert block is not None and len(block) == BLOCK_BYTES + 64
    assert block_of(memory, "state") is not None and block_of(memory, "fourth") is None
    os.pwrite(memory, b"\xff" * TABLE_BYTES, 0)
    assert block_of(memory, "second") is None, "a damaged table has no blocks"


def test_a_block_that_is_given_back_is_listed_no_more_and_others_are(memory: int) -> None:
    """Its place in the table, and its memory once no array of it is left, are another block's then."""
    ours = incarnation_of(memory, 1)
    assert ours.kept is not None
    first, _ = ours.kept.block("first", BLOCK_BYTES)
    second, _ = ours.kept.block("second", BLOCK_BYTES)
    second[:] = 7
    used = ours.arena.used_bytes
    ours.kept.release("first")
    assert block_of(memory, "first") is None and block_of(memory, "second") is not None
    assert ours.arena.used_bytes == used, "an array of it is still there"
    del first
    assert ours.arena.used_bytes < used
    third, is_old = ours.kept.block("third", 2 * BLOCK_BYTES)
    assert not is_old and not third.any()
    ours.kept.release("none")
    ours.arena.check_invariants()
    del second, third
    ours.close()

    later = incarnation_of(memory, 2)
    assert later.kept is not None and not later.kept.has("first")
    assert (later.kept.left("second"), later.kept.left("third")) == (BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert later.kept.peek("second", 4) == bytes([7] * 4)
    used = later.arena.used_bytes
    later.kept.release("third")  # what a predecessor left, and nobody took
    taken, is_old = later.kept.block("second", BLOCK_BYTES)
    assert is_old and (taken == 7).all()
    later.kept.release("second")
    del taken
    assert later.arena.used_bytes <= used - 3 * BLOCK_BYTES
    assert block_of(memory, "second") is None and block_of(memory, "third") is None
    later.arena.check_invariants()
    later.close()


def test_peers_map_both_files(memory: int) -> None:
    ours = incarnation_of(memory, 4)
    array = ours.arena.from_array(np.arange(1000))
    peer = PeerSegment.attach(ours.fds, slot=2)
    offset = ours.arena.offset_of(array)
    assert offset is not None
    assert (np.frombuffer(peer.arena_view(offset, array.nbytes), array.dtype) == array).all()
    with pytest.raises(LocalProtocolError, match="read-only"):
        peer.mapping.view(offset, 8, writable=True)
    peer.mapping.store64(_native.OFF_END, 7)  # the inbox is ours to write
    with pytest.raises(RemoteProtocolError, match="not one of ours"):
        PeerSegment.attach(ours.fds[:1], slot=2)
    with pytest.raises(RemoteProtocolError, match="not one of ours"):
        PeerSegment.attach([ours.fds[0], ours.fds[0]], slot=2)
    del array
    ours.close()


@pytest.mark.parametrize("wanted", [True, False])
def test_what_a_launcher_gives_is_taken_once_or_closed(memory: int, wanted: bool) -> None:
    ended = subprocess.Popen(["true"])
    given, pidfd = os.dup(memory), os.pidfd_open(ended.pid)
    environment = {KEPT_FDS_VARIABLE: f"{given} {pidfd}"}
    assert take_kept_fd(environment, wanted=wanted) == (given if wanted else None)
    assert not environment and take_kept_fd(environment, wanted=True) is None
    for fd in (pidfd,) if wanted else (pidfd, given):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    if wanted:
        os.close(given)
    ended.wait()


def test_memory_that_another_process_may_write_is_waited_for(memory: int) -> None:
    """A process that has it ends while it is waited for; one that does not is not waited for for ever."""
    holds = "import fcntl,os,sys; fcntl.flock(os.open('/proc/self/fd/%d' % int(sys.argv[1]), os.O_RDWR), 2); "
    for last, is_had in (
        ("print(flush=True); sys.stdin.read(1)", True),
        ("print(flush=True); os.pause()", False),
    ):
        last = last.replace("os.pause", "__import__('signal').pause")
        words = [sys.executable, "-c", holds + last, str(memory)]
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory]
        ) as other:
            assert other.stdin is not None and other.stdout is not None
            other.stdout.readline()
            if is_had:
                other.stdin.write(b"x")
                other.stdin.flush()
            given = os.dup(memory)
            with exclusively(given, wait_ms=20_000 if is_had else 20) as taken:
                assert taken == (given if is_had else None)
            if taken is not None:
                os.close(taken)
            other.kill()
    with exclusively(None) as taken:
        assert taken is None


def test_it_is_said_why_there_are_no_huge_pages(memory: int) -> None:
    none = HugePageSupport(hugetlb_free_bytes=0, shmem_mode="never", numa_nodes=1)
    placed = place("test", head_bytes=4096, arena_bytes=8 << 20, offer=none, kept_fd=memory)
    assert "shmem_enabled is 'never'" in " ".join(placed.placement.notes)
    os.close(placed.fd)


def test_memory_of_another_size_is_left_as_it_is(memory: int) -> None:
    incarnation_of(memory, 1).close()
    other = incarnation_of(memory, 2, arena_bytes=2 * ARENA_BYTES)
    assert other.kept is None and len(other.fds) == 1
    assert "of its predecessor" in " ".join(other.placement.notes)
    assert other.arena.capacity_bytes == 2 * ARENA_BYTES
    other.close()
    assert os.fstat(memory).st_size == ARENA_BYTES + TABLE_BYTES


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(bytes([255] * TABLE_BYTES), id="noise"),
        pytest.param(b"x".ljust(48, b"\0") + bytes([255] * 16), id="out of bounds"),
        pytest.param((b"x".ljust(48, b"\0") + (1 << 16).to_bytes(8, "little") * 2) * 2, id="twice"),
    ],
)
def test_a_damaged_table_is_not_followed(memory: int, damage: bytes) -> None:
    incarnation_of(memory, 1).close()
    os.pwrite(memory, damage, 0)
    segment = incarnation_of(memory, 2)
    assert segment.kept is not None
    segment.kept.block("state", BLOCK_BYTES)
    segment.arena.check_invariants()
    segment.close()


def test_large_memory_is_filled_while_its_process_goes_on(memory: int) -> None:
    none = HugePageSupport(hugetlb_free_bytes=0, shmem_mode="never", numa_nodes=1)
    nbytes = 160 << 20
    placed = place("test", head_bytes=4096, arena_bytes=nbytes, offer=none, kept_fd=memory)
    assert placed.filler is not None and placed.arena_fd == memory
    placed.filler.wait_for(placed.arena_offset, placed.mapping.nbytes)
    assert os.fstat(memory).st_blocks * 512 >= nbytes and placed.placement.pages is PageKind.BASE
    placed.filler.stop()
    os.close(placed.fd)


# Blocks without an arena.


@pytest.fixture
def opened(memory: int) -> Iterator[Callable[[], KeptFile]]:
    """Opens the memory, as one process after another does."""
    with ExitStack() as files:
        yield lambda: files.enter_context(closing(KeptFile(os.dup(memory))))


def test_a_file_of_blocks_grows_and_a_replacement_finds_them(
    memory: int, opened: Callable[[], KeptFile]
) -> None:
    first = opened()
    state, is_old = first.block("state", BLOCK_BYTES)
    assert not is_old and not state.any()
    state[:] = 7
    second, _ = first.block("second", 3 * BLOCK_BYTES)
    second[:] = 8
    with pytest.raises(LocalProtocolError, match="in use already"):
        first.block("state", BLOCK_BYTES)
    view = block_of(memory, "second")
    assert view is not None and bytes(view) == bytes([8]) * 3 * BLOCK_BYTES, "a tool reads it"

    after = opened()
    assert (after.left("state"), after.left("second"), after.left("third")) == (
        BLOCK_BYTES,
        3 * BLOCK_BYTES,
        0,
    )
    assert after.peek("state", 2) == b"\7\7"
    found, is_old = after.block("state", BLOCK_BYTES)
    assert is_old and (found == 7).all()


def test_a_block_that_is_given_back_takes_no_memory(memory: int, opened: Callable[[], KeptFile]) -> None:
    def allocated() -> int:
        return os.fstat(memory).st_blocks * 512

    kept = opened()
    empty = allocated()
    kept.block("state", BLOCK_BYTES)
    assert allocated() > empty
    kept.release("state")
    assert allocated() == empty and not kept.has("state")
    kept.block("other", BLOCK_BYTES)
    left = opened()  # which does not ask for it
    left.release("other")
    left.release("other")
    assert allocated() == empty


def test_what_a_killed_process_had_not_listed_yet_is_given_back(
    memory: int, opened: Callable[[], KeptFile]
) -> None:
    kept = opened()
    kept.block("state", BLOCK_BYTES)
    listed = os.fstat(memory).st_blocks
    os.ftruncate(memory, os.fstat(memory).st_size + (1 << 20))
    os.pwrite(memory, b"x" * (1 << 20), os.fstat(memory).st_size - (1 << 20))
    found = opened()
    assert os.fstat(memory).st_blocks == listed
    assert found.block("state", BLOCK_BYTES)[1]
    with pytest.raises(PermissionError):
        os.ftruncate(memory, 0)  # a tool that reads it would die of that


@pytest.mark.parametrize("damage", [8, 9, 4095])
def test_a_damaged_table_of_a_file_has_no_more_blocks(
    memory: int, opened: Callable[[], KeptFile], damage: int
) -> None:
    kept = opened()
    kept.block("state", BLOCK_BYTES)
    kept.block("second", BLOCK_BYTES)
    table = bytearray(os.pread(memory, TABLE_BYTES, 0))
    table[48:64] = (damage).to_bytes(8, "little") + (BLOCK_BYTES).to_bytes(8, "little")
    os.pwrite(memory, table, 0)
    found = opened()
    assert not found.left("state") and not found.left("second")
    assert not found.block("state", BLOCK_BYTES)[1]


def test_a_process_that_forks_keeps_its_file_from_others_no_longer_than_it_lives(memory: int) -> None:
    program = PROGRAMS / "transport/forks_with_file.py"
    with subprocess.Popen(
        [sys.executable, str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, KEPT_FDS_VARIABLE: str(memory)},
        pass_fds=(memory,),
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline()
        assert process.wait() != 0
        with exclusively(memory, wait_ms=0) as taken:
            assert taken is not None, "its child, which lives, has no lock"
        process.stdin.close()
        assert not process.stdout.read()
