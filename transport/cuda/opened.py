"""A peer's allocations that are open here: which, for how many regions, and when they are closed. Sans-I/O.

An allocation is opened once, however many regions lie in it. One that no region uses stays open, for the
next that does (opening takes some 100 us), until room is needed, its owner takes it back, or the peer goes.
It is closed only when no region uses it: CUDA says nothing of memory that is closed under a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias, assert_never

from zbmd.transport.errors import LocalProtocolError, UserError

OPENED_MAX: Final = 256
"""Allocations of one peer that are open at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A region in this allocation begins to be used."""

    memory: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOpened:
    """CUDA has opened it."""

    memory: bytes
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotOpened:
    """CUDA has refused to."""

    memory: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Disuse:
    """A region is closed, and all its copies have drained."""

    memory: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBack:
    """Its owner wants to free it: nothing new may use it, and it is to be closed as soon as can be."""

    memory: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGone:
    """The peer has ended, or is let go of: close all of it as soon as can be."""


Event: TypeAlias = Use | MemoryOpened | NotOpened | Disuse | TakenBack | AllGone


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Have CUDA open it; `MemoryOpened` or `NotOpened` comes next."""

    memory: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Have CUDA close it; its owner may free it then."""

    memory: bytes
    address: int


Action: TypeAlias = Open | Close


class OpenedStage(Enum):
    """Of an allocation."""

    OPENING = "opening"
    OPEN = "open"
    LEAVING = "leaving"
    """To be closed when it is unused."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    stage: OpenedStage = OpenedStage.OPENING
    address: int = 0
    users: int = 1
    taken: bool = False
    """Its owner wanted it back while it was being opened."""


class OpenedMemory:
    """The allocations of one peer."""

    def __init__(self, *, opened_max: int = OPENED_MAX) -> None:
        self._opened_max = opened_max
        self._entries: dict[bytes, _Entry] = {}
        """The least recently used first."""
        self._gone = False

    def address(self, memory: bytes) -> int:
        """Return the address at which it is open. Raises `LocalProtocolError` if it is not."""
        entry = self._entries.get(memory)
        if entry is None or entry.stage is OpenedStage.OPENING:
            raise LocalProtocolError("an allocation is asked for that is not open")
        return entry.address

    def __len__(self) -> int:
        return len(self._entries)

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Return the actions to perform.

        Raises `UserError` if too many are in use, `LocalProtocolError` on misuse.
        """
        actions = self._dispatch(event)
        self.check_invariants()
        return actions

    def _dispatch(self, event: Event) -> list[Action]:
        match event:
            case Use():
                return self._use(event.memory)
            case MemoryOpened():
                entry = self._entry(event.memory, OpenedStage.OPENING)
                leaving = self._gone or entry.taken
                entry.stage, entry.address = (
                    OpenedStage.LEAVING if leaving else OpenedStage.OPEN,
                    event.address,
                )
                return []
            case NotOpened():
                self._entry(event.memory, OpenedStage.OPENING)
                del self._entries[event.memory]
                return []
            case Disuse():
                return self._disuse(event.memory)
            case TakenBack():
                return self._leave([event.memory] if event.memory in self._entries else [])
            case AllGone():
                self._gone = True
                return self._leave(list(self._entries))
            case _:
                assert_never(event)

    def _use(self, memory: bytes) -> list[Action]:
        entry = self._entries.pop(memory, None)
        if entry is not None:
            self._entries[memory] = entry  # the most recently used is the last
            if entry.stage is not OpenedStage.OPEN:
                raise LocalProtocolError(f"an allocation of a peer is used again that is {entry.stage.value}")
            entry.users += 1
            return []
        if self._gone:
            raise LocalProtocolError("an allocation is opened of a peer that has gone")
        actions: list[Action] = []
        if len(self._entries) >= self._opened_max:
            actions += self._make_room()
        self._entries[memory] = _Entry()
        return [*actions, Open(memory=memory)]

    def _make_room(self) -> list[Action]:
        for memory, entry in self._entries.items():
            if not entry.users:
                return self._closed(memory)
        raise UserError(
            f"{self._opened_max} allocations of one peer are in use: close regions, or put more arrays into "
            "one allocation"
        )

    def _disuse(self, memory: bytes) -> list[Action]:
        entry = self._entries.get(memory)
        if entry is None or entry.stage is OpenedStage.OPENING or not entry.users:
            raise LocalProtocolError("a region ends that was not begun")
        entry.users -= 1
        return self._closed(memory) if entry.stage is OpenedStage.LEAVING and not entry.users else []

    def _leave(self, memories: list[bytes]) -> list[Action]:
        actions: list[Action] = []
        for memory in memories:
            entry = self._entries[memory]
            if entry.stage is OpenedStage.OPENING:
                entry.taken = True  # `MemoryOpened` comes next
                continue
            entry.stage = OpenedStage.LEAVING
            if not entry.users:
                actions += self._closed(memory)
        return actions

    def _closed(self, memory: bytes) -> list[Action]:
        return [Close(memory=memory, address=self._entries.pop(memory).address)]

    def _entry(self, memory: bytes, stage: OpenedStage) -> _Entry:
        entry = self._entries.get(memory)
        if entry is None or entry.stage is not stage:
            raise LocalProtocolError(f"an allocation was opened that is not {stage.value}")
        return entry

    def check_invariants(self) -> None:
        """Raise `AssertionError` if an invariant does not hold."""
        assert len(self._entries) <= self._opened_max
        for entry in self._entries.values():
            assert entry.users >= 0
            assert entry.users or entry.stage is OpenedStage.OPEN, "what is to be closed is in use"
            assert not (self._gone and entry.stage is OpenedStage.OPEN), "what is gone is to be closed"
