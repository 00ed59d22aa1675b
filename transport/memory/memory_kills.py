"""Processes that the kernel ends for want of memory, in a cgroup (v2 or v1) or on a machine without cgroups.

A process that is ended so dies by SIGKILL like any other that is killed; only counters of the kernel tell of
it. They are looked at often enough that one that has grown belongs to a death that is seen now.

The kernel counts a kill in the group of the process that it ends, also when the whole machine ran out. So one
counter is read, that of this process's own group: ranks inherit it. `oom_kill` of `/proc/vmstat` counts what
happens in other containers of the host, and explains a death only where the kernel keeps no memory groups.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from zbmd.transport.host.topology.cpus import Group, groups
from zbmd.transport.host.topology.kernel_files import parse_int, read_fields, read_int, read_text
from zbmd.transport.memory.memfd import UNLIMITED_BYTES, in_words

RECENT_NS: Final = 10 * 10**9
"""The longest time from a process's kill to the notice of its death: a large one takes its time."""
PRESSED: Final = 0.9
"""A group whose use came this near to its limit is the one that ran out of memory."""


PREFERENCE: Final = 200
"""Added to the kernel's score of a process of the job, in thousandths of the memory there is. As systemd does
for what a user runs: the launcher, which the whole job needs, is never the one that is taken."""


def offer_memory(root: Path = Path("/")) -> None:
    """Have the kernel rather end this process than its parent when memory runs out.

    A launcher sees the end of a rank before the kernel has counted its memory as free, and its own next page
    would make it the second one that is ended.
    """
    score = root / "proc/self/oom_score_adj"
    with contextlib.suppress(OSError, ValueError):  # read-only in some containers
        score.write_text(str(min(1000, int(score.read_text()) + PREFERENCE)))


class MemoryKills:
    """The kernel's counters. `root` is where `proc` and `sys` are mounted; `look` at them once a second."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._groups = [group for group in groups("memory", root) if (group.path / _events(group)).exists()]
        self._counter = self._own_counter()
        self._count = self._read()
        self._unclaimed: list[int] = []
        """When a process was ended, once for each."""

    def _own_counter(self) -> Path | None:
        """Return the file that counts kills of processes such as ours; None if all also count others."""
        if self._groups:  # without the controller in its own group, a process is counted in the next above
            return self._groups[0].path / _events(self._groups[0])
        return None if _has_groups(self._root) else self._root / "proc/vmstat"

    def look(self, now_ns: int) -> None:
        """Take note of what has been counted since the last look."""
        count = self._read()
        grown, self._count = max(0, count - self._count), count
        recent = [at_ns for at_ns in self._unclaimed if at_ns > now_ns - RECENT_NS]
        self._unclaimed = [*recent, *[now_ns] * min(grown, _UNCLAIMED_MAX)][-_UNCLAIMED_MAX:]

    def claim(self, now_ns: int) -> str:
        """Return what ended a process that has just died by SIGKILL, for people; empty if nothing says so."""
        self.look(now_ns)
        if not self._unclaimed:
            return ""
        del self._unclaimed[0]
        return f"killed by the kernel for want of memory: {self._pressed() or self._machine()}"

    def _pressed(self) -> str:
        """Describe the cgroup that came nearest to its limit; empty if none did."""
        found: list[tuple[float, str]] = []
        for group in self._groups:
            limit_name, peak_names = _LIMITS[group.v2]
            limit = read_int(group.path / limit_name)
            if limit is None or limit >= UNLIMITED_BYTES:
                continue
            peaks = [read_int(group.path / name) for name in peak_names]
            used = next((peak for peak in peaks if peak is not None), limit)
            if used >= PRESSED * limit:
                words = f"the cgroup {group.path} is limited to {in_words(limit)}, and used {in_words(used)}"
                found.append((used / limit, words))
        return max(found, key=lambda one: one[0])[1] if found else ""

    def _machine(self) -> str:
        total = parse_int(
            read_fields(self._root / "proc/meminfo", ":").get("MemTotal", "").removesuffix(" kB")
        )
        size = "" if total is None else f" of {in_words(total << 10)}"
        return f"the machine's memory{size} was used up"

    def _read(self) -> int:
        if self._counter is None:
            return 0
        return parse_int(read_fields(self._counter).get("oom_kill", "")) or 0


_UNCLAIMED_MAX: Final = 1024
_LIMITS: Final = {
    True: ("memory.max", ("memory.peak", "memory.max")),
    False: ("memory.limit_in_bytes", ("memory.max_usage_in_bytes",)),
}
"""By version: the limit, and the most that was used (kernels before 5.19 do not say so for v2)."""


def _events(group: Group) -> str:
    """Return the name of the file that counts kills, of the group alone where the kernel has that (5.2)."""
    if not group.v2:
        return "memory.oom_control"
    return "memory.events.local" if (group.path / "memory.events.local").exists() else "memory.events"


def _has_groups(root: Path) -> bool:
    """Return whether the kernel keeps memory groups, be they visible or not (as in some containers)."""
    if not (root / "proc/self/cgroup").exists():
        return False
    rows = [row.split() for row in (read_text(root / "proc/cgroups") or "").splitlines()]
    return not any(row[:1] == ["memory"] and row[-1] == "0" for row in rows)  # cgroup_disable=memory
