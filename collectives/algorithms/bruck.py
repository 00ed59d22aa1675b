"""All-to-all in ceil(log2 n) rounds, for many ranks and small blocks.

(Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems", IEEE TPDS 8(11), 1997.) A block from rank s to rank d has j = (d - s) mod n ranks
to go. In round k every block whose j has bit k set is moved on by 2^k ranks. A block on its way stays in the
inbox slot that it was put into; each has a slot of its own.
"""

from __future__ import annotations

from functools import cache

from zbmd.collectives.algorithms.compose import finish_program
from zbmd.collectives.algorithms.drafts import Await, Draft, Signal, number_waits
from zbmd.collectives.programs.program import IN, INBOX, OUT, Copy, Operand, Program, Put, chunk_range


def bruck_all_to_all(n: int, rank: int, chunks: int) -> Program:
    """Blocks travel with others that go the same way."""
    slots = sum(j.bit_count() for j in range(n)) * (chunks // (n * n))
    return finish_program(
        "bruck_all_to_all",
        n,
        rank,
        n * n,
        chunks,
        [
            *(
                Copy(chunk, Operand(rank, OUT, chunk), Operand(rank, IN, chunk))
                for chunk in chunk_range(rank * n + rank, n * n, chunks)
            ),
            *number_waits(lambda r: _draft(n, r, chunks), rank),
        ],
        inbox_slots=slots,
    )


def _draft(n: int, rank: int, chunks: int) -> Draft:
    per_block = chunks // (n * n)
    draft: Draft = []
    for k in range((n - 1).bit_length()):
        ahead, behind = (rank + (1 << k)) % n, (rank - (1 << k)) % n
        moving = [j for j in range(n) if j >> k & 1]
        for j in moving:
            # What came in earlier rounds came from as many ranks behind as the lower bits of j say.
            source = (rank - (j & ((1 << k) - 1))) % n
            for i in range(per_block):
                chunk = (source * n + (source + j) % n) * per_block + i
                at = Operand(rank, IN, chunk)
                if source != rank:
                    at = Operand(rank, INBOX, _slot(j, k - 1, i, per_block))
                put = Put(chunk, Operand(ahead, INBOX, _slot(j, k, i, per_block)), at)
                draft.append(Signal(put, (k, j, i)))
        for j in moving:
            for i in range(per_block):
                draft.append(Await(behind, (k, j, i)))
                if j >> (k + 1) == 0:
                    chunk = ((rank - j) % n * n + rank) * per_block + i
                    slot = Operand(rank, INBOX, _slot(j, k, i, per_block))
                    draft.append(Copy(chunk, Operand(rank, OUT, chunk), slot))
    return draft


def _slot(j: int, k: int, i: int, per_block: int) -> int:
    """The slot of a block with `j` to go that has been moved in round `k`, or last in a round before it."""
    moved = (j & ((1 << (k + 1)) - 1)).bit_count() - 1
    return (_hops_below(j) + moved) * per_block + i


@cache
def _hops_below(j: int) -> int:
    """Moves of all blocks with less than `j` to go."""
    return sum(below.bit_count() for below in range(j))
