"""Waits of an operation over hosts: the thread that waits moves the bytes itself.

Two wake-ups of sleeping threads are most of what a small message costs. So who waits for a message takes the
turns of the data plane (`RemotePlane.drive`) for a while, then sleeps, and leaves them to its thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from zbmd.transport.native._native import now_ns
from zbmd.transport.rdma.remote_memory import RemotePlane

SPIN_NS: Final = 50_000
"""How long a thread that waits looks again and again before it sleeps."""
DRIVE_NS: Final = 500_000
"""How long it drives in vain if what it waits for may come another way: some wake-ups long."""
PARKED_NS: Final = 50_000_000
"""How long it drives in vain if that can come by the plane alone."""


class Driver:
    """Drives the data plane for one thread at a time. plane: None if nothing passes it."""

    def __init__(self, plane: RemotePlane | None) -> None:
        self._plane = plane

    def driving(self) -> AbstractContextManager[None]:
        """For the time of an operation; see `RemotePlane.driving`."""
        return nullcontext() if self._plane is None else self._plane.driving()

    def wake(self) -> None:
        """Have the thread that sleeps in `until` look again; from any thread."""
        if self._plane is not None:
            self._plane.wake()

    def until(self, come: Callable[[], bool], *, far: bool, soon: bool = True) -> None:
        """Drive until `come`, or for a while in vain: then the plane's own thread takes over.

        far: only the plane can bring what `come` looks for, so the thread may sleep where the plane sleeps.
        It sees whatever else ends a wait `PARK_MS` later at most. soon: it is worth to spin for it first.
        """
        plane = self._plane
        if plane is None or come():
            return
        idle_ns, vain_ns = 0, PARKED_NS if far else DRIVE_NS
        spin_ns = SPIN_NS if soon else 0
        while True:
            moved = plane.drive()
            if come():
                return
            if moved:
                idle_ns = 0
                continue
            at_ns = now_ns()
            idle_ns = idle_ns or at_ns
            if at_ns - idle_ns >= vain_ns:
                plane.hand_over()
                return
            if far and at_ns - idle_ns >= spin_ns:
                plane.park()
            else:
                os.sched_yield()

    def leave(self) -> None:
        """Others may still need what this process lends: have the plane's thread see to it at once."""
        if self._plane is not None:
            self._plane.hand_over()
