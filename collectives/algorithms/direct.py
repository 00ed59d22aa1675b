"""Pull-based algorithms over symmetric memory: every rank reads its peers' arrays in place.

Reductions combine ranks in the fixed order ((x0 + x1) + x2) + … on every chunk.
"""

from __future__ import annotations

from zbmd.collectives.algorithms.compose import (
    Leaf,
    TreeReduction,
    exchange_slices,
    finish_program,
    part_from_all,
)
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
    return finish_program(
        "direct_all_reduce", n, rank, 1, chunks, instructions, scratch_slots=reduction.slots
    )


def direct_reduce_scatter(n: int, rank: int, chunks: int) -> Program:
    """Each rank reduces its block from all inputs. Order: left fold over ranks 0..n-1."""
    reduction = TreeReduction(rank)
    order = left_fold(range(n))
    instructions: list[Instruction] = []
    for chunk in chunk_range(rank, n, chunks):
        instructions += reduction.emit(order, chunk, _input_at(chunk), Operand(rank, OUT, chunk))
    instructions += part_from_all(n, rank)
    return finish_program(
        "direct_reduce_scatter", n, rank, n, chunks, instructions, scratch_slots=reduction.slots
    )


def direct_all_gather(n: int, rank: int, chunks: int) -> Program:
    """Each rank copies every input into its block."""
    instructions: list[Instruction] = [
        Copy(chunk, Operand(rank, OUT, chunk), Operand(owner, IN, chunk))
        for owner in (rank, *peers_after(rank, n))
        for chunk in chunk_range(owner, n, chunks)
    ]
    instructions += part_from_all(n, rank)
    return finish_program("direct_all_gather", n, rank, n, chunks, instructions)


def direct_broadcast(n: int, rank: int, chunks: int, root: int) -> Program:
    """Every rank copies the root's array; the root waits for all."""
    if rank == root:
        instructions: list[Instruction] = [Wait(peer, 1) for peer in peers_after(rank, n)]
    else:
        instructions = [
            Copy(chunk, Operand(rank, OUT, chunk), Operand(root, OUT, chunk)) for chunk in range(chunks)
        ]
        instructions.append(Notify(root))
    return finish_program("direct_broadcast", n, rank, 1, chunks, instructions)


def eager_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """For inputs small enough to travel with the descriptor: no notification at all.

    Order: left fold over ranks 0..n-1, the same bits as `direct_all_reduce`.
    """
    return _eager_reduction("eager_all_reduce", n, rank, 1, chunks, range(chunks))


def eager_reduce_scatter(n: int, rank: int, chunks: int) -> Program:
    """`direct_reduce_scatter` from the descriptors."""
    own = chunk_range(rank, n, chunks)
    return _eager_reduction("eager_reduce_scatter", n, rank, n, chunks, own)


def _eager_reduction(name: str, n: int, rank: int, blocks: int, chunks: int, own: range) -> Program:
    reduction = TreeReduction(rank)
    order = left_fold(range(n))
    instructions: list[Instruction] = []
    for chunk in own:
        places = [Operand(peer, PUB, chunk) for peer in range(n)]
        instructions += reduction.emit(order, chunk, places.__getitem__, Operand(rank, OUT, chunk))
    return finish_program(name, n, rank, blocks, chunks, instructions, scratch_slots=reduction.slots)


def eager_all_gather(n: int, rank: int, chunks: int) -> Program:
    """`direct_all_gather` from the descriptors."""
    instructions = [
        Copy(chunk, Operand(rank, OUT, chunk), Operand(owner, PUB, chunk))
        for owner in range(n)
        for chunk in chunk_range(owner, n, chunks)
    ]
    return finish_program("eager_all_gather", n, rank, n, chunks, instructions)


def eager_broadcast(n: int, rank: int, chunks: int, root: int) -> Program:
    """`direct_broadcast` from the root's descriptor."""
    instructions = [
        Copy(chunk, Operand(rank, OUT, chunk), Operand(root, PUB, chunk))
        for chunk in range(chunks)
        if rank != root
    ]
    return finish_program("eager_broadcast", n, rank, 1, chunks, instructions)
