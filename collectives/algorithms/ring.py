"""Put-based ring algorithms: each rank sends only to its successor, through a window of inbox slots.

(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2),
2009.) Chunks of a block are pipelined: put one, take one. A rank puts its t-th chunk into slot
t mod `WINDOW_SLOTS` of its successor, once the successor has given that slot back. In a ring of no more
ranks than slots, and of blocks of equally many chunks, nobody need say so: a rank puts chunk t after it
took t - 1, which the rank before put after it took t - 2, and so on round the ring to the successor, which
must have taken t - n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from zbmd.collectives.algorithms.compose import (
    Await,
    Draft,
    Signal,
    copy_if_alone,
    finish_program,
    number_waits,
)
from zbmd.collectives.programs.program import (
    IN,
    INBOX,
    OUT,
    SCRATCH,
    Copy,
    Instruction,
    Notify,
    Operand,
    Program,
    Put,
    Reduce,
    chunk_range,
)
from zbmd.collectives.programs.spec import Tree, left_fold

WINDOW_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a rank: the chunks it sends and receives, where from and what it does with them."""

    send: Sequence[int]
    receive: Sequence[int]
    source: Callable[[int, int], Operand]
    take: Callable[[int, int, Operand], Reduce | Copy]


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in a ring of `size` ranks, whose puts fill the inbox slots from `first_slot` on."""

    rank: int
    following: int
    preceding: int
    size: int
    first_slot: int = 0


def walk_ring(at: Place, hops: Sequence[Hop]) -> Draft:
    """The steps of a rank, chunk by chunk: put one, take one."""
    return [item for hop in ring_turns(at, hops) for turn in hop for item in turn]


def ring_turns(at: Place, hops: Sequence[Hop]) -> list[list[Draft]]:
    """The turns of each hop: put one, take one. Tags hold the first slot, so that rings can share peers."""
    total = sum(len(hop.receive) for hop in hops)
    even = len({len(hop.send) for hop in hops}) == 1
    credits = at.size > WINDOW_SLOTS or not even
    turns: list[list[Draft]] = []
    sent = received = 0
    for hop in hops:
        turns.append([])
        for j in range(max(len(hop.send), len(hop.receive))):
            turn: Draft = []
            if j < len(hop.send):
                if credits and sent >= WINDOW_SLOTS:
                    turn.append(Await(at.following, ("free", at.first_slot, sent - WINDOW_SLOTS)))
                slot = Operand(at.following, INBOX, at.first_slot + sent % WINDOW_SLOTS)
                chunk = hop.send[j]
                turn.append(Signal(Put(chunk, slot, hop.source(chunk, j)), ("data", at.first_slot, sent)))
                sent += 1
            if j < len(hop.receive):
                turn.append(Await(at.preceding, ("data", at.first_slot, received)))
                slot = Operand(at.rank, INBOX, at.first_slot + received % WINDOW_SLOTS)
                turn.append(hop.take(hop.receive[j], j, slot))
                if credits and received + WINDOW_SLOTS < total:
                    turn.append(Signal(Notify(at.preceding), ("free", at.first_slot, received)))
                received += 1
            turns[-1].append(turn)
    return turns


def _program(
    algorithm: str,
    n: int,
    rank: int,
    blocks: int,
    chunks: int,
    hops_of: Callable[[int], list[Hop]],
    first: Iterable[Instruction],
    scratch_slots: int = 0,
) -> Program:
    walk: list[Instruction] = []
    if n > 1:
        walk = number_waits(lambda r: walk_ring(Place(r, (r + 1) % n, (r - 1) % n, n), hops_of(r)), rank)
    return finish_program(
        algorithm,
        n,
        rank,
        blocks,
        chunks,
        (*first, *walk),
        scratch_slots=scratch_slots,
        inbox_slots=WINDOW_SLOTS if n > 1 else 0,
    )


def _reducing(n: int, r: int, blocks: Sequence[range], first_scratch: int = 0) -> list[Hop]:
    """Send the sums of these blocks on, each after adding the own input; keep that of the last."""

    def partial_sum(chunk: int, j: int) -> Operand:
        return Operand(r, SCRATCH, first_scratch + j)

    def own(chunk: int, j: int) -> Operand:
        return Operand(r, IN, chunk)

    def add(chunk: int, j: int, slot: Operand) -> Reduce:
        return Reduce(chunk, partial_sum(chunk, j), slot, own(chunk, j))

    def end(chunk: int, j: int, slot: Operand) -> Reduce:
        return Reduce(chunk, Operand(r, OUT, chunk), slot, own(chunk, j))

    return [
        Hop(send, receive, partial_sum if s else own, add if s < n - 2 else end)
        for s, (send, receive) in enumerate(pairwise(blocks))
    ]


def _gathering(r: int, blocks: Sequence[range]) -> list[Hop]:
    """Send each of these blocks on, and keep the next."""

    def result(chunk: int, j: int) -> Operand:
        return Operand(r, OUT, chunk)

    def keep(chunk: int, j: int, slot: Operand) -> Copy:
        return Copy(chunk, result(chunk, j), slot)

    return [Hop(send, receive, result, keep) for send, receive in pairwise(blocks)]


def _round(n: int, chunks: int, first: int) -> list[range]:
    """Blocks `first`, first - 1, …, one a rank."""
    return [chunk_range((first - s) % n, n, chunks) for s in range(n)]


def ring_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """Reduce-scatter round the ring, then all-gather round the ring; in place or not.

    Order (`ring_order`): a chunk of block b is the left fold over ranks b, b+1, …, b-1 (mod n). Partial sums
    travel from scratch to inbox, so they are not rounded on the way.
    """

    def hops_of(r: int) -> list[Hop]:
        return _reducing(n, r, _round(n, chunks, r)) + _gathering(r, _round(n, chunks, r + 1))

    slots = -(-chunks // n) if n > 2 else 0
    return _program("ring_all_reduce", n, rank, 1, chunks, hops_of, copy_if_alone(n, chunks), slots)


def ring_order(n: int, chunks: int, chunk: int) -> Tree:
    """The order in which `ring_all_reduce` combines ranks on `chunk`."""
    block = next(b for b in range(n) if chunk in chunk_range(b, n, chunks))
    return left_fold((block + i) % n for i in range(n))


def ring_reduce_scatter(n: int, rank: int, chunks: int) -> Program:
    """Reduce-scatter round the ring.

    Order (`ring_scatter_order`): block b is the left fold over ranks b+1, b+2, …, b (mod n).
    """
    slots = chunks // n if n > 2 else 0
    return _program(
        "ring_reduce_scatter",
        n,
        rank,
        n,
        chunks,
        lambda r: _reducing(n, r, _round(n, chunks, r - 1)),
        copy_if_alone(n, chunks),
        slots,
    )


def ring_scatter_order(n: int, chunks: int, chunk: int) -> Tree:
    """The order in which `ring_reduce_scatter` combines ranks on `chunk`."""
    block = chunk // (chunks // n)
    return left_fold((block + 1 + i) % n for i in range(n))


def ring_all_gather(n: int, rank: int, chunks: int) -> Program:
    """All-gather round the ring: block r sets out from rank r."""
    own = [Copy(c, Operand(rank, OUT, c), Operand(rank, IN, c)) for c in chunk_range(rank, n, chunks)]
    return _program("ring_all_gather", n, rank, n, chunks, lambda r: _gathering(r, _round(n, chunks, r)), own)


def bidirectional_ring_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """Two rings in opposite directions, each with half of the chunks of every block.

    Order (`bidirectional_order`): up the ranks from b for the first half of block b, down from b for the
    rest.
    """
    slots = [_half_slots(n, chunks, way) if n > 2 else 0 for way in (1, -1)]

    def draft_of(r: int) -> Draft:
        both = [
            ring_turns(
                Place(r, (r + way) % n, (r - way) % n, n, first_slot=i * WINDOW_SLOTS),
                _reducing_hops(n, r, chunks, way, first_scratch=i * slots[0]),
            )
            for i, way in enumerate((1, -1))
        ]
        draft: Draft = []
        for hops in zip(*both, strict=True):
            for up, down in zip_longest(*hops, fillvalue=[]):
                draft += [*up, *down]
        return draft

    return finish_program(
        "bidirectional_ring_all_reduce",
        n,
        rank,
        1,
        chunks,
        (*copy_if_alone(n, chunks), *(number_waits(draft_of, rank) if n > 1 else [])),
        scratch_slots=sum(slots),
        inbox_slots=2 * WINDOW_SLOTS if n > 1 else 0,
    )


def bidirectional_order(n: int, chunks: int, chunk: int) -> Tree:
    """The order in which `bidirectional_ring_all_reduce` combines ranks on `chunk`."""
    block = next(b for b in range(n) if chunk in chunk_range(b, n, chunks))
    way = 1 if chunk in _half(block, n, chunks, 1) else -1
    return left_fold((block + way * i) % n for i in range(n))


def _half(block: int, n: int, chunks: int, way: int) -> range:
    """The chunks of a block that go up the ranks (`way` 1) or down (-1)."""
    whole = chunk_range(block % n, n, chunks)
    middle = len(whole) - len(whole) // 2
    return whole[:middle] if way > 0 else whole[middle:]


def _half_slots(n: int, chunks: int, way: int) -> int:
    return max(len(_half(block, n, chunks, way)) for block in range(n))


def _reducing_hops(n: int, r: int, chunks: int, way: int, first_scratch: int) -> list[Hop]:
    """Reduce-scatter, then all-gather, of one half of the chunks round the ring in direction `way`."""

    def half(steps: int) -> range:
        return _half(r + way * steps, n, chunks, way)

    reducing = _reducing(n, r, [half(-s) for s in range(n)], first_scratch)
    return reducing + _gathering(r, [half(1 - s) for s in range(n)])
