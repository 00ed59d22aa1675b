"""The processes that are in the cluster by way of this one: the driver of `guest_registry`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import assert_never

from zbmd.actors.errors import TooManyPending
from zbmd.actors.routing import guest_registry as b
from zbmd.actors.routing.contracts import REASON_CHARACTERS_MAX, NoWay, Way
from zbmd.actors.routing.end_notice import Heeding


class Guests(Heeding):
    """An `Asked` of them. To be told of all links to guests, and of their ends."""

    def __init__(self) -> None:
        self._book = b.GuestBook()
        self._ways: dict[str, Way] = {}
        self._tickets = itertools.count(1)
        self._tell: dict[int, Callable[[str], None]] = {}

    def linked(self, process: str, life: int) -> None:
        """A link to it carries messages."""
        self._feed(b.Linked(process=process, life=life))

    def left(self, process: str, life: int) -> None:
        """That link has ended."""
        self._feed(b.Left(process=process, life=life))

    def enrol(self, way: Way) -> bool:
        """A guest says where it listens; whether that life of it is linked with us."""
        self._feed(b.Enrolled(process=way.process, life=way.life))
        if self._book.life_of(way.process) != way.life:
            return False
        self._ways[way.process] = way
        return True

    async def find(self, process: str) -> Way | NoWay:
        """See `Asked`."""
        if not self._book.life_of(process):
            return NoWay(f"{process} has ended, lost its link to its owner, or never listened")
        return self._ways[process]

    def heed(self, process: str, life: int, tell: Callable[[str], None]) -> Callable[[], None]:
        """Call `tell`, once, when that life is gone; returns what undoes it. Raises `TooManyPending`."""
        ticket = next(self._tickets)
        self._tell[ticket] = tell
        self._feed(b.Heeded(ticket=ticket, process=process, life=life))

        def undo() -> None:
            if self._tell.pop(ticket, None) is not None:
                self._feed(b.Unheeded(ticket=ticket))

        return undo

    def _feed(self, event: b.Event) -> None:
        actions = self._book.handle(event)
        self._book.check_invariants()
        for action in actions:
            match action:
                case b.Tell(ticket=ticket, reason=reason):
                    self._tell.pop(ticket)(reason[:REASON_CHARACTERS_MAX])
                case b.Refuse(ticket=ticket, reason=reason):
                    del self._tell[ticket]
                    raise TooManyPending(reason)
                case b.Strike(process=process):
                    del self._ways[process]
                case _:
                    assert_never(action)
