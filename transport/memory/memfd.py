"""Shared memory that is really there: memfds within the limits of machine and cgroup, and their placement.

A mapping that was only promised dies by SIGBUS at its first touch, so every page is allocated before it is
handed out, those of a large arena while the process goes on (`Filler`). A cgroup over its limit kills the
process instead of failing the call, so the limit is read first.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zbmd.transport.errors import LocalProtocolError, OutOfMemory, RemoteProtocolError
from zbmd.transport.host.process import exhaustion_is_typed
from zbmd.transport.host.topology.cpus import counted, groups
from zbmd.transport.host.topology.kernel_files import (
    parse_int,
    read_chosen,
    read_cpu_list,
    read_fields,
    read_int,
)
from zbmd.transport.native._native import (
    HUGE_BYTES,
    MADV_HUGEPAGE,
    MADV_POPULATE_WRITE,
    Mapping,
    current_node,
)

# ---- the placement of a segment's memory: huge pages, and the NUMA node of the process that owns it
#
# Huge pages are taken where the machine offers them: from the hugetlb pool if it has enough for an arena,
# else as transparent ones if shared memory may have them. Nothing of this is needed for correctness, so what
# cannot be had is noted (`Placement.notes`) and gone without.

PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")
TABLE_BYTES: Final = PAGE_BYTES
"""Before an arena that outlives its process: see `zbmd.transport.memory.kept`."""
FILL_BYTES: Final = 32 << 20
"""Pages of so much are allocated at once by a `Filler`."""
FILLED_LATER_BYTES_MIN: Final = 128 << 20
"""The pages of a smaller arena are there before anyone could need them."""
ARENA_BYTES_MIN: Final = 8 << 20
"""A smaller arena is not worth a huge page."""
TRANSPARENT: Final = "transparent huge pages"
SHMEM_MODES_ON_ADVICE: Final = ("advise", "within_size", "always", "force")


class PageKind(enum.Enum):
    """The kind of pages that a mapping is made of."""

    BASE = "base"
    TRANSPARENT = "transparent huge"
    HUGETLB = "hugetlb"


@dataclass(frozen=True, slots=True, kw_only=True)
class HugePageSupport:
    """The huge pages and NUMA nodes that this machine supports."""

    hugetlb_free_bytes: int
    shmem_mode: str
    """The kernel's `shmem_enabled`; "absent" without transparent huge pages."""
    numa_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The pages and the NUMA node that a segment got."""

    pages: PageKind
    huge_bytes: int
    """Of the segment, in huge pages."""
    numa_node: int | None
    """The node that its pages are preferred on; None where there is one node only, or no say in it."""
    notes: tuple[str, ...]
    """Why it did not get more, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMemory:
    """A segment's memory: all of it is there, and its size sealed."""

    fd: int
    mapping: Mapping
    arena_offset: int
    placement: Placement
    filler: Filler | None = None
    """The thread that still allocates pages of the arena; None: all are there."""
    arena_fd: int | None = None
    """The memfd of the arena, if it is one of its own: a table, and the arena behind it."""
    was_used: bool = False
    """Whether a predecessor has written the arena."""


def probe(root: Path = Path("/")) -> HugePageSupport:
    """Read what the machine offers; `root` is where `sys` is mounted."""
    pool = root / f"sys/kernel/mm/hugepages/hugepages-{HUGE_BYTES >> 10}kB"
    free = (read_int(pool / "free_hugepages") or 0) - (read_int(pool / "resv_hugepages") or 0)
    return HugePageSupport(
        hugetlb_free_bytes=max(0, free) * HUGE_BYTES,
        shmem_mode=read_chosen(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled") or "absent",
        numa_nodes=len(read_cpu_list(root / "sys/devices/system/node/online")),
    )


def place(
    name: str,
    *,
    head_bytes: int,
    arena_bytes: int,
    offer: HugePageSupport | None = None,
    kept_fd: int | None = None,
) -> PlacedMemory:
    """Allocate `head_bytes`, writable by peers, and an arena behind it; both are rounded up to pages.

    kept_fd: an empty memfd in which the arena is to lie, or one in which an arena of this size lay; it is not
    used for another size, or where the pool has huge pages. Raises `OutOfMemory` as `create_memfd` does.
    All memfds are the caller's to close.
    """
    offer = probe() if offer is None else offer
    notes: list[str] = []
    if arena_bytes >= ARENA_BYTES_MIN:
        needed = _up(head_bytes, HUGE_BYTES) + _up(arena_bytes, HUGE_BYTES)
        if offer.hugetlb_free_bytes >= needed:
            placed = _from_pool(name, _up(head_bytes, HUGE_BYTES), needed, offer, notes)
            if placed is not None:
                return placed
        else:
            notes.append(
                f"hugetlb: {in_words(offer.hugetlb_free_bytes)} free, {in_words(needed)} needed "
                f"(sysctl vm.nr_hugepages={needed // HUGE_BYTES} a rank)"
            )
    if kept_fd is not None and arena_bytes:
        placed = _in_kept(name, head_bytes, arena_bytes, kept_fd, offer, notes)
        if placed is not None:
            return placed
    return _from_base_pages(name, _up(head_bytes, PAGE_BYTES), arena_bytes, offer, notes)


def _from_pool(
    name: str, head_bytes: int, total: int, offer: HugePageSupport, notes: list[str]
) -> PlacedMemory | None:
    """None if the pool turns out to have too little: others take from it too."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    try:
        os.ftruncate(fd, total)
        mapping = Mapping(fd, total, total)
        node = _prefer_own_node(mapping, offer, notes)
        os.posix_fallocate(fd, 0, total)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EINVAL, errno.EOPNOTSUPP):
            raise
        notes.append(f"hugetlb: refused ({error.strerror})")
        return None
    placement = Placement(pages=PageKind.HUGETLB, huge_bytes=total, numa_node=node, notes=tuple(notes))
    return PlacedMemory(fd=fd, mapping=mapping, arena_offset=head_bytes, placement=placement)


def _from_base_pages(
    name: str, head_bytes: int, arena_bytes: int, offer: HugePageSupport, notes: list[str]
) -> PlacedMemory:
    total = head_bytes + _up(arena_bytes, PAGE_BYTES)
    fd = open_memfd(name, total)
    try:
        mapping = map_own(name, fd, total)
        node = _prefer_own_node(mapping, offer, notes)
        huge_bytes = _make_transparent(mapping, offer, notes) if arena_bytes >= ARENA_BYTES_MIN else 0
        at_once = total if arena_bytes < FILLED_LATER_BYTES_MIN or huge_bytes else head_bytes
        fill_memfd(name, fd, at_once)
        filler = Filler(name, fd, at_once, total, mapping=mapping) if at_once < total else None
    except BaseException:
        os.close(fd)
        raise
    placement = _without_pool(huge_bytes, node, notes)
    return PlacedMemory(fd=fd, mapping=mapping, arena_offset=head_bytes, placement=placement, filler=filler)


def _without_pool(huge_bytes: int, node: int | None, notes: list[str]) -> Placement:
    pages = PageKind.TRANSPARENT if huge_bytes else PageKind.BASE
    return Placement(pages=pages, huge_bytes=huge_bytes, numa_node=node, notes=tuple(notes))


def _in_kept(
    name: str, head_bytes: int, arena_bytes: int, kept_fd: int, offer: HugePageSupport, notes: list[str]
) -> PlacedMemory | None:
    """Put the arena into `kept_fd`; None if that holds something else."""
    size, found = TABLE_BYTES + _up(arena_bytes, PAGE_BYTES), os.fstat(kept_fd).st_size
    if found not in (0, size):
        notes.append(f"the memory of its predecessor has {in_words(found)}, not {in_words(size)}")
        return None
    may_be_huge = offer.shmem_mode in SHMEM_MODES_ON_ADVICE and arena_bytes >= ARENA_BYTES_MIN
    head = _up(head_bytes, HUGE_BYTES if may_be_huge else PAGE_BYTES)
    _require(name, size - os.fstat(kept_fd).st_blocks * 512)
    if found == 0:
        os.ftruncate(kept_fd, size)
    if not fcntl.fcntl(kept_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        fcntl.fcntl(kept_fd, fcntl.F_ADD_SEALS, SEALS)
    fd = create_memfd(name, head)
    try:
        mapping = map_own(name, fd, head + size, kept_fd, head)
        node = _prefer_own_node(mapping, offer, notes)
        huge_bytes = _make_transparent(mapping, offer, notes) if arena_bytes >= ARENA_BYTES_MIN else 0
        filler = None
        if arena_bytes < FILLED_LATER_BYTES_MIN or huge_bytes:
            _allocate(name, kept_fd, 0, size)
        else:
            is_there = os.fstat(kept_fd).st_blocks * 512 >= size
            filler = Filler(name, kept_fd, head, head + size, mapping=mapping, before=head, is_there=is_there)
    except BaseException:
        os.close(fd)
        raise
    return PlacedMemory(
        fd=fd,
        mapping=mapping,
        arena_offset=head,
        placement=_without_pool(huge_bytes, node, notes),
        filler=filler,
        arena_fd=kept_fd,
        was_used=found == size,
    )


def _make_transparent(mapping: Mapping, offer: HugePageSupport, notes: list[str]) -> int:
    """Bytes of the mapping that the kernel gave huge pages. They must be touched through it: fallocate knows
    nothing of its advice."""
    if offer.shmem_mode not in SHMEM_MODES_ON_ADVICE:
        notes.append(
            f"{TRANSPARENT}: shmem_enabled is {offer.shmem_mode!r} "
            "(echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled)"
        )
        return 0
    try:
        mapping.madvise(MADV_HUGEPAGE)
        mapping.madvise(MADV_POPULATE_WRITE)
    except OSError as error:
        notes.append(f"{TRANSPARENT}: refused ({error.strerror})")
    huge_bytes = huge_bytes_of(mapping)
    if huge_bytes < mapping.nbytes // HUGE_BYTES * HUGE_BYTES:
        notes.append(f"{TRANSPARENT}: {in_words(huge_bytes)} of {in_words(mapping.nbytes)}")
    return huge_bytes


def huge_bytes_of(mapping: Mapping) -> int:
    """Return how many bytes of a mapping are in huge pages now, by this process's page tables."""
    fields = ("ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")
    return counted(mapping.address, mapping.nbytes, *fields)


def _prefer_own_node(mapping: Mapping, offer: HugePageSupport, notes: list[str]) -> int | None:
    if offer.numa_nodes < 2:
        return None
    node = current_node()
    try:
        mapping.prefer_node(node)
    except OSError as error:
        notes.append(f"NUMA: node {node} cannot be preferred ({error.strerror})")
        return None
    return node


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


HEADROOM_BYTES = 32 << 20
"""Left free beside a new memfd, so that the process itself can go on."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

UNLIMITED_BYTES = 1 << 60
"""cgroup v1 spells "no limit" as a number near 2**63."""

_V2_NAMES = ("memory.max", "memory.current", "inactive_file")
_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Available:
    """The bytes that can be allocated now, and the limit that decides."""

    nbytes: int
    limited_by: str


def available_memory(root: Path = Path("/")) -> Available:
    """The tightest of MemAvailable and the limits of every cgroup (v2 or v1) that this process is in.

    `root` is where `proc` and `sys` are mounted.
    """
    found = [Available(nbytes=_mem_available(root), limited_by="the machine (MemAvailable)")]
    found += _cgroup_limits(root)
    return min(found, key=lambda a: a.nbytes)


def _mem_available(root: Path) -> int:
    available = read_fields(root / "proc/meminfo", ":").get("MemAvailable", "")
    kib = parse_int(available.removesuffix(" kB"))
    return UNLIMITED_BYTES if kib is None else kib << 10


def _cgroup_limits(root: Path) -> Iterator[Available]:
    for group in groups("memory", root):
        limit_name, used_name, reclaimable_name = _V2_NAMES if group.v2 else _V1_NAMES
        limit, used = read_int(group.path / limit_name), read_int(group.path / used_name)
        if limit is None or used is None or limit >= UNLIMITED_BYTES:
            continue
        reclaimable = parse_int(read_fields(group.path / "memory.stat").get(reclaimable_name, "")) or 0
        yield Available(nbytes=max(0, limit - used + reclaimable), limited_by=f"the cgroup {group.path}")


def in_words(nbytes: int) -> str:
    """`nbytes` as `12.0 MiB`, `1.5 GiB` or `2.0 TiB`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes / (1 << 20):,.1f} MiB"


def create_memfd(name: str, nbytes: int) -> int:
    """A close-on-exec memfd of `nbytes`, every page allocated, its size sealed; the caller closes it.

    Raises `OutOfMemory` before anything is allocated if that much is not available, `OutOfDescriptors`, and
    `LocalProtocolError` on a size that is not positive.
    """
    fd = open_memfd(name, nbytes)
    try:
        fill_memfd(name, fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_memfd(name: str, nbytes: int) -> int:
    """The first half of `create_memfd`: nothing is allocated yet, but there is room. Raises as it does."""
    if nbytes <= 0:
        raise LocalProtocolError(f"shared memory {name!r} of {nbytes} bytes: the size must be positive")
    _require(name, nbytes)
    with exhaustion_is_typed(f"shared memory {name!r}"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _require(name: str, nbytes: int) -> None:
    """Raise `OutOfMemory` unless so much can be allocated."""
    with exhaustion_is_typed(f"shared memory {name!r}"):
        available = available_memory()
    if nbytes + HEADROOM_BYTES > available.nbytes:
        raise _out_of_memory(name, nbytes, available)


def fill_memfd(name: str, fd: int, nbytes: int) -> None:
    """The second half: allocate the missing pages, and seal the size. Raises `OutOfMemory`."""
    _allocate(name, fd, 0, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)


def grow_memfd(name: str, fd: int, nbytes: int) -> None:
    """Allocate so many bytes more behind those of a memfd, which cannot shrink then. Raises `OutOfMemory`."""
    _require(name, nbytes)
    size = os.fstat(fd).st_size
    os.ftruncate(fd, size + nbytes)
    _allocate(name, fd, size, nbytes)
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)


class Filler:
    """Allocates the pages of a sealed memfd from `begin` to `end` on a thread of its own.

    Half a second a GiB is too long to wait for in a rank that replaces another. So the pages are made in
    order, but first those that are wanted (`want`, `wait_for`). These are also mapped in `mapping`, if it is
    given: the kernel clears a page only then, which takes longer than to allocate it. Before each piece the
    memory that is available is read, since others allocate meanwhile. before: bytes of the mapping that lie
    in another file; is_there: the pages are allocated already, and wanted ones are only mapped.

    In a process that is forked meanwhile the thread is missing: it is started again once pages are wanted.
    """

    def __init__(
        self,
        name: str,
        fd: int,
        begin: int,
        end: int,
        *,
        mapping: Mapping | None = None,
        before: int = 0,
        is_there: bool = False,
    ) -> None:
        self._name, self._end, self._before, self._is_there = name, end, before, is_there
        self._missing = dict.fromkeys(range(begin, end, FILL_BYTES))
        """The offsets of the missing pieces, in order."""
        self._wanted: dict[int, None] = {}
        """Those that a thread waits for."""
        self._error: Exception | None = None
        self._stopped = self._is_over = self._is_left_behind = False
        self._changed = threading.Condition()
        self._fd, self._mapping = os.dup(fd), mapping
        self._start()
        _fillers.add(self)

    def _start(self) -> None:
        # A daemon: nobody waits for pages that a process which ends has not asked for.
        self._thread = threading.Thread(target=self._run, name="zbmd-fill", daemon=True)
        self._thread.start()

    def after_fork(self) -> None:
        """In the child: know that the thread has stayed behind, perhaps with the lock."""
        self._changed, self._is_left_behind = threading.Condition(), not self._is_over

    def wait_for(self, begin: int, end: int) -> None:
        """Return when all pages of [begin, end) are there. Raises as the thread, `OutOfMemory`."""
        if not self._missing:
            return
        wanted = self.want(begin, end)
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or wanted.isdisjoint(self._missing))
            is_there = wanted.isdisjoint(self._missing)
        if not is_there:
            raise self._error or OutOfMemory(
                f"the shared memory {self._name!r} is closed", asked_bytes=end - begin, available_bytes=0
            )

    def want(self, begin: int, end: int) -> set[int]:
        """Make the pages of [begin, end) next; return the offsets of the missing pieces."""
        if not self._missing:
            return set()
        with self._changed:
            wanted = {at for at in self._missing if at < end and begin < at + FILL_BYTES}
            self._wanted = dict.fromkeys(sorted(wanted)) | self._wanted
            if wanted and self._is_left_behind:
                self._is_left_behind = False
                self._start()
        return wanted

    def stop(self) -> None:
        """Allocate no more, and wait for the thread. Idempotent."""
        self._stopped = True
        if self._is_left_behind:
            self._is_left_behind, self._is_over = False, True
            os.close(self._fd)
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped and (begin := self._next()) is not None:
                nbytes = min(FILL_BYTES, self._end - begin)
                if not self._is_there:
                    self._allocate(begin, nbytes)
                if self._mapping is not None and begin in self._wanted:
                    with contextlib.suppress(OSError):  # before Linux 5.14: pages are mapped as they are used
                        self._mapping.madvise(MADV_POPULATE_WRITE, begin, nbytes)
                with self._changed:
                    del self._missing[begin]
                    self._wanted.pop(begin, None)
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 -- raised where the pages are needed
            self._error = error
        finally:
            with self._changed:
                self._is_over, self._mapping = True, None
                self._changed.notify_all()
            os.close(self._fd)

    def _allocate(self, begin: int, nbytes: int) -> None:
        available = available_memory()
        if nbytes + HEADROOM_BYTES > available.nbytes:
            raise _out_of_memory(self._name, nbytes, available)
        _allocate(self._name, self._fd, begin - self._before, nbytes)

    def _next(self) -> int | None:
        with self._changed:
            return next(iter(self._wanted or self._missing), None)


_fillers: Final = weakref.WeakSet[Filler]()


def _after_fork() -> None:
    for filler in _fillers:
        filler.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _allocate(name: str, fd: int, begin: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, begin, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise _out_of_memory(name, nbytes, available_memory()) from error
        raise


def _out_of_memory(name: str, nbytes: int, available: Available) -> OutOfMemory:
    return OutOfMemory(
        f"{in_words(nbytes)} of shared memory asked for {name!r}, but {available.limited_by} has "
        f"{in_words(available.nbytes)} available and {in_words(HEADROOM_BYTES)} are kept free. "
        "Ask for less with --arena (or ZBMD_ARENA), start fewer ranks, or raise the memory limit.",
        asked_bytes=nbytes,
        available_bytes=available.nbytes,
    )


def map_own(what: str, fd: int, nbytes: int, tail_fd: int | None = None, tail: int = 0) -> Mapping:
    """Map all of a memfd of ours for writing, and from `tail` on another. Raises `OutOfMemory` if the kernel
    has no place for it.
    """
    try:
        return Mapping(fd, nbytes, nbytes, -1 if tail_fd is None else tail_fd, tail)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise _no_place(f"{in_words(nbytes)} of shared memory for {what!r}", nbytes) from error


def _no_place(what: str, nbytes: int) -> OutOfMemory:
    """There is memory, but the process may map no more of it. The kernel does not say which bound was met."""
    return OutOfMemory(
        f"{what} cannot be mapped: this process has as many mappings as it may (raise vm.max_map_count by "
        "sysctl, or open fewer links), or its address space is used up (raise ulimit -v, or choose a smaller "
        "--arena).",
        asked_bytes=nbytes,
    )


def sealed_size(fd: int) -> int:
    """The size of a memfd that came from a peer, once it is certain that it can no longer shrink.

    Raises `RemoteProtocolError` if `fd` is not a memfd with its size sealed: a peer could truncate it and
    kill us by SIGBUS.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RemoteProtocolError("shared memory from a peer is not a memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise RemoteProtocolError("shared memory from a peer can still shrink: its size is not sealed")
    return os.fstat(fd).st_size


def map_from_peer(
    fd: int, nbytes: int, writable_bytes: int, tail_fd: int | None = None, tail: int = 0
) -> Mapping:
    """Map memory that came from a peer, the first `writable_bytes` for writing, and from `tail` on another.

    Raises `OutOfMemory` if there is no room for it in our address space, and `RemoteProtocolError` if the
    kernel refuses otherwise: it is sealed against writing, say, or the descriptor is open for reading alone.
    """
    try:
        return Mapping(fd, nbytes, writable_bytes, -1 if tail_fd is None else tail_fd, tail)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise _no_place(f"{in_words(nbytes)} of a peer's shared memory", nbytes) from error
        raise RemoteProtocolError(f"shared memory from a peer cannot be mapped: {error.strerror}") from error
