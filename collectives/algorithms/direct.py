"""Pull-based algorithms over symmetric memory: a rank reads its peers' arrays where they lie.

Reductions combine ranks in the fixed order ((x0 + x1) + x2) + … on every chunk. Each direct algorithm has an
eager twin for inputs that are small enough to travel with the descriptors: the twin reads `pub` instead of
`in`, needs no notification, and ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable

from zbmd.collectives.algorithms.compose import (
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


def direct_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """Reduce-scatter, then all-gather: each rank reduces its slice from all inputs, others copy it.

    Order: left fold over ranks 0..n-1. In place or not.
    """
    own, end = chunk_range(rank, n, chunks), exchange_slices(n, rank, chunks)
    return _reduction("direct_all_reduce", n, rank, 1, chunks, IN, own, end)


def eager_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """`direct_all_reduce` from the descriptors: each rank reduces everything."""
    return _reduction("eager_all_reduce", n, rank, 1, chunks, PUB, range(chunks))


def direct_reduce_scatter(n: int, rank: int, chunks: int) -> Program:
    """Each rank reduces its block from all inputs. Order: left fold over ranks 0..n-1."""
    own, end = chunk_range(rank, n, chunks), part_from_all(n, rank)
    return _reduction("direct_reduce_scatter", n, rank, n, chunks, IN, own, end)


def eager_reduce_scatter(n: int, rank: int, chunks: int) -> Program:
    """`direct_reduce_scatter` from the descriptors."""
    return _reduction("eager_reduce_scatter", n, rank, n, chunks, PUB, chunk_range(rank, n, chunks))


def direct_reduce(n: int, rank: int, chunks: int, root: int) -> Program:
    """The root reduces all inputs in place. Order: left fold over ranks 0..n-1."""
    own, end = range(chunks if rank == root else 0), _end_of_root_reading(n, rank, root)
    return _reduction("direct_reduce", n, rank, 1, chunks, IN, own, end)


def eager_reduce(n: int, rank: int, chunks: int, root: int) -> Program:
    """`direct_reduce` from the descriptors: nobody waits for the root."""
    return _reduction("eager_reduce", n, rank, 1, chunks, PUB, range(chunks if rank == root else 0))


def direct_all_gather(n: int, rank: int, chunks: int) -> Program:
    """Each rank copies every input into its block."""
    copies = _blocks(n, rank, chunks, IN, (rank, *peers_after(rank, n)))
    return finish_program("direct_all_gather", n, rank, n, chunks, copies + part_from_all(n, rank))


def eager_all_gather(n: int, rank: int, chunks: int) -> Program:
    """`direct_all_gather` from the descriptors."""
    return finish_program("eager_all_gather", n, rank, n, chunks, _blocks(n, rank, chunks, PUB, range(n)))


def direct_gather(n: int, rank: int, chunks: int, root: int) -> Program:
    """The root copies every input into its block."""
    copies = _gather(n, rank, chunks, root, IN)
    return finish_program("direct_gather", n, rank, n, chunks, copies + _end_of_root_reading(n, rank, root))


def eager_gather(n: int, rank: int, chunks: int, root: int) -> Program:
    """`direct_gather` from the descriptors."""
    return finish_program("eager_gather", n, rank, n, chunks, _gather(n, rank, chunks, root, PUB))


def direct_scatter(n: int, rank: int, chunks: int, root: int) -> Program:
    """Every rank copies its block from the root's array; the root waits for all."""
    copies = _copies(rank, root, IN, chunk_range(rank, n, chunks))
    return finish_program("direct_scatter", n, rank, n, chunks, copies + _end_of_reading_root(n, rank, root))


def eager_scatter(n: int, rank: int, chunks: int, root: int) -> Program:
    """`direct_scatter` from the root's descriptor."""
    copies = _copies(rank, root, PUB, chunk_range(rank, n, chunks))
    return finish_program("eager_scatter", n, rank, n, chunks, copies)


def direct_broadcast(n: int, rank: int, chunks: int, root: int) -> Program:
    """Every rank copies the root's array; the root waits for all."""
    copies = _copies(rank, root, OUT, range(chunks if rank != root else 0))
    return finish_program(
        "direct_broadcast", n, rank, 1, chunks, copies + _end_of_reading_root(n, rank, root)
    )


def eager_broadcast(n: int, rank: int, chunks: int, root: int) -> Program:
    """`direct_broadcast` from the root's descriptor."""
    copies = _copies(rank, root, PUB, range(chunks if rank != root else 0))
    return finish_program("eager_broadcast", n, rank, 1, chunks, copies)


def direct_all_to_all(n: int, rank: int, chunks: int) -> Program:
    """Every rank copies its block of each peer's input, the next rank's first.

    Block s*n + d of the full vector is what rank s sends to rank d.
    """
    copies = _all_to_all(n, rank, chunks, IN)
    return finish_program("direct_all_to_all", n, rank, n * n, chunks, copies + part_from_all(n, rank))


def eager_all_to_all(n: int, rank: int, chunks: int) -> Program:
    """`direct_all_to_all` from the descriptors."""
    return finish_program("eager_all_to_all", n, rank, n * n, chunks, _all_to_all(n, rank, chunks, PUB))


def _reduction(
    name: str,
    n: int,
    rank: int,
    blocks: int,
    chunks: int,
    source: int,
    own: range,
    end: Iterable[Instruction] = (),
) -> Program:
    """Reduce the chunks `own` of everybody's `source` into `out`, then `end`."""
    reduction, order = TreeReduction(rank), left_fold(range(n))
    instructions: list[Instruction] = []
    for chunk in own:
        places = [Operand(peer, source, chunk) for peer in range(n)]
        instructions += reduction.emit(order, chunk, places.__getitem__, Operand(rank, OUT, chunk))
    return finish_program(name, n, rank, blocks, chunks, (*instructions, *end), scratch_slots=reduction.slots)


def _copies(rank: int, owner: int, source: int, chunks: Iterable[int]) -> list[Instruction]:
    return [Copy(chunk, Operand(rank, OUT, chunk), Operand(owner, source, chunk)) for chunk in chunks]


def _blocks(n: int, rank: int, chunks: int, source: int, owners: Iterable[int]) -> list[Instruction]:
    """Copy the block of each owner."""
    return [copy for owner in owners for copy in _copies(rank, owner, source, chunk_range(owner, n, chunks))]


def _gather(n: int, rank: int, chunks: int, root: int, source: int) -> list[Instruction]:
    return _blocks(n, rank, chunks, source, (rank, *peers_after(rank, n)) if rank == root else ())


def _all_to_all(n: int, rank: int, chunks: int, source: int) -> list[Instruction]:
    return [
        copy
        for peer in (rank, *peers_after(rank, n))
        for copy in _copies(rank, peer, source, chunk_range(peer * n + rank, n * n, chunks))
    ]


def _end_of_root_reading(n: int, rank: int, root: int) -> list[Instruction]:
    """The root has read everything; the others may use their memory again."""
    if rank == root:
        return [Notify(peer) for peer in peers_after(rank, n)]
    return [Wait(root, 1)]


def _end_of_reading_root(n: int, rank: int, root: int) -> list[Instruction]:
    """Everybody has read the root's memory; it may use it again."""
    if rank == root:
        return [Wait(peer, 1) for peer in peers_after(rank, n)]
    return [Notify(root)]
