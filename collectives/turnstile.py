"""Lets threads through one at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

from zbmd.transport.errors import LocalProtocolError

WAITING_MAX = 1024
"""Threads that may wait for their turn on one communicator."""


class Turnstile:
    """Lets threads through one at a time, in the order in which they came."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._busy = False
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def turn(self) -> Generator[None]:
        """Wait for the turn, and pass it on at the end."""
        gate = None
        with self._guard:
            if self._busy:
                if len(self._waiting) >= WAITING_MAX:
                    raise LocalProtocolError(f"{WAITING_MAX} threads already wait for this communicator")
                gate = threading.Lock()
                gate.acquire()
                self._waiting.append(gate)
            self._busy = True
        if gate is not None:
            gate.acquire()
        try:
            yield
        finally:
            with self._guard:
                if self._waiting:
                    self._waiting.popleft().release()
                else:
                    self._busy = False
