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

from zbmd.transport.topology.cpus import usable_cpus

WAIT_WEIGHT_LOG2 = 2
"""Of the mean of the last waits, the last one counts for one in 2**WAIT_WEIGHT_LOG2."""
WAIT_SPINS_MAX = 4
"""A wait counts for at most so many of the longest spins: one pause is soon forgotten."""
CORES_CHECK_NS = 50_000_000
"""For how long it is believed that a processor is spare, or, once it has been so for long, that none is."""
BUSY_CHECK_NS = 500_000
"""For how long it is believed at first that none is: what ran at that moment may have been done at once, and
to park for 50 ms because of it would make thousands of round trips wait for wake-ups. Doubled each time."""
LOADAVG_BYTES_MAX = 128


class SpinChoice(Enum):
    """What was decided when a reader last ran dry, and why."""

    SPIN = "spin"
    OFF = "spinning is switched off"
    ONE_PROCESSOR = "this process has one processor, which the peer may need"
    NO_SPARE_PROCESSOR = "more threads want to run than there are processors"
    TOO_LONG = "the last frames took longer to come than a spin may last"


class SpareProcessors:
    """Whether a processor is idle, as the kernel's count of runnable threads says; looked up rarely."""

    def __init__(self, loadavg_path: str = "/proc/loadavg", processors: int | None = None) -> None:
        self._path = loadavg_path
        self._processors = processors or os.cpu_count() or 1
        self._check_at_ns: int | None = None
        self._busy_for_ns = BUSY_CHECK_NS
        self._spare = True

    def spare(self, now_ns: int) -> bool:
        """Whether at most as many threads run or want to as there are processors, ours included."""
        if self._check_at_ns is None or now_ns >= self._check_at_ns:
            self._spare = self._runnable() <= self._processors
            self._check_at_ns = now_ns + (CORES_CHECK_NS if self._spare else self._busy_for_ns)
            self._busy_for_ns = BUSY_CHECK_NS if self._spare else min(2 * self._busy_for_ns, CORES_CHECK_NS)
        return self._spare

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


class SpinPolicy:
    """The choices of one reader. Time is an argument, ns of any monotonic clock.

    spin_ns: how long one spin lasts; 0 switches it off. processors: how many this process may use.
    """

    __slots__ = ("_dry_ns", "_end_ns", "_processors", "_spare", "_spin_ns", "_wait_ns", "choice", "parks")

    def __init__(
        self, spin_ns: int, *, spare: SpareProcessors | None = None, processors: int | None = None
    ) -> None:
        self._spin_ns = spin_ns
        self._spare = spare or shared_processors()
        self._processors = processors or _processors_of_ours()
        self._wait_ns = 0
        """The mean of the last waits."""
        self._dry_ns: int | None = None
        """Since when it waits."""
        self._end_ns = 0
        self.choice = SpinChoice.OFF
        self.parks = dict.fromkeys(SpinChoice, 0)
        """How often the reader went on to park, by the choice before it: `SPIN` counts spins in vain."""

    def begins(self, now_ns: int) -> bool:
        """The reader has run dry after a frame: spin?"""
        self._dry_ns = now_ns
        self.choice = choice = self._choose(now_ns)
        if choice is not SpinChoice.SPIN:
            self.parks[choice] += 1
            return False
        self._end_ns = now_ns + self._spin_ns
        return True

    def _choose(self, now_ns: int) -> SpinChoice:
        if not self._spin_ns:
            return SpinChoice.OFF
        if self._wait_ns > self._spin_ns:
            return SpinChoice.TOO_LONG
        if self._processors < 2:
            return SpinChoice.ONE_PROCESSOR
        if not self._spare.spare(now_ns):
            return SpinChoice.NO_SPARE_PROCESSOR
        return SpinChoice.SPIN

    def goes_on(self, now_ns: int) -> bool:
        """Nothing has come so far: look again? After a False the spin is over, and was in vain."""
        if now_ns < self._end_ns:
            return True
        self.parks[SpinChoice.SPIN] += 1
        return False

    def came(self, now_ns: int) -> None:
        """A frame has come, while it spun or was parked."""
        if self._dry_ns is not None:
            waited_ns = min(now_ns - self._dry_ns, WAIT_SPINS_MAX * self._spin_ns)
            self._wait_ns += (waited_ns - self._wait_ns) >> WAIT_WEIGHT_LOG2
            self._dry_ns = None
