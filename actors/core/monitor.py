"""Monitors: being told, once, that an actor has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zbmd.actors.core.actor import Down
from zbmd.actors.core.ref import Ref
from zbmd.transport.errors import DeadlineExceeded


class Monitor:
    """Delivers one `Down` for `ref`, also if its process is lost or there is no such actor."""

    __slots__ = ("_cancel", "_down", "ref")

    def __init__(self, ref: Ref, loop: asyncio.AbstractEventLoop) -> None:
        self.ref = ref
        self._down: asyncio.Future[Down] = loop.create_future()
        self._cancel: Callable[[], None] | None = None

    def armed(self, cancel: Callable[[], None]) -> None:
        """Set what `cancel` undoes (the system calls this)."""
        self._cancel = cancel

    def deliver(self, down: Down) -> None:
        """Take the notice (the system calls this)."""
        if not self._down.done():
            self._down.set_result(down)

    async def down(self, *, timeout: float | None = None) -> Down:
        """Wait for the end. timeout: seconds, None for as long as it takes; raises `DeadlineExceeded`."""
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self._down)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.ref!r} is still there after {timeout} s") from None

    def cancel(self) -> None:
        """Watch no longer; `down()` will not return."""
        if self._cancel is not None and not self._down.done():
            self._cancel()
            self._cancel = None
