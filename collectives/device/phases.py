"""Operations between devices that reach each other's memory, as phases (pure).

Every rank has a *window* of its device that all ranks read. In a phase a rank loads what it gives into its
own window, folds what lies in the windows of all, or fetches from them. Between two phases all ranks meet,
each once its device has done the phase. A rank writes its own window and its caller's array alone. What is
reduced is folded in the order of the ranks, each element by one of them: the result has the same bits on
every rank, and those of the host's direct algorithms.

A large operation is done in pieces, in turn in the two halves of the window. A half is loaded again two
pieces later, behind a meeting that all ranks came to after they had read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from zbmd.collectives.algorithms.catalogue import Operation

ALIGNMENT: Final = 256
"""Bytes, of an area in a window."""
_FROM_ALL: Final = (Operation.REDUCE_SCATTER, Operation.SCATTER, Operation.ALL_TO_ALL)
"""The input has a block for each rank."""
_IN_SLICES: Final = (Operation.ALL_REDUCE, Operation.REDUCE)
"""Each rank reduces a slice, for others to fetch."""
OPERATIONS: Final = (*_IN_SLICES, Operation.BROADCAST, *_FROM_ALL, Operation.ALL_GATHER, Operation.GATHER)
"""Those that have phases."""


class Area(Enum):
    """The parts of a window's half."""

    INPUT = "input"
    """Blocks that the rank gives, one after the other."""
    RESULT = "result"
    """The slice that it has reduced, in the place of the slice."""


@dataclass(frozen=True, slots=True)
class Load:
    """Copy this piece of all blocks of the caller's input into the own window."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Reduce elements begin..end of one block of all inputs: into the own RESULT, or the caller's output."""

    block: int
    begin: int
    end: int
    keep: bool


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copy elements begin..end of a block of a rank's area to a block of the caller's output."""

    rank: int
    area: Area
    block: int
    begin: int
    end: int
    into: int


Step: TypeAlias = Load | Fold | Fetch
Phase: TypeAlias = tuple[Step, ...]


def blocks_in(operation: Operation, n: int) -> int:
    """Return the blocks of the input of a rank that gives something."""
    return n if operation in _FROM_ALL else 1


def result_offset(operation: Operation, n: int, length: int, itemsize: int) -> int:
    """Return where the RESULT of a piece of `length` elements a block begins in a half, bytes."""
    return -(-blocks_in(operation, n) * length * itemsize // ALIGNMENT) * ALIGNMENT


def piece_elements(operation: Operation, n: int, itemsize: int, half_bytes: int) -> int:
    """Return how many elements of a block a half takes; 0: not one."""
    areas = blocks_in(operation, n) + (operation in _IN_SLICES)
    return max(0, (half_bytes - ALIGNMENT) // (areas * itemsize))


def phases_of(operation: Operation, *, n: int, place: int, root: int, length: int) -> tuple[Phase, ...]:
    """Return what the rank at `place` does for a piece of `length` elements a block.

    All ranks have equally many phases. `root` has no meaning for operations without one.
    """
    gives = operation not in (Operation.BROADCAST, Operation.SCATTER) or place == root
    gets = operation not in (Operation.REDUCE, Operation.GATHER) or place == root
    loads: Phase = (Load(),) if gives else ()
    if operation in _IN_SLICES:
        begin, end = _slice(place, n, length)
        folds: Phase = (Fold(0, begin, end, keep=True),) if end > begin else ()
        return loads, folds, tuple(_slices(n, length, place)) if gets else ()
    if operation is Operation.REDUCE_SCATTER:
        return loads, (Fold(place, 0, length, keep=False),)
    if operation is Operation.BROADCAST:
        return loads, () if place == root else (Fetch(root, Area.INPUT, 0, 0, length, 0),)
    if operation is Operation.SCATTER:
        return loads, (Fetch(root, Area.INPUT, place, 0, length, 0),)
    block = place if operation is Operation.ALL_TO_ALL else 0
    each = (Fetch(rank, Area.INPUT, block, 0, length, rank) for rank in _others_first(n, place))
    return loads, tuple(each) if gets else ()


def _slices(n: int, length: int, place: int) -> Iterator[Step]:
    for rank in _others_first(n, place):
        begin, end = _slice(rank, n, length)
        if end > begin:
            yield Fetch(rank, Area.RESULT, 0, begin, end, 0)


def _slice(rank: int, n: int, length: int) -> tuple[int, int]:
    return rank * length // n, (rank + 1) * length // n


def _others_first(n: int, place: int) -> Iterator[int]:
    """The ranks beginning with the next: each rank reads from another one first."""
    return ((place + step) % n for step in range(1, n + 1))
