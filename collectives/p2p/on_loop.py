"""Calls that threads pass to the loop of a membership."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, wait
from typing import Any, Final, TypeVar

from zbmd.collectives.errors import OperationAborted
from zbmd.transport.errors import LocalProtocolError

LOOP_CHECK_S: Final = 1.0
"""Seconds between checks, by a thread that waits for the loop, that it is open: a closed one calls nobody."""

ResultT = TypeVar("ResultT")


class OnLoop:
    """The loop of the thread that makes this, for calls of other threads that must run there."""

    def __init__(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the loop's thread."""
        return threading.get_ident() == self._thread

    def soon(self, call: Callable[[], None]) -> None:
        """Have the loop make a call, unless it is closed. From any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def wait_for(self, begin: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Have the loop run a coroutine; return its result, or raise its error.

        Raises `LocalProtocolError` on the loop's thread, which may not wait, and in a forked child, and
        `OperationAborted` if the loop ends first.
        """
        if os.getpid() != self._pid:
            raise LocalProtocolError(
                f"the loop that this call passes runs in process {self._pid}, from which this one was forked"
            )
        if self.is_here:
            raise LocalProtocolError("this call passes the loop, and this is its thread: await it instead")
        ended = OperationAborted("the loop that this call passes has ended, and took it along")
        begun = begin()
        try:
            running = asyncio.run_coroutine_threadsafe(begun, self._loop)
        except RuntimeError:  # it is closed
            begun.close()
            raise ended from None
        while not wait([running], timeout=LOOP_CHECK_S).done:
            if self._loop.is_closed():
                raise ended
        try:
            return running.result()
        except CancelledError:
            raise ended from None
