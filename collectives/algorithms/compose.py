"""Building blocks of algorithms: reductions along a tree, exchanges, and drafts.

In a *draft* a wait names what it waits for, and not yet how many notifications that makes. A rank's k-th
notification to a peer has a tag that is unique between the two. A rank that
waits for it must know k, so the drafts of the peers it waits for are made as well, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from zbmd.collectives.programs.program import (
    IN,
    OUT,
    SCRATCH,
    Copy,
    Finish,
    Instruction,
    Notify,
    Operand,
    Program,
    Put,
    Reduce,
    Wait,
    chunk_range,
    peers_after,
)
from zbmd.collectives.programs.spec import Tree

Leaf = Callable[[int], Operand]


class TreeReduction:
    """Emits the reduction of one chunk along a tree, partial results in a stack of scratch slots.

    `slots` is the number of slots in use at most: for a left fold one, for a balanced tree of L leaves
    about log2 L.
    """

    def __init__(self, rank: int, *, first_slot: int = 0) -> None:
        self._rank = rank
        self._first_slot = first_slot
        self._free: list[int] = []
        self.slots = 0

    def emit(self, tree: Tree, chunk: int, leaf: Leaf, dst: Operand) -> list[Reduce | Copy]:
        """Instructions for `dst = tree`, where `leaf(label)` is the place of a contribution."""
        if isinstance(tree, int):
            return [Copy(chunk, dst, leaf(tree))]
        instructions: list[Reduce | Copy] = []
        a = self._evaluate(tree[0], chunk, leaf, instructions)
        b = self._evaluate(tree[1], chunk, leaf, instructions)
        instructions.append(Reduce(chunk, dst, a, b))
        self._release(a)
        self._release(b)
        return instructions

    def _evaluate(self, tree: Tree, chunk: int, leaf: Leaf, instructions: list[Reduce | Copy]) -> Operand:
        rights: list[Tree] = []  # a left fold over thousands of ranks is as deep
        while not isinstance(tree, int):
            rights.append(tree[1])
            tree = tree[0]
        a = leaf(tree)
        for right in reversed(rights):
            a = self._add(a, self._evaluate(right, chunk, leaf, instructions), chunk, instructions)
        return a

    def _add(self, a: Operand, b: Operand, chunk: int, instructions: list[Reduce | Copy]) -> Operand:
        if a.buffer == SCRATCH:
            dst = a
            self._release(b)
        elif b.buffer == SCRATCH:
            dst = b
        else:
            dst = self._acquire()
        instructions.append(Reduce(chunk, dst, a, b))
        return dst

    def _acquire(self) -> Operand:
        if not self._free:
            self._free.append(self._first_slot + self.slots)
            self.slots += 1
        return Operand(self._rank, SCRATCH, self._free.pop())

    def _release(self, place: Operand) -> None:
        if place.buffer == SCRATCH:
            self._free.append(place.number)


def copy_if_alone(n: int, chunks: int) -> list[Instruction]:
    """All there is to do for a group of one rank; nothing for a larger one."""
    return [Copy(c, Operand(0, OUT, c), Operand(0, IN, c)) for c in range(chunks) if n == 1]


def exchange_slices(n: int, rank: int, chunks: int) -> list[Instruction]:
    """Every rank has made its slice of `out`: announce it, copy the others' slices, part.

    Each rank ends only when every peer has finished reading its slice.
    """
    instructions: list[Instruction] = [Notify(peer) for peer in peers_after(rank, n)]
    for peer in peers_after(rank, n):
        instructions.append(Wait(peer, 1))
        instructions += [
            Copy(chunk, Operand(rank, OUT, chunk), Operand(peer, OUT, chunk))
            for chunk in chunk_range(peer, n, chunks)
        ]
        instructions.append(Notify(peer))
    instructions += [Wait(peer, 2) for peer in peers_after(rank, n)]
    return instructions


def part_from_all(n: int, rank: int) -> list[Instruction]:
    """Tell every peer that its memory has been read; wait until all have said so."""
    return [
        *(Notify(peer) for peer in peers_after(rank, n)),
        *(Wait(peer, 1) for peer in peers_after(rank, n)),
    ]


def finish_program(
    algorithm: str,
    n: int,
    rank: int,
    blocks: int,
    chunks: int,
    instructions: Iterable[Instruction],
    *,
    scratch_slots: int = 0,
    inbox_slots: int = 0,
) -> Program:
    """The program of these instructions."""
    return Program(
        algorithm=algorithm,
        n=n,
        rank=rank,
        blocks=blocks,
        chunks=chunks,
        scratch_slots=scratch_slots,
        inbox_slots=inbox_slots,
        instructions=tuple(instructions),
    )


@dataclass(frozen=True, slots=True)
class Signal:
    """A put or notify, with the tag by which its peer waits for it."""

    instruction: Put | Notify
    tag: Hashable

    @property
    def peer(self) -> int:
        """The rank that is notified."""
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
