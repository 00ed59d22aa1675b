"""Pieces that several algorithms are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zbmd.collectives.programs.program import (
    OUT,
    SCRATCH,
    Copy,
    Instruction,
    Notify,
    Operand,
    Program,
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
