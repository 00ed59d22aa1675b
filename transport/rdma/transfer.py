"""A transfer over RDMA: who waits for it takes completions itself, or has the plane's own thread do so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from zbmd.transport.errors import ZbmdError
from zbmd.transport.memory.transfer import Transfer

if TYPE_CHECKING:
    from zbmd.transport.rdma.native._rdma import End


class RdmaTransfer(Transfer):
    """See `Transfer`. As long as nobody asks, nobody is woken for it.

    number: it is done when its connection has so many work requests acknowledged; 0 until it is posted.
    """

    __slots__ = ("_end", "number")

    def __init__(self, end: End, *buffers: object) -> None:
        super().__init__(*buffers)
        self._end: End | None = end
        self.number = 0

    def finish(self, error: ZbmdError | None = None) -> None:
        """See `Transfer.finish`."""
        self._end = None
        super().finish(error)

    def then(self, callback: Callable[[], None]) -> None:
        """See `Transfer.then`."""
        super().then(callback)
        self._ask()

    def wait(self, deadline_ns: int = 0) -> None:
        """See `Transfer.wait`; this thread polls for a while."""
        end = self._end
        if end is not None and self.number:
            end.wait_for(self.number, deadline_ns)
        super().wait(deadline_ns)

    def _new_waiter(self) -> asyncio.Future[None] | None:
        waiter = super()._new_waiter()
        if waiter is not None:
            self._ask()
        return waiter

    def _end_of_it(self) -> threading.Event:
        self._ask()
        return super()._end_of_it()

    def _ask(self) -> None:
        end = self._end
        if end is not None:
            end.ask()
