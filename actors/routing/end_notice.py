"""End notices: a callback, or a wait, for the end of one incarnation of a process."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable


class EndNotices(ABC):
    """Reports the ends of processes."""

    __slots__ = ()

    @abstractmethod
    def notify_end(self, process: str, life: int, tell: Callable[[str], None]) -> Callable[[], None]:
        """Call `tell`, once, when that incarnation has ended; return a function that undoes it.

        Raises `TooManyPending`.
        """

    async def until_gone(self, process: str, life: int) -> str:
        """Wait for the end and return the reason. Raises `TooManyPending`."""
        gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def tell(reason: str) -> None:
            if not gone.done():
                gone.set_result(reason)

        undo = self.notify_end(process, life, tell)
        try:
            return await gone
        finally:
            undo()
