"""All-to-all in symmetric memory. Block s*n + d of the full vector is what rank s sends to rank d."""

from __future__ import annotations

from zbmd.collectives.algorithms.compose import finish_program, part_from_all
from zbmd.collectives.programs.program import (
    IN,
    OUT,
    PUB,
    Copy,
    Instruction,
    Operand,
    Program,
    chunk_range,
    peers_after,
)


def direct_all_to_all(n: int, rank: int, chunks: int) -> Program:
    """Every rank copies its block of each peer's input, the next rank's first."""
    instructions = _fetch(n, rank, chunks, IN) + part_from_all(n, rank)
    return finish_program("direct_all_to_all", n, rank, n * n, chunks, instructions)


def eager_all_to_all(n: int, rank: int, chunks: int) -> Program:
    """`direct_all_to_all` from the descriptors."""
    return finish_program("eager_all_to_all", n, rank, n * n, chunks, _fetch(n, rank, chunks, PUB))


def _fetch(n: int, rank: int, chunks: int, source: int) -> list[Instruction]:
    return [
        Copy(chunk, Operand(rank, OUT, chunk), Operand(peer, source, chunk))
        for peer in (rank, *peers_after(rank, n))
        for chunk in chunk_range(peer * n + rank, n * n, chunks)
    ]
