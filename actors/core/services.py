"""The services of an actor system: what plugs into the core without being known to it.

A service is registered once and found by its class: `system.add_service(x)`, `system.service(X)`. The core
calls its hooks. Two of the hooks are slots of their own, since messages and spawns depend on them: the routes
to processes beyond the view (`CoreSystem.routes`), and the classes that stand for others
(`CoreSystem.class_book`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor_base import ActorBase
from zbmd.actors.core.cell import ActorCell
from zbmd.actors.core.ref import Down, Monitor, Reason, Ref
from zbmd.transport.errors import ZbmdError


class Service:
    """The base of all services. The hooks do nothing unless they are overridden."""

    def link_opening(self, process: str, incarnation: int) -> None:
        """A link to a process of the view was made; nothing was sent or received on it yet."""

    def link_up(self, process: str, incarnation: int) -> None:
        """That link has begun to receive."""

    def link_down(self, process: str, incarnation: int) -> None:
        """A link to a process of the view has ended."""

    def stopping(self) -> None:
        """All actors have ended; links are about to be closed."""

    async def stopped(self) -> None:
        """Links are closed: wait for work that is still under way."""


class RouteService(Protocol):
    """Makes links to processes outside of the system's views when something is sent there."""

    @property
    def leads_to(self) -> Callable[[str], bool]:
        """Return whether links to the process of that name are made here."""
        ...

    async def reach_by(self, process: str, incarnation: int, deadline_ns: int) -> None:
        """Wait for a link to this incarnation of the process (0: any). deadline_ns: monotonic, 0 for none.

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
    """The classes that replace others after a change of code."""

    def current(self, cls: type[ActorBase]) -> type[ActorBase]:
        """Return the class that is spawned for `cls`. Raises `UnknownActorClass`."""
        ...

    def spawned(self, cell: ActorCell) -> None:
        """An actor of a class that replaces another was spawned."""
        ...


class Tracer(Protocol):
    """Records or replays what actors do by way of their system. Other callers go straight through.

    perform: does it; a replay does not call it.
    """

    def tell(self, ref: Ref, message: Contract) -> Coroutine[Any, Any, None]:
        """As `Ref.tell`."""
        ...

    def ask(
        self, ref: Ref, message: Contract, wanted: type[Any] | None, timeout: float | None
    ) -> Coroutine[Any, Any, Any]:
        """As `Ref.ask`."""
        ...

    async def tell_all(
        self,
        refs: Sequence[Ref],
        message: Contract,
        perform: Callable[[], Coroutine[Any, Any, dict[Ref, ZbmdError]]],
    ) -> dict[Ref, ZbmdError]:
        """As `CoreSystem.tell_all`."""
        ...

    async def spawn(
        self,
        process: str,
        cls: type[ActorBase] | str,
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        name: str | None,
        perform: Callable[[], Coroutine[Any, Any, Ref]],
    ) -> Ref:
        """As `CoreSystem.spawn` and `spawn_on`."""
        ...

    async def terminate(
        self, ref: Ref, timeout: float, text: str, perform: Callable[[], Coroutine[Any, Any, Down]]
    ) -> Down:
        """As `CoreSystem.terminate`."""
        ...

    def exit(self, ref: Ref, reason: Reason, perform: Callable[[], None]) -> None:
        """As `CoreSystem.exit`."""
        ...

    def monitor(self, ref: Ref, as_signal: bool, perform: Callable[[], Monitor]) -> Monitor:
        """As `CoreSystem.monitor`."""
        ...

    def new_monitor(self, ref: Ref, loop: asyncio.AbstractEventLoop) -> Monitor:
        """Return a monitor whose own calls are recorded."""
        ...

    def link(self, other: Ref, perform: Callable[[], None]) -> None:
        """As `CoreSystem.link`."""
        ...

    def unlink(self, other: Ref, perform: Callable[[], None]) -> None:
        """As `CoreSystem.unlink`."""
        ...

    def unrecorded(self, what: str) -> None:
        """Something is called whose outcome is not recorded: from here on the actor cannot be replayed."""
        ...

    def creating(self, cls: type[ActorBase], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        """An actor's constructor is about to run; returns what `created` is given."""
        ...

    def created(self, cell: ActorCell, before: Any) -> None:
        """It has run; the actor has not begun."""
        ...

    def stopped(self) -> None:
        """The system has stopped."""
        ...
