"""A copy under way between a buffer of ours and a peer's registered memory."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator
from contextvars import Context, copy_context
from typing import Final

from zbmd.transport.errors import DeadlineExceeded, ZbmdError


class Transfer:
    """Done once the local buffer may be reused; until then it holds the buffers, whoever has given up on it.

    Wait for it with `wait` in a thread or `await` on a loop, any number of times, or not at all: arrival at
    the peer learns of it by its notify cell alone. A link that carries bytes by itself makes one with the
    buffers that it touches and calls `finish`, from any thread.
    """

    __slots__ = ("_blocked", "_buffers", "_done", "_error", "_lock", "_then", "_waiters")

    def __init__(self, *buffers: object) -> None:
        self._buffers = buffers
        self._error: ZbmdError | None = None
        self._done = False
        self._lock = threading.Lock()
        self._blocked: threading.Event | None = None
        self._waiters: dict[asyncio.Future[None], Context] = {}
        self._then: Callable[[], None] | None = None

    @classmethod
    def finished(cls) -> Transfer:
        """One that is done."""
        transfer = cls()
        transfer.finish()
        return transfer

    @property
    def done(self) -> bool:
        """Whether the buffer may be reused: also true after a failure."""
        return self._done

    def finish(self, error: ZbmdError | None = None) -> None:
        """Mark it done: nothing touches the buffers any more. Idempotent; the first call sets the outcome."""
        with self._lock:
            if self._done:
                return
            self._error = error
            self._buffers = ()
            self._done = True
            if self._blocked is not None:
                self._blocked.set()
            waiters, self._waiters = self._waiters, {}
            then, self._then = self._then, None
        if then is not None:
            then()
        for waiter, context in waiters.items():
            # A loop that was closed meanwhile has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                waiter.get_loop().call_soon_threadsafe(_wake, waiter, context=context)

    @property
    def error(self) -> ZbmdError | None:
        """Return the error that ended it, once it is done; None if it succeeded."""
        return self._error

    def then(self, callback: Callable[[], None]) -> None:
        """Have one callback called once done: at once if it is, else by the thread that finishes it.

        It must be quick, and it is that thread's: raises nothing.
        """
        with self._lock:
            if not self._done:
                self._then = callback
                return
        callback()

    def wait(self, deadline_ns: int = 0) -> None:
        """Block this thread, without the GIL, until done or CLOCK_MONOTONIC passes `deadline_ns` (0: none).

        Raises `DeadlineExceeded`, and what ended the transfer: `PeerLost`, `RemoteProtocolError`.
        """
        if not self._done:
            limit_s = max(0, deadline_ns - time.monotonic_ns()) / 1e9 if deadline_ns else None
            if not self._end_of_it().wait(limit_s):
                raise DeadlineExceeded(
                    "a transfer was not done by its deadline; it holds its buffers until it is"
                )
        if self._error is not None:
            raise self._error.with_traceback(None)

    def __await__(self) -> Generator[asyncio.Future[None], None, None]:
        """Wait on the running loop; raises as `wait`. Cancelling the wait leaves the transfer as it is."""
        waiter = self._new_waiter()
        if waiter is not None:
            try:
                yield from waiter
            finally:
                with self._lock:
                    self._waiters.pop(waiter, None)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _new_waiter(self) -> asyncio.Future[None] | None:
        with self._lock:
            if self._done:
                return None
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = copy_context()
            return waiter

    def _end_of_it(self) -> threading.Event:
        with self._lock:
            if self._blocked is None:
                self._blocked = threading.Event()
                if self._done:
                    self._blocked.set()
            return self._blocked


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


DONE: Final = Transfer.finished()
"""For copies that end before the call that asked for them."""
