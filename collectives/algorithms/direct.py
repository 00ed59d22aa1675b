"""Pull-based algorithms over symmetric memory: every rank reads its peers' arrays in place.

Reductions combine ranks in the fixed order ((x0 + x1) + x2) + … on every chunk.
"""

from __future__ import annotations

from zbmd.collectives.algorithms.compose import Leaf, TreeReduction, exchange_slices, part_from_all
from zbmd.collectives.program import (
    IN,
    OUT,
    PUB,
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
from zbmd.collectives.spec import left_fold


def _input_at(chunk: int) -> Leaf:
    """Where each rank's input of a chunk lies."""
    return lambda label: Operand(label, IN, chunk)


def direct_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """Reduce-scatter, then all-gather: each rank reduces its slice from all inputs, others copy it.

    Order: left fold over ranks 0..n-1. In place or not.
    """
    reduction = TreeReduction(rank)
    order = left_fold(range(n))
    instructions: list[Instruction] = []
    for chunk in chunk_range(rank, n, chunks):
        instructions += reduction.emit(order, chunk, _input_at(chunk), Operand(rank, OUT, chunk))
    instructions += exchange_slices(n, rank, chunks)
    return _program("direct_all_reduce", n, rank, 1, chunks, instructions, scratch_slots=reduction.slots)


def direct_reduce_scatter(n: int, rank: int, chunks: int) -> Program:
    """Each rank reduces its block from all inputs. Order: left fold over ranks 0..n-1."""
    reduction = TreeReduction(rank)
    order = left_fold(range(n))
    instructions: list[Instruction] = []
    for chunk in chunk_range(rank, n, chunks):
        instructions += reduction.emit(order, chunk, _input_at(chunk), Operand(rank, OUT, chunk))
    instructions += part_from_all(n, rank)
    return _program("direct_reduce_scatter", n, rank, n, chunks, instructions, scratch_slots=reduction.slots)


def direct_all_gather(n: int, rank: int, chunks: int) -> Program:
    """Each rank copies every input into its block."""
    instructions: list[Instruction] = [
        Copy(chunk, Operand(rank, OUT, chunk), Operand(owner, IN, chunk))
        for owner in (rank, *peers_after(rank, n))
        for chunk in chunk_range(owner, n, chunks)
    ]
    instructions += part_from_all(n, rank)
    return _program("direct_all_gather", n, rank, n, chunks, instructions)


def direct_broadcast(n: int, rank: int, chunks: int, root: int) -> Program:
    """Every rank copies the root's array; the root waits for all."""
    if rank == root:
        instructions: list[Instruction] = [Wait(peer, 1) for peer in peers_after(rank, n)]
    else:
        instructions = [
            Copy(chunk, Operand(rank, OUT, chunk), Operand(root, OUT, chunk)) for chunk in range(chunks)
        ]
        instructions.append(Notify(root))
    return _program("direct_broadcast", n, rank, 1, chunks, instructions)


def eager_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """For inputs small enough to travel with the descriptor: no notification at all.

    Order: left fold over ranks 0..n-1, the same bits as `direct_all_reduce`.
    """
    instructions: list[Instruction] = []
    for chunk in range(chunks):
        out = Operand(rank, OUT, chunk)
        if n == 1:
            instructions.append(Copy(chunk, out, Operand(0, PUB, chunk)))
        for peer in range(1, n):
            a = out if peer > 1 else Operand(0, PUB, chunk)
            instructions.append(Reduce(chunk, out, a, Operand(peer, PUB, chunk)))
    return _program("eager_all_reduce", n, rank, 1, chunks, instructions)


def eager_all_gather(n: int, rank: int, chunks: int) -> Program:
    """`direct_all_gather` from the descriptors."""
    instructions = [
        Copy(chunk, Operand(rank, OUT, chunk), Operand(owner, PUB, chunk))
        for owner in range(n)
        for chunk in chunk_range(owner, n, chunks)
    ]
    return _program("eager_all_gather", n, rank, n, chunks, instructions)


def eager_broadcast(n: int, rank: int, chunks: int, root: int) -> Program:
    """`direct_broadcast` from the root's descriptor."""
    instructions = [
        Copy(chunk, Operand(rank, OUT, chunk), Operand(root, PUB, chunk))
        for chunk in range(chunks)
        if rank != root
    ]
    return _program("eager_broadcast", n, rank, 1, chunks, instructions)


def _program(
    algorithm: str,
    n: int,
    rank: int,
    blocks: int,
    chunks: int,
    instructions: list[Instruction] | list[Copy],
    *,
    scratch_slots: int = 0,
) -> Program:
    return Program(
        algorithm=algorithm,
        n=n,
        rank=rank,
        blocks=blocks,
        chunks=chunks,
        scratch_slots=scratch_slots,
        inbox_slots=0,
        instructions=tuple(instructions),
    )
