"""Move a message through a few slots of memory in pieces: each is loaded, then stored. Sans-I/O.

Pieces are loaded in order, as soon as a slot is free, and stored in order, as soon as they are loaded. So
loading and storing go on at once, and what is in a slot is never written over before it has been stored.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from zbmd.transport.errors import LocalProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A piece is in its slot."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A piece has left its slot."""

    number: int


Event: TypeAlias = Begin | Loaded | Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Bring a piece into its slot."""

    number: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Take a piece from its slot."""

    number: int
    slot: int


Action: TypeAlias = Load | Store


class Pieces:
    """One message of `count` pieces. It is over once all of them are stored."""

    def __init__(self, *, count: int, slots: int) -> None:
        """Raises `LocalProtocolError` without pieces or slots."""
        if count < 1 or slots < 1:
            raise LocalProtocolError(f"{count} pieces cannot pass {slots} slots")
        self._count = count
        self._slots = slots
        self._begun = False
        self._loading: deque[int] = deque()
        self._storing: deque[int] = deque()
        self._next = 0
        self._stored = 0

    @property
    def over(self) -> bool:
        """Whether all is stored."""
        return self._stored == self._count

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Return the actions to begin. Raises `LocalProtocolError` on an event out of order."""
        actions: list[Action] = []
        match event:
            case Begin():
                if self._begun:
                    raise LocalProtocolError("a message begins twice")
                self._begun = True
            case Loaded(number=number):
                self._take(self._loading, number, "loaded")
                self._storing.append(number)
                actions.append(Store(number=number, slot=number % self._slots))
            case Stored(number=number):
                self._take(self._storing, number, "stored")
                self._stored += 1
            case _:
                assert_never(event)
        while self._next < self._count and self._next - self._stored < self._slots:
            actions.append(Load(number=self._next, slot=self._next % self._slots))
            self._loading.append(self._next)
            self._next += 1
        self.check_invariants()
        return actions

    def _take(self, pieces: deque[int], number: int, done: str) -> None:
        if not pieces or pieces[0] != number:
            raise LocalProtocolError(f"piece {number} is {done}, and {list(pieces)} are under way")
        pieces.popleft()

    def check_invariants(self) -> None:
        """Raise `AssertionError` if an invariant does not hold."""
        in_slots = [number % self._slots for number in (*self._storing, *self._loading)]
        assert len(set(in_slots)) == len(in_slots), "two pieces are in one slot"
        assert self._stored + len(in_slots) == self._next <= self._count
