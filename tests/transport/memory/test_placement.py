"""The source of a segment's pages: what is offered, what was got, and going without."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from zbmd.transport.errors import OutOfMemory
from zbmd.transport.host.topology.cpus import counted
from zbmd.transport.memory import memfd
from zbmd.transport.memory.memfd import (
    ARENA_BYTES_MIN,
    FILL_BYTES,
    FILLED_LATER_BYTES_MIN,
    PAGE_BYTES,
    Filler,
    HugePageSupport,
    PageKind,
    PlacedMemory,
    huge_bytes_of,
    place,
    probe,
)
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native import _native
from zbmd.transport.native._native import HUGE_BYTES, Mapping

POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
SHMEM = "sys/kernel/mm/transparent_hugepage/shmem_enabled"


def offer(*, hugetlb: int = 0, mode: str = "never", nodes: int = 1) -> HugePageSupport:
    return HugePageSupport(hugetlb_free_bytes=hugetlb, shmem_mode=mode, numa_nodes=nodes)


def used(placed: PlacedMemory, check: Callable[[np.ndarray], None] = lambda memory: None) -> None:
    """Every byte is there, and none is left behind."""
    try:
        memory = np.frombuffer(placed.mapping.view(0, placed.mapping.nbytes, writable=True), np.uint8)
        memory[:] = 7
        assert os.fstat(placed.fd).st_size == placed.mapping.nbytes
        check(memory)
    finally:
        os.close(placed.fd)


def test_what_a_machine_offers_is_read(tmp_path: Path) -> None:
    assert probe(tmp_path) == offer(mode="absent", nodes=0)
    texts = {
        f"{POOL}/free_hugepages": "5\n",
        f"{POOL}/resv_hugepages": "2\n",
        SHMEM: "always within_size [advise] never deny force\n",
        "sys/devices/system/node/online": "0-2,5\n",
    }
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert probe(tmp_path) == offer(hugetlb=3 * HUGE_BYTES, mode="advise", nodes=4)


def test_what_this_machine_has_is_used() -> None:
    placed = place("test", head_bytes=_native.OFF_END + 1, arena_bytes=ARENA_BYTES_MIN)
    assert placed.arena_offset % PAGE_BYTES == 0 and placed.arena_offset > _native.OFF_END
    assert placed.mapping.nbytes - placed.arena_offset >= ARENA_BYTES_MIN
    placement = placed.placement
    assert (placement.huge_bytes > 0) == (placement.pages is not PageKind.BASE)
    assert placement.notes or placement.pages is not PageKind.BASE
    used(placed)


def test_an_offer_that_does_not_hold_is_told_and_gone_without() -> None:
    free = probe().hugetlb_free_bytes
    promised = offer(hugetlb=1 << 50, mode="advise", nodes=2)
    placed = place("test", head_bytes=PAGE_BYTES, arena_bytes=free + ARENA_BYTES_MIN, offer=promised)
    assert placed.placement.pages is not PageKind.HUGETLB
    assert any(note.startswith("hugetlb: refused") for note in placed.placement.notes)
    assert placed.placement.numa_node == _native.current_node()
    assert placed.placement.huge_bytes == huge_bytes_of(placed.mapping)
    used(placed)


def test_a_small_arena_takes_no_huge_pages() -> None:
    placed = place("test", head_bytes=100, arena_bytes=100, offer=offer(hugetlb=1 << 40, mode="always"))
    assert placed.placement == place_of_base_pages() and placed.arena_offset == PAGE_BYTES
    used(placed)


def place_of_base_pages() -> object:
    placed = place("test", head_bytes=100, arena_bytes=0, offer=offer())
    os.close(placed.fd)
    return placed.placement


def test_a_node_that_is_not_there_is_refused() -> None:
    placed = place("test", head_bytes=100, arena_bytes=0, offer=offer())
    with pytest.raises(OSError, match="Invalid argument"):
        placed.mapping.prefer_node(1 << 20)
    used(placed)


@pytest.mark.parametrize(
    "nbytes", [1, HUGE_BYTES - 1, HUGE_BYTES, HUGE_BYTES + 1, 2 * HUGE_BYTES + PAGE_BYTES]
)
def test_large_mappings_begin_where_a_huge_page_may_and_leave_nothing(nbytes: int) -> None:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, nbytes)
        before = reserved_bytes()
        mappings = [Mapping(fd, nbytes, nbytes) for _ in range(20)]
        assert nbytes < HUGE_BYTES or not any(mapping.address % HUGE_BYTES for mapping in mappings)
        mappings[7].view(nbytes - 1, 1, writable=True)[0] = 1
        assert mappings[8].view(nbytes - 1, 1)[0] == 1
        assert reserved_bytes() - before < 20 * (nbytes + HUGE_BYTES // 2)
        del mappings
        assert reserved_bytes() - before < HUGE_BYTES
    finally:
        os.close(fd)


def reserved_bytes() -> int:
    """The address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES


def test_pages_of_a_large_arena_come_while_it_is_used() -> None:
    begun = threading.active_count()
    segment = Segment.create(
        slot=0, incarnation=1, arena_bytes=FILLED_LATER_BYTES_MIN, inbox_bytes=PAGE_BYTES
    )
    first = segment.arena.zeros(1000)
    rest = segment.arena.zeros(FILLED_LATER_BYTES_MIN - (1 << 20), np.uint8)
    assert not first.any()
    rest[-1] = 1
    assert os.fstat(segment.fds[0]).st_blocks * 512 >= rest.nbytes
    del first, rest
    segment.close()
    assert threading.active_count() == begun


def test_pages_that_are_gone_when_they_are_needed_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []

    def none_left(_fd: int, begin: int, nbytes: int) -> None:
        if begin > 2 * FILL_BYTES:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        allocated.append(nbytes)

    monkeypatch.setattr(memfd.os, "posix_fallocate", none_left)
    segment = Segment.create(
        slot=0, incarnation=1, arena_bytes=FILLED_LATER_BYTES_MIN, inbox_bytes=PAGE_BYTES
    )
    used = segment.arena.used_bytes
    with pytest.raises(OutOfMemory, match="of shared memory asked for 'zbmd-segment-0'"):
        segment.arena.empty(FILLED_LATER_BYTES_MIN - (1 << 20), np.uint8)
    assert segment.arena.used_bytes == used
    segment.arena.empty(1000, np.uint8)  # what is there can be had
    segment.close()


def test_a_segment_that_closes_allocates_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def slow(_fd: int, _begin: int, _nbytes: int) -> None:
        begun.set()
        may_go_on.wait()

    monkeypatch.setattr(memfd.os, "posix_fallocate", slow)
    fd = os.memfd_create("test")
    filler = Filler("test", fd, 0, FILLED_LATER_BYTES_MIN)
    begun.wait()
    stopping = threading.Thread(target=filler.stop)
    stopping.start()
    may_go_on.set()
    stopping.join()
    os.close(fd)
    with pytest.raises(OutOfMemory, match="'test' is closed"):
        filler.wait_for(0, FILLED_LATER_BYTES_MIN)


def test_whatever_the_filling_thread_meets_is_raised_where_pages_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_fd: int, _begin: int, _nbytes: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(memfd.os, "posix_fallocate", broken)
    fd = os.memfd_create("test")
    filler = Filler("test", fd, 0, FILL_BYTES)
    with pytest.raises(OSError, match="Input/output error"):
        filler.wait_for(0, 1)
    filler.stop()
    os.close(fd)


def test_pages_that_somebody_waits_for_are_made_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    begun, may_go_on = threading.Event(), threading.Event()

    def slow(_fd: int, begin: int, _nbytes: int) -> None:
        made.append(begin // FILL_BYTES)
        begun.set()
        may_go_on.wait()

    monkeypatch.setattr(memfd.os, "posix_fallocate", slow)
    fd = os.memfd_create("test")
    filler = Filler("test", fd, 0, 6 * FILL_BYTES)
    begun.wait()
    assert filler.want(4 * FILL_BYTES, 5 * FILL_BYTES + 1) == {4 * FILL_BYTES, 5 * FILL_BYTES}
    may_go_on.set()
    filler.wait_for(4 * FILL_BYTES, 6 * FILL_BYTES)
    filler.wait_for(0, 6 * FILL_BYTES)
    filler.stop()
    os.close(fd)
    assert made == [0, 4, 5, 1, 2, 3]


def test_a_forked_process_makes_the_pages_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, fallocate = os.getpid(), os.posix_fallocate
    begun, may_go_on = threading.Event(), threading.Event()

    def slow(fd: int, begin: int, nbytes: int) -> None:
        if os.getpid() == parent:
            begun.set()
            may_go_on.wait()
        fallocate(fd, begin, nbytes)

    monkeypatch.setattr(memfd.os, "posix_fallocate", slow)
    fd = os.memfd_create("test")
    filler = Filler("test", fd, 0, 3 * FILL_BYTES)
    begun.wait()
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(120)  # its thread has stayed behind: it could wait for ever
            filler.wait_for(FILL_BYTES, 2 * FILL_BYTES)
            filler.stop()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.stat(fd).st_size >= 2 * FILL_BYTES
    may_go_on.set()
    filler.wait_for(0, 3 * FILL_BYTES)
    filler.stop()
    os.close(fd)


def test_the_pages_of_a_lazy_array_are_waited_for_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, fallocate = threading.Event(), os.posix_fallocate

    def slow(fd: int, begin: int, nbytes: int) -> None:
        if begin:  # not the head of the segment
            may_go_on.wait()
        fallocate(fd, begin, nbytes)

    monkeypatch.setattr(memfd.os, "posix_fallocate", slow)
    segment = Segment.create(
        slot=0, incarnation=1, arena_bytes=FILLED_LATER_BYTES_MIN, inbox_bytes=PAGE_BYTES
    )
    state = segment.arena.lazy_zeros(2 * FILL_BYTES, np.uint8)
    segment.arena.want(state)
    head_blocks = os.fstat(segment.fds[0]).st_blocks
    may_go_on.set()
    segment.arena.ready(state[FILL_BYTES:])
    assert (os.fstat(segment.fds[0]).st_blocks - head_blocks) * 512 >= FILL_BYTES
    assert not state.any()
    segment.arena.ready(np.zeros(3))  # of no arena
    state[:] = 1
    del state
    again = segment.arena.lazy_zeros(2 * FILL_BYTES, np.uint8)
    assert not again.any(), "memory that was used is cleared"
    segment.close()


def test_pages_that_are_wanted_are_also_mapped() -> None:
    segment = Segment.create(
        slot=0, incarnation=1, arena_bytes=FILLED_LATER_BYTES_MIN, inbox_bytes=PAGE_BYTES
    )
    state = segment.arena.lazy_zeros(3 * FILL_BYTES, np.uint8)
    segment.arena.ready(state[FILL_BYTES : 2 * FILL_BYTES])

    def mapped_bytes() -> int:
        return counted(segment.base, segment.nbytes, "Rss")

    assert FILL_BYTES <= mapped_bytes() < 3 * FILL_BYTES
    segment.arena.want()
    segment.arena.ready(state)
    assert mapped_bytes() >= FILL_BYTES
    segment.close()
