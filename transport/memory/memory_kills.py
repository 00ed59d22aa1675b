"""Processes that the kernel ends for want of memory, in a cgroup (v2 or v1) or on the whole machine.

A process that is ended so dies by SIGKILL like any other that is killed; only counters of the kernel tell of
it. They are looked at often enough that one that has grown belongs to a death that is seen now.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zbmd.transport.host.topology.cpus import Group, groups
from zbmd.transport.host.topology.kernel_files import parse_int, read_fields, read_int
from zbmd.transport.memory.memfd import UNLIMITED_BYTES, in_words

RECENT_NS: Final = 10 * 10**9
"""How long before its death is noticed a process may have been ended: a large one takes its time."""
PRESSED: Final = 0.9
"""A group whose use came this near to its limit is the one that ran out of memory."""


@dataclass(frozen=True, slots=True)
class _Counter:
    """A file that counts ended processes, of a group or, without one, of the machine."""

    path: Path
    group: Group | None


class MemoryKills:
    """The kernel's counters. `root` is where `proc` and `sys` are mounted; `look` at them once a second."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._groups = [group for group in groups("memory", root) if (group.path / _events(group)).exists()]
        self._counters = [_Counter(group.path / _events(group), group) for group in self._groups]
        self._counters.append(_Counter(root / "proc/vmstat", None))
        self._counts = [self._read(counter) for counter in self._counters]
        self._unclaimed: list[tuple[int, bool]] = []
        """When a process was ended, and whether in a group of ours."""

    def look(self, now_ns: int) -> None:
        """Take note of what has been counted since the last look."""
        grown = [0] * len(self._counters)
        for index, counter in enumerate(self._counters):
            count = self._read(counter)
            grown[index], self._counts[index] = max(0, count - self._counts[index]), count
        ours = max(grown[:-1], default=0)
        self._unclaimed = [kill for kill in self._unclaimed if kill[0] > now_ns - RECENT_NS]
        # The machine's counter has those of the groups too.
        kills = [(now_ns, True)] * ours + [(now_ns, False)] * max(0, grown[-1] - ours)
        self._unclaimed = [*self._unclaimed, *kills][-_UNCLAIMED_MAX:]

    def claim(self, now_ns: int) -> str:
        """Return what ended a process that has just died by SIGKILL, for people; empty if nothing says so."""
        self.look(now_ns)
        if not self._unclaimed:
            return ""
        ours = any(of_ours for _, of_ours in self._unclaimed)
        self._unclaimed.remove(next(kill for kill in self._unclaimed if kill[1] is ours))
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

    def _read(self, counter: _Counter) -> int:
        return parse_int(read_fields(counter.path).get("oom_kill", "")) or 0


_UNCLAIMED_MAX: Final = 1024
_LIMITS: Final = {
    True: ("memory.max", ("memory.peak", "memory.max")),
    False: ("memory.limit_in_bytes", ("memory.max_usage_in_bytes",)),
}
"""By version: the limit, and the most that was used (kernels before 5.19 do not say so for v2)."""


def _events(group: Group) -> str:
    return "memory.events" if group.v2 else "memory.oom_control"
