"""A transfer over RDMA: who waits for it takes completions itself, or has the plane's own thread do so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from zbmd.transport.errors import ZbmdError
from zbmd.transport.memory.transfer import Transfer

if TYPE_CHECKING:
    from zbmd.transport.rdma.native._rdma import End

# How transfers over RDMA came to their memory: whether it was registered before, or copied.


class TransferCounts(NamedTuple):
    """Since a connection, or the plane of a process, was opened. Those without bytes are not counted."""

    in_segment: int = 0
    """Of memory in our arena or inbox, which was registered when the plane was opened, and is not copied."""
    reused: int = 0
    """Of an array elsewhere that was registered for an earlier transfer."""
    registered: int = 0
    """Of memory that was registered for this transfer."""
    inlined: int = 0
    """Small puts, whose bytes are in the work request."""
    copied: int = 0
    """Of these, the ones that had to wait for room, and were copied for it."""

    @property
    def transfers(self) -> int:
        """Puts and gets with bytes."""
        return self.in_segment + self.reused + self.registered + self.inlined

    def plus(self, other: TransferCounts) -> TransferCounts:
        """Of both together."""
        return TransferCounts(*(one + two for one, two in zip(self, other, strict=True)))


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
