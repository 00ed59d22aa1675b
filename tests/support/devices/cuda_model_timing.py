"""The time of modelled devices: an operation takes a time, and begins after all that it is ordered behind.

The time of an operation's end travels in its vector clock, under a key that is no line of order, and joins of
clocks take the later one. So it is the length of the longest chain of operations, whatever order they ran in.
The host asks in no time, and learns the time of what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from zbmd.transport.cuda.api import CudaFault

TIME_NS: Final = -1
"""Key of a clock."""
BYTES_PER_NS: Final = 8
"""Of copies."""
KERNEL_NS: Final = 1_000

KernelTime: TypeAlias = Callable[[str], int]
"""Returns the ns that a kernel of this name takes."""


def kernel_ns(_: str) -> int:
    """Return what a kernel takes by default."""
    return KERNEL_NS


def takes(clock: dict[int, int], ns: int) -> None:
    """Note that an operation with this clock has taken so long."""
    clock[TIME_NS] = clock.get(TIME_NS, 0) + ns


def takes_copy(clock: dict[int, int], nbytes: int) -> None:
    """Note that a copy or a fill of so many bytes has run."""
    takes(clock, -(-nbytes // BYTES_PER_NS))


class Events:
    """Methods of a `ModelProcess`."""

    host: Any
    _check: Any
    _event: Any

    def event_create(self, *, interprocess: bool = False, timed: bool = False) -> int:
        """See `CudaApi`."""
        with self.host.lock:
            self._check()
            if interprocess and timed:
                raise CudaFault("invalid argument: events of other processes have no times")
            return int(self.host.new_event(interprocess=interprocess, timed=timed))

    def event_elapsed_ns(self, begin: int, end: int) -> int:
        """See `CudaApi`."""
        with self.host.lock:
            self._check()
            both = self._event(begin), self._event(end)
            if not all(one.timed and one.recorded and not one.captured for one in both):
                raise CudaFault("invalid resource handle: an event has no time, or was never recorded")
            if not all(one.recorded in one.ran for one in both):
                raise CudaFault("device not ready: an event is not done")
            first, last = (one.ran[one.recorded].get(TIME_NS, 0) for one in both)
            return int(last - first)

    def event_destroy(self, event: int) -> None:
        """See `CudaApi`."""
