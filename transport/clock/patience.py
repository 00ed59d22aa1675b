"""Time-outs of this process that are put off: a rank of its job is in a debugger, and the others wait for it.

The native waits for notifications read the same time in the process's segment (`Segment.extend_waits`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from zbmd.transport.native._native import now_ns

EXTENDED_NS: Final = 30_000_000_000
"""No wait times out for so long after an extension, which comes each second while a rank is in a debugger."""


@dataclass(slots=True)
class Patience:
    """`until_ns`: no wait of this process times out before this monotonic time."""

    until_ns: int = 0

    def extend(self) -> int:
        """Put time-outs off from now on; return until when."""
        self.until_ns = now_ns() + EXTENDED_NS
        return self.until_ns

    def left_ns(self, end_ns: int) -> int:
        """Return the time to the end of a wait that is to end at `end_ns`; 0 or less once that is over."""
        return max(end_ns, self.until_ns) - now_ns()


PATIENCE: Final = Patience()
"""That of this process."""


@asynccontextmanager
async def patient_timeout(limit_s: float) -> AsyncGenerator[None]:
    """As `asyncio.timeout`, but for the time that `PATIENCE` gives on top."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    async with asyncio.timeout(None) as timeout:

        def look() -> None:
            nonlocal timer
            left_ns = PATIENCE.left_ns(0)
            if left_ns > 0:
                timer = loop.call_later(left_ns / 1e9, look)
            else:
                timeout.reschedule(loop.time())

        timer = loop.call_later(limit_s, look)
        try:
            yield
        finally:
            timer.cancel()
