"""External clients: the processes that joined the cluster by way of this one. Driver of `client_registry`.

End notices report, by a callback or a wait, the end of one incarnation of a process.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import assert_never

from zbmd.actors.errors import TooManyPending
from zbmd.actors.routing import client_registry as b
from zbmd.actors.routing.contracts import REASON_CHARACTERS_MAX, NoRoute, Route


class EndNotices(ABC):
    """Reports the ends of processes."""

    __slots__ = ()

    @abstractmethod
    def notify_end(self, process: str, incarnation: int, tell: Callable[[str], None]) -> Callable[[], None]:
        """Call `tell`, once, when that incarnation has ended; return a function that undoes it.

        Raises `TooManyPending`.
        """

    async def until_gone(self, process: str, incarnation: int) -> str:
        """Wait for the end and return the reason. Raises `TooManyPending`."""
        gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def tell(reason: str) -> None:
            if not gone.done():
                gone.set_result(reason)

        undo = self.notify_end(process, incarnation, tell)
        try:
            return await gone
        finally:
            undo()


class ExternalClients(EndNotices):
    """Locates external clients. The routes report all links to them, and their ends."""

    def __init__(self) -> None:
        self._book = b.ClientRegistry()
        self._routes: dict[str, Route] = {}
        self._tickets = itertools.count(1)
        self._tell: dict[int, Callable[[str], None]] = {}

    def linked(self, process: str, incarnation: int) -> None:
        """Note a link that carries messages."""
        self._feed(b.ClientLinked(process=process, incarnation=incarnation))

    def left(self, process: str, incarnation: int) -> None:
        """Note the end of that link."""
        self._feed(b.Left(process=process, incarnation=incarnation))

    def enrol(self, route: Route) -> bool:
        """Register a client's address; return whether that incarnation of it is linked with this process."""
        self._feed(b.Enrolled(process=route.process, incarnation=route.incarnation))
        if self._book.incarnation_of(route.process) != route.incarnation:
            return False
        self._routes[route.process] = route
        return True

    async def find(self, process: str) -> Route | NoRoute:
        """See `Locator`."""
        if not self._book.incarnation_of(process):
            return NoRoute(f"{process} has ended, has lost the link to its owner, or does not listen")
        return self._routes[process]

    def notify_end(self, process: str, incarnation: int, tell: Callable[[str], None]) -> Callable[[], None]:
        """See `EndNotices`."""
        ticket = next(self._tickets)
        self._tell[ticket] = tell
        self._feed(b.NoticeWanted(ticket=ticket, process=process, incarnation=incarnation))

        def undo() -> None:
            if self._tell.pop(ticket, None) is not None:
                self._feed(b.NoticeDropped(ticket=ticket))

        return undo

    def _feed(self, event: b.Event) -> None:
        actions = self._book.handle(event)
        self._book.check_invariants()
        for action in actions:
            match action:
                case b.SendNotice(ticket=ticket, reason=reason):
                    self._tell.pop(ticket)(reason[:REASON_CHARACTERS_MAX])
                case b.RefuseNotice(ticket=ticket, reason=reason):
                    del self._tell[ticket]
                    raise TooManyPending(reason)
                case b.Forget(process=process):
                    del self._routes[process]
                case _:
                    assert_never(action)
