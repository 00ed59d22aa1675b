"""Being told of the end of a life of a process: by a call, or by waiting for it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable


class Heeding(ABC):
    """Who knows when processes go."""

    __slots__ = ()

    @abstractmethod
    def heed(self, process: str, life: int, tell: Callable[[str], None]) -> Callable[[], None]:
        """Call `tell`, once, when that life is gone; returns what undoes it. Raises `TooManyPending`."""

    async def until_gone(self, process: str, life: int) -> str:
        """Wait until it is; why. Raises `TooManyPending`."""
        gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def tell(reason: str) -> None:
            if not gone.done():
                gone.set_result(reason)

        undo = self.heed(process, life, tell)
        try:
            return await gone
        finally:
            undo()
