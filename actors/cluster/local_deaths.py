"""Kernel-proven deaths of nodes on this host: a pidfd becomes readable when its process has ended.

Such a death is certain, so it needs no quorum. A node's hail states which process it is; the pid and the
process's start time must match what the kernel reports.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.transport.host.topology.kernel_files import link_name, read_text

WATCHED_MAX: Final = 256
_START_FIELD: Final = 19
"""Of /proc/PID/stat behind the name in brackets: `starttime`, field 22 in proc(5)."""


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the kernel's boot id; empty if it is not readable."""
    return (read_text(Path("/proc/sys/kernel/random/boot_id")) or "")[:64]


def pid_space() -> str:
    """Return the pid namespace of this process; empty if it is not readable."""
    return (link_name(Path("/proc/self/ns/pid")) or "")[:64]


def memory_domain() -> str:
    """Return the name of this host among processes that can share memory with this one, and only these.

    They run under the same kernel and in the same network namespace, where abstract sockets are.
    """
    network = os.stat("/proc/self/ns/net").st_ino
    return f"{boot_id() or os.uname().nodename}/{network}"


def started(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 if it is gone."""
    fields = (read_text(Path(f"/proc/{pid}/stat")) or "").rpartition(")")[2].split()
    return int(fields[_START_FIELD]) if len(fields) > _START_FIELD else 0


class LocalDeaths:
    """Watches the processes of other nodes of this host. on_death: called once a key, on the loop."""

    def __init__(self, on_death: Callable[[NodeKey], None]) -> None:
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._fds: dict[NodeKey, int] = {}

    def watch(self, key: NodeKey, *, boot: str, space: str, pid: int, started_ticks: int) -> bool:
        """Watch an incarnation by its hail. Returns False if it is not on this host or has ended."""
        if key in self._fds:
            return True
        here = boot and space and (boot, space) == (boot_id(), pid_space())
        if not here or pid in (0, os.getpid()) or len(self._fds) >= WATCHED_MAX:
            return False
        try:
            fd = os.pidfd_open(pid)
        except OSError:  # it has ended: that it was this one, nothing proves
            return False
        if not started_ticks or started(pid) != started_ticks:
            os.close(fd)
            return False
        self._fds[key] = fd
        self._loop.add_reader(fd, self._ended, key)
        return True

    def watches(self, key: NodeKey) -> bool:
        """Whether this incarnation's end will be proven by the kernel."""
        return key in self._fds

    def forget_all_but(self, keys: Iterable[NodeKey]) -> None:
        """Stop watching all others."""
        for key in set(self._fds) - set(keys):
            self._forget(key)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self.forget_all_but(())

    def _ended(self, key: NodeKey) -> None:
        self._forget(key)
        self._on_death(key)

    def _forget(self, key: NodeKey) -> None:
        fd = self._fds.pop(key)
        self._loop.remove_reader(fd)
        os.close(fd)
