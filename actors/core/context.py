"""The context of a running handler: its actor, and the deadline, trace id and sender of its message."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbmd.actors.core.native._mailbox import Delivery
    from zbmd.actors.core.native._serving import CellCore

current_delivery: ContextVar[Delivery | None] = ContextVar("zbmd_delivery", default=None)
current_cell: ContextVar[CellCore | None] = ContextVar("zbmd_cell", default=None)


def trace_id() -> int:
    """Return the trace id of the message being handled, 0 outside of handlers."""
    delivery = current_delivery.get()
    return 0 if delivery is None else delivery.trace_id


def deadline_ns() -> int:
    """Return the deadline (monotonic, ns) under which the current handler runs, 0 for none."""
    delivery = current_delivery.get()
    return 0 if delivery is None else delivery.deadline_ns


def sender_process() -> str:
    """Return the process that sent the message being handled, proven by its link; "" for our own."""
    delivery = current_delivery.get()
    return "" if delivery is None or delivery.peer is None else delivery.peer.name


class ActorClock:
    """Clocks of an actor. Use them instead of `time.time()`, whose results cannot be replayed.

    While the actor is recorded, the clocks stand still between two of its awaits: they show the time at which
    the running turn began. Do not poll them in a loop without an await. Time a computation with
    `time.perf_counter()`, and let nothing depend on its result.
    """

    __slots__ = ("_cell",)

    def __init__(self, cell: CellCore) -> None:
        self._cell = cell

    def monotonic_ns(self) -> int:
        """Return the monotonic time, ns."""
        traced = self._cell.traced
        return time.monotonic_ns() if traced is None else traced.now_ns

    def wall_ns(self) -> int:
        """Return the wall-clock time, ns since 1970."""
        traced = self._cell.traced
        return time.time_ns() if traced is None else traced.wall_ns()
