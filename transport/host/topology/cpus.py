"""Cores, caches, NUMA nodes and pages of memory, and how many cores this process may use."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zbmd.transport.host.topology.kernel_files import (
    entries,
    parse_cpu_list,
    parse_int,
    read_chosen,
    read_cpu_list,
    read_fields,
    read_int,
    read_text,
)

SMAPS = Path("/proc/self/smaps")


def counted(address: int, nbytes: int, *fields: str) -> int:
    """The sum of `fields` (without their colons), in bytes, over mappings inside of the range.

    0 where the kernel does not tell. See proc_pid_smaps(5).
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


# The control groups of this process, v2 or v1, as folders that hold limits.


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One control group: its folder, and whether its files are those of v2."""

    path: Path
    v2: bool


def groups(controller: str, root: Path = Path("/")) -> Iterator[Group]:
    """Every group whose `controller`, such as `memory`, may limit this process: its own and all above.

    `root` is where `proc` and `sys` are mounted. In a container only the mount may exist, whatever path the
    kernel names, so a folder that is yielded need not.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [f"sys/fs/cgroup/{controller}", f"sys/fs/cgroup/{controllers}"]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in dict.fromkeys(mounts):
            for depth in range(len(parts), -1, -1):
                yield Group(path=(root / mount).joinpath(*parts[:depth]), v2=controllers == "")


_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Caches of one level and kind. `count` of them, of `nbytes` each, each shared by `cpus_each` cpus."""

    level: int
    kind: str
    nbytes: int
    count: int
    cpus_each: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    """The processors. A cpu is what the kernel schedules on: with SMT, a core has several.

    allowed: the online cpus that this process may run on; quota: cpus that its cgroups grant it at a time,
    None without a limit; usable: how many processes can compute at once, at least 1.
    """

    model: str
    sockets: int
    cores: int
    online: tuple[int, ...]
    allowed: tuple[int, ...]
    quota: float | None
    caches: tuple[Cache, ...]

    @property
    def usable(self) -> int:
        """See the class."""
        return _usable(self.allowed, self.quota)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node. distances: to each node in the order of nodes, as the firmware says, 10 being local."""

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int
    free_bytes: int
    distances: tuple[int, ...]


def read_cpus(root: Path = Path("/")) -> Cpus:
    """The processors of the machine whose `proc` and `sys` are in `root`."""
    folder = root / "sys/devices/system/cpu"
    online = _online(root)
    places = {(cpu, *_place(folder / f"cpu{cpu}/topology")) for cpu in online}
    return Cpus(
        model=_model(root),
        sockets=len({socket for _, socket, _ in places}),
        cores=len({(socket, core) for _, socket, core in places}),
        online=online,
        allowed=_allowed(root, online),
        quota=cpu_quota(root),
        caches=_caches(folder, online),
    )


def usable_cpus(root: Path = Path("/")) -> int:
    """Return how many of our processes can compute at once, by the CPU affinity and the cgroups."""
    return _usable(_allowed(root, _online(root)), cpu_quota(root))


def read_numa_nodes(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """The NUMA nodes in the order of their numbers; empty if the kernel knows none."""
    return tuple(
        NumaNode(
            number=number,
            cpus=read_cpu_list(path / "cpulist"),
            memory_bytes=_node_memory(path, "MemTotal"),
            free_bytes=_node_memory(path, "MemFree"),
            distances=tuple(int(d) for d in (read_text(path / "distance") or "").split() if d.isdecimal()),
        )
        for path in entries(root / "sys/devices/system/node")
        if (number := parse_int(path.name.removeprefix("node"))) is not None and path.name.startswith("node")
    )


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The cpus that the tightest cgroup grants at a time, such as 2.5; None without a limit."""
    return min(_quotas(root), default=None)


def _quotas(root: Path) -> Iterator[float]:
    for group in groups("cpu", root):
        if group.v2:
            quota_text, _, period_text = (read_text(group.path / "cpu.max") or "").partition(" ")
            quota_us, period_us = parse_int(quota_text), parse_int(period_text)
        else:
            quota_us = read_int(group.path / "cpu.cfs_quota_us")
            period_us = read_int(group.path / "cpu.cfs_period_us")
        if quota_us is not None and period_us is not None and quota_us > 0 and period_us > 0:
            yield quota_us / period_us


def _usable(allowed: tuple[int, ...], quota: float | None) -> int:
    cpus = len(allowed) if quota is None else min(len(allowed), math.ceil(quota))
    return max(1, cpus)


def _online(root: Path) -> tuple[int, ...]:
    online = read_cpu_list(root / "sys/devices/system/cpu/online")
    return online or tuple(range((read_text(root / "proc/cpuinfo") or "").count("\nprocessor") + 1))


def _allowed(root: Path, online: tuple[int, ...]) -> tuple[int, ...]:
    fields = read_fields(root / "proc/self/status", ":")
    allowed = set(parse_cpu_list(fields.get("Cpus_allowed_list", "")))
    return tuple(cpu for cpu in online if cpu in allowed) or online


def _place(topology: Path) -> tuple[int, int]:
    """The socket and core of a cpu; a cpu of which nothing is known is a core of its own."""
    socket, core = read_int(topology / "physical_package_id"), read_int(topology / "core_id")
    own = -1 - (parse_int(topology.parent.name.removeprefix("cpu")) or 0)
    return (0 if socket is None else socket), (own if core is None else core)


def _model(root: Path) -> str:
    fields = read_fields(root / "proc/cpuinfo", ":")
    return fields.get("model name") or fields.get("CPU part") or fields.get("cpu") or "unknown"


def _caches(folder: Path, online: tuple[int, ...]) -> tuple[Cache, ...]:
    found: dict[tuple[int, str, int], set[tuple[int, ...]]] = {}
    for cpu in online:
        for index in entries(folder / f"cpu{cpu}/cache"):
            level, nbytes = read_int(index / "level"), _size(read_text(index / "size") or "")
            if level is None or nbytes is None:
                continue
            kind = (read_text(index / "type") or "unified").lower()
            shared = read_cpu_list(index / "shared_cpu_list") or (cpu,)
            found.setdefault((level, kind, nbytes), set()).add(shared)
    return tuple(
        Cache(level=level, kind=kind, nbytes=nbytes, count=len(shared), cpus_each=max(map(len, shared)))
        for (level, kind, nbytes), shared in sorted(found.items())
    )


def _size(text: str) -> int | None:
    number = parse_int(text.rstrip("KMG"))
    return None if number is None else number * _UNITS.get(text[-1:], 1)


def _node_memory(path: Path, name: str) -> int:
    """From lines such as `Node 0 MemTotal: 16384 kB`."""
    for line in (read_text(path / "meminfo") or "").splitlines():
        words = line.split()
        if len(words) >= 4 and words[2] == f"{name}:":
            return (parse_int(words[3]) or 0) << 10
    return 0
