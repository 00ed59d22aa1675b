"""The placement of a segment's memory: huge pages, and the NUMA node of the process that owns it.

Huge pages are taken where the machine offers them: from the hugetlb pool if it has enough for an arena, else
as transparent ones if shared memory may have them. Nothing of this is needed for correctness, so what cannot
be had is told (`Placement.notes`) and gone without.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zbmd.transport.host.topology.cpus import counted
from zbmd.transport.host.topology.kernel_files import read_chosen, read_cpu_list, read_int
from zbmd.transport.memory.memfd import SEALS, fill_memfd, in_words, map_own, open_memfd
from zbmd.transport.native._native import (
    HUGE_BYTES,
    MADV_HUGEPAGE,
    MADV_POPULATE_WRITE,
    Mapping,
    current_node,
)

PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")
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
    """What this machine supports."""

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
    name: str, *, head_bytes: int, arena_bytes: int, offer: HugePageSupport | None = None
) -> PlacedMemory:
    """Allocate `head_bytes`, writable by peers, and an arena behind it; both are rounded up to pages.

    Raises `OutOfMemory` as `create_memfd` does. The memfd is the caller's to close.
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
        fill_memfd(name, fd, total)
    except BaseException:
        os.close(fd)
        raise
    pages = PageKind.TRANSPARENT if huge_bytes else PageKind.BASE
    placement = Placement(pages=pages, huge_bytes=huge_bytes, numa_node=node, notes=tuple(notes))
    return PlacedMemory(fd=fd, mapping=mapping, arena_offset=head_bytes, placement=placement)


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
    """How much of a mapping is in huge pages now, by this process's page tables."""
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
