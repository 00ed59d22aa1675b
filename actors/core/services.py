"""The services of an actor system: what plugs into the core without being known to it.

A service is registered once and found by its class: `system.add_service(x)`, `system.service(X)`. The core
calls its hooks. Two of the hooks are slots of their own, since messages and spawns depend on them: the routes
to processes beyond the view (`CoreSystem.routes`), and the classes that stand for others
(`CoreSystem.class_book`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from zbmd.actors.core.actor_base import ActorBase
from zbmd.actors.core.cell import ActorCell
from zbmd.actors.core.ref import Ref
from zbmd.actors.core.signals import Down, Reason


class Service:
    """The base of all services. The hooks do nothing unless they are overridden."""

    def link_opening(self, process: str, incarnation: int) -> None:
        """A link to a process of the view stands; nothing was sent or received on it yet."""

    def link_up(self, process: str, incarnation: int) -> None:
        """It has begun to receive."""

    def link_down(self, process: str, incarnation: int) -> None:
        """A link to a process of the view has ended."""

    def stopping(self) -> None:
        """All actors of the system have ended; its links are about to be closed."""

    async def stopped(self) -> None:
        """Its links are closed: wait for whatever is still under way."""


class RouteService(Protocol):
    """Links to processes beyond the views of a system, made when something is sent there."""

    @property
    def leads_to(self) -> Callable[[str], bool]:
        """Whether links to the process of that name are made here."""
        ...

    async def reach_by(self, process: str, incarnation: int, deadline_ns: int) -> None:
        """Wait until a link to this life of the process (0: any) stands. deadline_ns: monotonic, 0 for none.

        Raises `PeerLost`, `DeadActor`, `TooManyPending` or `DeadlineExceeded`.
        """
        ...

    def watch(self, ref: Ref, callback: Callable[[Down], None]) -> Callable[[], None]:
        """As `CoreSystem.watch`."""
        ...

    def link(self, cell: ActorCell, other: Ref) -> None:
        """As `CoreSystem.link`; the cell knows of it already."""
        ...

    def exit(self, ref: Ref, reason: Reason) -> None:
        """As `CoreSystem.exit`."""
        ...


class ClassBook(Protocol):
    """Which classes stand for others, after a change of code."""

    def current(self, cls: type[ActorBase]) -> type[ActorBase]:
        """The class that is spawned for `cls`. Raises `UnknownActorClass`."""
        ...

    def spawned(self, cell: ActorCell) -> None:
        """An actor of a class that stands for another was made."""
        ...
