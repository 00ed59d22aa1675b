"""Waits of an operation over hosts: the thread that waits moves the bytes itself.

Two wake-ups of sleeping threads are most of what a small message costs. So who waits for a message takes the
turns of the data plane (`DataPlane.drive`) for a while, and only then sleeps, and leaves them to its thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from zbmd.transport._native import now_ns
from zbmd.transport.bulk_plane import DataPlane

DRIVE_NS: Final = 500_000
"""How long a thread that waits drives in vain: some wake-ups long."""


class Driver:
    """Drives the data plane for one thread at a time. plane: None if nothing passes it."""

    def __init__(self, plane: DataPlane | None) -> None:
        self._plane = plane

    @contextmanager
    def driving(self) -> Generator[None]:
        """For the time of an operation; see `DataPlane.driving`."""
        if self._plane is None:
            yield
            return
        with self._plane.driving():
            yield

    def until(self, come: Callable[[], bool]) -> None:
        """Drive until `come`, or for `DRIVE_NS` in vain: then the plane's own thread takes over."""
        plane = self._plane
        if plane is None or come():
            return
        end_ns = 0
        while True:
            moved = plane.drive()
            if come():
                return
            if moved:
                end_ns = 0
                continue
            os.sched_yield()
            at_ns = now_ns()
            if not end_ns:
                end_ns = at_ns + DRIVE_NS
            elif at_ns >= end_ns:
                plane.hand_over()
                return

    def leave(self) -> None:
        """Others may still need what this process lends: have the plane's thread see to it at once."""
        if self._plane is not None:
            self._plane.hand_over()
