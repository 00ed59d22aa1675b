"""Reduce, gather and scatter in symmetric memory: whoever needs an array reads it where it lies."""

from __future__ import annotations

from zbmd.collectives.algorithms.compose import TreeReduction, finish_program
from zbmd.collectives.programs.program import (
    IN,
    OUT,
    PUB,
    Copy,
    Instruction,
    Notify,
    Operand,
    Program,
    Wait,
    chunk_range,
    peers_after,
)
from zbmd.collectives.programs.spec import left_fold


def direct_reduce(n: int, rank: int, chunks: int, root: int) -> Program:
    """The root reduces all inputs in place. Order: left fold over ranks 0..n-1."""
    return _reduce("direct_reduce", n, rank, chunks, root, IN)


def eager_reduce(n: int, rank: int, chunks: int, root: int) -> Program:
    """`direct_reduce` from the descriptors: nobody waits for the root."""
    return _reduce("eager_reduce", n, rank, chunks, root, PUB)


def _reduce(name: str, n: int, rank: int, chunks: int, root: int, source: int) -> Program:
    reduction = TreeReduction(rank)
    order = left_fold(range(n))
    instructions: list[Instruction] = []
    if rank == root:
        for chunk in range(chunks):
            places = [Operand(peer, source, chunk) for peer in range(n)]
            instructions += reduction.emit(order, chunk, places.__getitem__, Operand(rank, OUT, chunk))
    if source != PUB:
        instructions += _let_go(n, rank, root)
    return finish_program(name, n, rank, 1, chunks, instructions, scratch_slots=reduction.slots)


def direct_gather(n: int, rank: int, chunks: int, root: int) -> Program:
    """The root copies every input into its block."""
    instructions = _gather(n, rank, chunks, root, IN)
    return finish_program("direct_gather", n, rank, n, chunks, instructions + _let_go(n, rank, root))


def eager_gather(n: int, rank: int, chunks: int, root: int) -> Program:
    """`direct_gather` from the descriptors."""
    return finish_program("eager_gather", n, rank, n, chunks, _gather(n, rank, chunks, root, PUB))


def _gather(n: int, rank: int, chunks: int, root: int, source: int) -> list[Instruction]:
    if rank != root:
        return []
    return [
        Copy(chunk, Operand(rank, OUT, chunk), Operand(owner, source, chunk))
        for owner in (rank, *peers_after(rank, n))
        for chunk in chunk_range(owner, n, chunks)
    ]


def direct_scatter(n: int, rank: int, chunks: int, root: int) -> Program:
    """Every rank copies its block from the root's array; the root waits for all."""
    instructions = _scatter(n, rank, chunks, root, IN)
    if rank == root:
        instructions += [Wait(peer, 1) for peer in peers_after(rank, n)]
    else:
        instructions.append(Notify(root))
    return finish_program("direct_scatter", n, rank, n, chunks, instructions)


def eager_scatter(n: int, rank: int, chunks: int, root: int) -> Program:
    """`direct_scatter` from the root's descriptor."""
    return finish_program("eager_scatter", n, rank, n, chunks, _scatter(n, rank, chunks, root, PUB))


def _scatter(n: int, rank: int, chunks: int, root: int, source: int) -> list[Instruction]:
    return [
        Copy(chunk, Operand(rank, OUT, chunk), Operand(root, source, chunk))
        for chunk in chunk_range(rank, n, chunks)
    ]


def _let_go(n: int, rank: int, root: int) -> list[Instruction]:
    """The root has read everything; the others may use their memory again."""
    if rank == root:
        return [Notify(peer) for peer in peers_after(rank, n)]
    return [Wait(root, 1)]
