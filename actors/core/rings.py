"""Rings of asks: actors of which each waits for the next one's answer, and the last for the first one's.

An actor handles one message at a time, so none of them would ever answer. The stack of a waiting handler says
whom it asks, so no ask pays for being found: an ask of an actor that waits itself is looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from zbmd.actors.core.native._asking import Asking

if TYPE_CHECKING:
    from zbmd.actors.core.messaging import Messaging
    from zbmd.actors.core.native._serving import CellCore

AWAITS_MAX: Final = 256
"""Awaitables of a stack that are looked at."""
RING_MAX: Final = 64
"""Actors that are followed."""


def awaited_by(awaitable: Any) -> Iterator[Any]:
    """Yield a waiting awaitable and everything that it awaits in turn."""
    for _ in range(AWAITS_MAX):
        if awaitable is None:
            return
        yield awaitable
        # Of a future that is a task, say behind a shield, the task's coroutine is what goes on.
        inner = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
        awaitable = inner.get_coro() if isinstance(inner, asyncio.Task) else inner


def asks_of(task: asyncio.Task[Any]) -> Asking | None:
    """Return the ask whose answer a task waits for; None if it waits for no answer."""
    asking = [each for each in awaited_by(task.get_coro()) if isinstance(each, Asking) and each.cr_await]
    return asking[-1] if asking else None


def ring_closed_by(system: Messaging, asker: CellCore, asked: CellCore) -> list[str]:
    """Return the addresses of the ring that an ask would close, from the asker to itself; empty if none.

    asker: the actor whose handler asks, and waits for the answer.
    """
    path, cell = [str(asker.ref.address)], asked
    for _ in range(RING_MAX):
        path.append(cell.ref.address)
        if cell is asker:
            return path
        task = cell.task
        if task is None or getattr(task, "_fut_waiter", None) is None:
            return []  # it is idle, or goes on
        asking = asks_of(task)
        if asking is None or asking.ref.process != system.name:
            return []
        following = system.find(asking.ref.actor, asking.ref.incarnation)
        delivery = asking.delivery
        # What its receiver has put off may be answered while it is busy.
        if following is None or delivery is None or not (delivery.waits or following.current is delivery):
            return []
        cell = following
    return []


def described(path: list[str]) -> str:
    """Return what a ring is, and what to do."""
    do = "Send by tell what needs no answer, or put an answer off (`defer`)"
    if len(path) == 2:
        return f"{path[0]} asks itself, and would answer only after it has its own answer. {do}"
    links = ", which asks ".join(path[1:])
    return f"{path[0]} asks {links}: each would wait for the next one's answer for ever. {do}"
