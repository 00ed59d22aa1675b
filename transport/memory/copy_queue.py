"""Copies that would hold up an event loop: done in order, for one peer, by a thread of their own."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, Protocol

from zbmd.transport.errors import LinkFull, ZbmdError
from zbmd.transport.memory._region import Deferred, Pinned
from zbmd.transport.memory.transfer import Transfer

COPIES_MAX: Final = 1024
"""Copies and notifications that wait for one peer."""


class Performer(Protocol):
    """A region, as this queue sees it."""

    def perform(self, kind: int, buffer: Pinned | None, offset: int, channel: int, value: int) -> None:
        """Do now what was put off."""
        ...


class CopyQueue(Deferred):
    """What all regions of one peer have put off. `deferred` says how much that is; while it is not 0,
    whatever follows must queue up too, or it would overtake.

    The thread lives for as long as there is something to do.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._queue: deque[tuple[Transfer, Performer, int, Pinned | None, int, int, int]] = deque()
        self._thread: threading.Thread | None = None

    def submit(
        self, region: Performer, kind: int, buffer: Pinned | None, offset: int, channel: int, value: int
    ) -> Transfer:
        """Have `region` perform it after all that was submitted before. Raises `LinkFull`."""
        transfer = Transfer(buffer)
        with self._lock:
            if len(self._queue) >= COPIES_MAX:
                raise LinkFull(
                    f"{COPIES_MAX} copies wait for this peer already; await one of their transfers"
                )
            self._queue.append((transfer, region, kind, buffer, offset, channel, value))
            self.defer(1)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="zbmd-copy")
                self._thread.start()
        return transfer

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                transfer, region, kind, buffer, offset, channel, value = self._queue.popleft()
            error: ZbmdError | None = None
            try:
                region.perform(kind, buffer, offset, channel, value)
            except ZbmdError as found:
                error = found
            del buffer
            with self._lock:
                self.defer(-1)
            transfer.finish(error)
