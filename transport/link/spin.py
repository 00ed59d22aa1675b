"""Spin, then park: whether a reader that has run dry looks again for a while before it sleeps.

A wake-up through the kernel costs both sides some microseconds, and 50 and more on a virtual machine whose
processor has gone to sleep; a look at shared memory costs none. Spinning for about as long as a wake-up
costs is never worse than twice the best choice (Karlin, Li, Manasse, Owicki, "Empirical studies of
competitive spinning for a shared-memory multiprocessor", SOSP 1991). A spin that ends just before the frame
costs two wake-ups, ours and the peer's, who has given up by then: a tick of the kernel holds a virtual
machine for 50 us, so spins of 30 us made 1.3 % of short round trips wait for 100 us. It pays only if the peer
answers in that time, and if its processor is not the one that we spin on. So a reader spins only right after
a frame, not where all processors are busy, and where the last frames came soon after it had run dry, whether
it spun for them or slept. Two that both sleep find each other again: who sleeps learns as much as who spins,
also where the other's wake-up is part of what it waits for.
"""

from __future__ import annotations

import contextlib
import os
from enum import Enum
from functools import cache

from zbmd.transport.host.topology.cpus import usable_cpus
from zbmd.transport.link._spin import BUSY_CHECK_NS as BUSY_CHECK_NS
from zbmd.transport.link._spin import CORES_CHECK_NS as CORES_CHECK_NS
from zbmd.transport.link._spin import WAIT_SPINS_MAX as WAIT_SPINS_MAX
from zbmd.transport.link._spin import SpareCore, SpinCore

LOADAVG_BYTES_MAX = 128


class SpinChoice(Enum):
    """The decision when a reader last ran dry, with its reason. The order is that of `_spin.pyx`."""

    SPIN = "spin"
    OFF = "spinning is switched off"
    ONE_PROCESSOR = "this process has one processor, which the peer may need"
    NO_SPARE_PROCESSOR = "more threads want to run than there are processors"
    TOO_LONG = "the last frames took longer to come than a spin may last"


class SpareProcessors(SpareCore):
    """Whether a processor is idle, as the kernel's count of runnable threads says; looked up rarely."""

    def __init__(self, loadavg_path: str = "/proc/loadavg", processors: int | None = None) -> None:
        self._path = loadavg_path
        self._processors = processors or os.cpu_count() or 1

    def _runnable(self) -> int:
        """The numerator of the fourth field, as in `0.20 0.18 0.12 1/80 11206` (proc(5)); 0 if not told."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return int(os.read(fd, LOADAVG_BYTES_MAX).split()[3].partition(b"/")[0])
            finally:
                os.close(fd)
        return 0


@cache
def shared_processors() -> SpareProcessors:
    """The one that all links of this process ask."""
    return SpareProcessors()


@cache
def _processors_of_ours() -> int:
    return usable_cpus()


class SpinPolicy(SpinCore):
    """The choices of one reader. Time is an argument, ns of any monotonic clock.

    spin_ns: how long one spin lasts; 0 switches it off. processors: how many this process may use.
    """

    __slots__ = ()

    def __init__(
        self, spin_ns: int, *, spare: SpareProcessors | None = None, processors: int | None = None
    ) -> None:
        found = processors or _processors_of_ours()
        self._begin(spin_ns, spare or shared_processors(), found, tuple(SpinChoice))
