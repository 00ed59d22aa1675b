"""What a running handler knows of its message: inherited deadline, trace id, and whose handler it is."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbmd.actors.cell import ActorCell
    from zbmd.actors.mailbox import Delivery

current_delivery: ContextVar[Delivery | None] = ContextVar("zbmd_delivery", default=None)
current_cell: ContextVar[ActorCell | None] = ContextVar("zbmd_cell", default=None)


def trace_id() -> int:
    """The trace id of the message being handled, 0 outside of handlers."""
    delivery = current_delivery.get()
    return 0 if delivery is None else delivery.trace_id


def deadline_ns() -> int:
    """The deadline (monotonic, ns) under which the current handler runs, 0 for none."""
    delivery = current_delivery.get()
    return 0 if delivery is None else delivery.deadline_ns
