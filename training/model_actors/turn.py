"""Whose turn it is at an actor that compute threads call directly: one message at a time, from any side."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque

from zbmd.transport.errors import DeadlineExceeded

TURN_S = 60.0
"""How long a thread waits for its turn: one message of the actor takes less."""


class Turn:
    """A lock between threads and one loop, which never blocks the loop and is fair to it.

    Threads use `take` and `give`; what runs on the loop uses `async with`. If somebody on the loop waits,
    `give` hands the turn over instead of giving it back.
    """

    __slots__ = ("_loop", "_waiters", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by whose turn it is. Who takes it, gives it back by `give`."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: deque[asyncio.Future[None]] = deque()  # tasks of a model's actors: one each

    def take(self, timeout_s: float = TURN_S) -> None:
        """Wait for the turn. Raises `DeadlineExceeded`."""
        if not self.lock.acquire(timeout=timeout_s):
            raise DeadlineExceeded(f"another message has been handled for {timeout_s:g} s: is it stuck?")

    def give(self) -> None:
        """The message is done."""
        if self._waiters and self._loop is not None:
            self._loop.call_soon_threadsafe(self._hand_over)
        else:
            self.lock.release()

    async def __aenter__(self) -> None:
        if self.lock.acquire(blocking=False):
            return
        self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        if self.lock.acquire(blocking=False):  # it was given back before it could be seen that we wait
            self._waiters.remove(waiter)
            return
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give()  # it was ours already
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)

    async def __aexit__(self, *_: object) -> None:
        self.give()

    def _hand_over(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.lock.release()
