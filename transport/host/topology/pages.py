"""Huge pages, and whether shared memory gets transparent ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from zbmd.transport.host.topology.kernel_files import entries, parse_int, read_chosen, read_int

# What the kernel counts of a range of this process's memory: proc_pid_smaps(5).

SMAPS = Path("/proc/self/smaps")


def counted(address: int, nbytes: int, *fields: str) -> int:
    """The sum of `fields` (without their colons), in bytes, over mappings inside of the range.

    0 where the kernel does not tell.
    """
    try:
        lines = SMAPS.read_text().splitlines()
    except OSError:
        return 0
    wanted = tuple(f"{field}:" for field in fields)
    found, inside = 0, False
    for line in lines:
        header = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if header:
            inside = address <= int(header[1], 16) and int(header[2], 16) <= address + nbytes
        elif inside and line.startswith(wanted):
            found += int(line.split()[1]) << 10
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HugePool:
    """Reserved huge pages of one size."""

    page_bytes: int
    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPages:
    """Page sizes. transparent and transparent_shared: the kernel's setting for private and shared memory.

    Shared memory (a memfd, as segments are) gets huge pages by itself with `always` or `within_size`, and
    where it asks for them (MADV_HUGEPAGE) with `advise`; with `never` or `deny` it gets none.
    """

    pools: tuple[HugePool, ...]
    transparent: str | None
    transparent_shared: str | None


def read_pages(root: Path = Path("/")) -> HostPages:
    """The settings of the machine whose `sys` is in `root`."""
    memory = root / "sys/kernel/mm"
    pools: list[HugePool] = []
    for folder in entries(memory / "hugepages"):
        size_kib = parse_int(folder.name.removeprefix("hugepages-").removesuffix("kB"))
        total, free = read_int(folder / "nr_hugepages"), read_int(folder / "free_hugepages")
        if size_kib is not None and total is not None and free is not None:
            pools.append(HugePool(page_bytes=size_kib << 10, total=total, free=free))
    return HostPages(
        pools=tuple(pools),
        transparent=read_chosen(memory / "transparent_hugepage/enabled"),
        transparent_shared=read_chosen(memory / "transparent_hugepage/shmem_enabled"),
    )
