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
    """The trace id of the message being handled, 0 outside of handlers."""
    delivery = current_delivery.get()
    return 0 if delivery is None else delivery.trace_id


def deadline_ns() -> int:
    """The deadline (monotonic, ns) under which the current handler runs, 0 for none."""
    delivery = current_delivery.get()
    return 0 if delivery is None else delivery.deadline_ns


def sender_process() -> str:
    """The process that the message being handled came from, proven by its link; "" for our own."""
    delivery = current_delivery.get()
    return "" if delivery is None or delivery.peer is None else delivery.peer.name


class ActorClock:
    """An actor's clocks. What it does with `time.time()` cannot be replayed; what it does with these can.

    While the actor is recorded, the clocks stand still between two of its awaits: they tell when what runs
    now was set off. So do not wait for them in a loop without an await, and time a computation with
    `time.perf_counter()`, which is for people to read and not to act upon.
    """

    __slots__ = ("_cell",)

    def __init__(self, cell: CellCore) -> None:
        self._cell = cell

    def monotonic_ns(self) -> int:
        """ns since some moment in the past; never goes back."""
        life = self._cell.life
        return time.monotonic_ns() if life is None else life.now_ns

    def wall_ns(self) -> int:
        """ns since 1970; may be set."""
        life = self._cell.life
        return time.time_ns() if life is None else life.wall_ns()
