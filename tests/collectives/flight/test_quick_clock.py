"""The clock of small operations tells the kernel's time, and never goes back."""

from __future__ import annotations

import pytest

from zbmd.collectives.flight._flight import QuickClock
from zbmd.transport.host.topology.kernel_files import clock_counts_ticks
from zbmd.transport.native._native import now_ns

OFF_NS_MAX = 10_000
"""It is a microsecond at most by design; a machine may be moved to another host meanwhile."""
LOOKS = 60_000
"""They take some tens of milliseconds: the rate is measured, and the clock read again, several times."""


@pytest.mark.parametrize("counts", [True, False])
def test_it_is_between_two_readings_of_the_kernels_clock(counts: bool) -> None:
    if counts and not clock_counts_ticks():
        counts = False  # nobody goes by the counter here
    clock, last_ns, off_ns = QuickClock(counts), 0, OFF_NS_MAX if counts else 0
    for _ in range(LOOKS):
        before_ns, told_ns, behind_ns = now_ns(), clock.now_ns(), now_ns()
        assert max(last_ns, before_ns - off_ns) <= told_ns <= behind_ns + off_ns
        last_ns = told_ns
