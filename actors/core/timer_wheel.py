"""One timer for many deadlines: a wheel of buckets, each a set of futures that share an expiry.

After Varghese & Lauck, "Hashed and hierarchical timing wheels" (1987), reduced to what asks need: a
deadline is rounded up to a multiple of a quantum of about 1/32 of its timeout (at least 1 ms), so that the
number of buckets stays small whatever the rate, and an ask that is answered costs one set removal.
"""

from __future__ import annotations

import asyncio
import heapq
import time

from zbmd.actors.core.native._asking import Wheel


class Expired(Exception):
    """Set on a future whose deadline passed; whoever awaits it turns it into words."""


class DeadlineWheel(Wheel):
    """Sets `Expired` on each future that is still in the wheel when its deadline passes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, expiry_ns: int, now_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = expiry_ns
        # A loop's clock is coarser than ours (uvloop's: 1 ms) and may fire early: then it is armed again.
        self._timer = self._loop.call_later(max(1e-3, (expiry_ns - now_ns) / 1e9), self._fire)

    def _fire(self) -> None:
        self._timer = None
        now_ns = time.monotonic_ns()
        while self._expiries_ns and self._expiries_ns[0] <= now_ns:
            for future in self._buckets.pop(heapq.heappop(self._expiries_ns)):
                if not future.done():
                    future.set_exception(Expired())
        if self._expiries_ns:
            self._arm(self._expiries_ns[0], now_ns)
