"""Drafts: programs in which waits name what they wait for, and not yet how many notifications that makes.

A rank's k-th notification to a peer is told apart from the others by a tag that is unique between the two.
Who waits for it must know k, so the drafts of the peers it waits for are made as well, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from zbmd.collectives.programs.program import Copy, Finish, Instruction, Notify, Put, Reduce, Wait


@dataclass(frozen=True, slots=True)
class Signal:
    """A put or notify, with the tag by which its peer waits for it."""

    instruction: Put | Notify
    tag: Hashable

    @property
    def peer(self) -> int:
        """Who is notified."""
        return self.instruction.dst.rank if isinstance(self.instruction, Put) else self.instruction.peer


@dataclass(frozen=True, slots=True)
class Await:
    """A wait for the notification of `peer` that carries `tag`."""

    peer: int
    tag: Hashable


Draft = list[Signal | Await | Reduce | Copy | Finish]


_shared: ContextVar[dict[int, tuple[Draft, dict[int, list[Hashable]]]] | None] = ContextVar(
    "_shared", default=None
)


@contextmanager
def shared_drafts() -> Generator[None]:
    """While the programs of all ranks of *one* request are built, each rank's draft is made once."""
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


def number_waits(draft_of: Callable[[int], Draft], rank: int) -> list[Instruction]:
    """The instructions of `rank`: tags become counts. A wait that an earlier one implies is left out."""
    own, _ = _draft(draft_of, rank)
    counts: dict[tuple[int, Hashable], int] = {}
    for peer in {item.peer for item in own if isinstance(item, Await)}:
        _, tags = _draft(draft_of, peer)
        counts |= {(peer, tag): count for count, tag in enumerate(tags.get(rank, ()), 1)}
    instructions: list[Instruction] = []
    waited: dict[int, int] = {}
    for item in own:
        if isinstance(item, Await):
            count = counts[item.peer, item.tag]
            if count > waited.get(item.peer, 0):
                waited[item.peer] = count
                instructions.append(Wait(item.peer, count))
        elif isinstance(item, Signal):
            instructions.append(item.instruction)
        else:
            instructions.append(item)
    return instructions


def _draft(draft_of: Callable[[int], Draft], rank: int) -> tuple[Draft, dict[int, list[Hashable]]]:
    """A rank's draft, and the tags of its signals to each peer, in order."""
    shared = _shared.get()
    found = None if shared is None else shared.get(rank)
    if found is None:
        draft = draft_of(rank)
        tags: dict[int, list[Hashable]] = {}
        for item in draft:
            if isinstance(item, Signal):
                tags.setdefault(item.peer, []).append(item.tag)
        found = (draft, tags)
        if shared is not None:
            shared[rank] = found
    return found
