"""Spin, then park: whether a reader that has run dry looks again for a while before it sleeps.

A wake-up through the kernel costs both sides some microseconds; a look at shared memory costs none. Spinning
for about as long as a wake-up costs is never worse than twice the best choice (Karlin, Li, Manasse, Owicki,
"Empirical studies of competitive spinning for a shared-memory multiprocessor", SOSP 1991). It pays only if
the peer answers in that time, and if its processor is not the one that we spin on. So a reader spins only
right after a frame, not where all processors are busy, and ever more rarely where it did not pay.
"""

from __future__ import annotations

import contextlib
import os
from enum import Enum
from functools import cache

from zbmd.transport.topology.cpus import usable_cpus

MISSES_MAX = 5
"""After so many spins in vain in a row, one of 2**MISSES_MAX chances is taken: a microsecond a frame."""
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
    DID_NOT_PAY = "the last spins ended without a frame"


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

    spin_ns: how long one spin lasts at most; 0 switches it off. processors: how many this process may use.
    """

    __slots__ = ("_end_ns", "_misses", "_processors", "_skip", "_spare", "_spin_ns", "choice", "parks")

    def __init__(
        self, spin_ns: int, *, spare: SpareProcessors | None = None, processors: int | None = None
    ) -> None:
        self._spin_ns = spin_ns
        self._spare = spare or shared_processors()
        self._processors = processors or _processors_of_ours()
        self._misses = 0
        self._skip = 0
        self._end_ns = 0
        self.choice = SpinChoice.OFF
        self.parks = dict.fromkeys(SpinChoice, 0)
        """How often the reader went on to park, by the choice before it: `SPIN` counts spins in vain."""

    def begins(self, now_ns: int) -> bool:
        """The reader has run dry after a frame: spin?"""
        self.choice = choice = self._choose(now_ns)
        if choice is not SpinChoice.SPIN:
            self.parks[choice] += 1
            return False
        self._end_ns = now_ns + self._spin_ns
        return True

    def _choose(self, now_ns: int) -> SpinChoice:
        if not self._spin_ns:
            return SpinChoice.OFF
        if self._skip:
            self._skip -= 1
            return SpinChoice.DID_NOT_PAY
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
        self._misses = min(self._misses + 1, MISSES_MAX)
        self._skip = (1 << self._misses) - 2
        return False

    def paid(self) -> None:
        """A frame came while we spun."""
        self._misses = 0
