"""Put-based ring algorithms: each rank sends only to its successor, through a window of inbox slots.

(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2),
2009.) Chunks of a block are pipelined: put one, take one. A rank puts its t-th chunk into slot
t mod `WINDOW_SLOTS` of its successor, once the successor has given that slot back. In a ring of no more
ranks than slots, and of blocks of equally many chunks, nobody need say so: a rank puts chunk t after it
took t - 1, which the rank before put after it took t - 2, and so on round the ring to the successor, which
must have taken t - n.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from zbmd.collectives.program import (
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
    Wait,
    chunk_range,
)
from zbmd.collectives.spec import Tree, left_fold

WINDOW_SLOTS = 4


@dataclass(frozen=True, slots=True)
class _Signal:
    """A put or notify to be told apart by `tag` from the others to the same peer."""

    instruction: Put | Notify
    tag: Hashable

    @property
    def peer(self) -> int:
        return self.instruction.dst.rank if isinstance(self.instruction, Put) else self.instruction.peer


@dataclass(frozen=True, slots=True)
class _Await:
    """A wait for the notification of `peer` that carries `tag`."""

    peer: int
    tag: Hashable


_Draft = list[_Signal | _Await | Reduce | Copy]


@dataclass(frozen=True, slots=True)
class _Hop:
    """One step of a rank: the chunks it sends and receives, where from and what it does with them."""

    send: range
    receive: range
    source: Callable[[int, int], Operand]
    take: Callable[[int, int, Operand], Reduce | Copy]


def _walk(n: int, rank: int, hops: list[_Hop]) -> _Draft:
    following, preceding = (rank + 1) % n, (rank - 1) % n
    total = sum(len(hop.receive) for hop in hops)
    even = len({len(hop.send) for hop in hops}) == 1
    credits = n > WINDOW_SLOTS or not even
    draft: _Draft = []
    sent = received = 0
    for hop in hops:
        for j in range(max(len(hop.send), len(hop.receive))):
            if j < len(hop.send):
                if credits and sent >= WINDOW_SLOTS:
                    draft.append(_Await(following, ("free", sent - WINDOW_SLOTS)))
                slot = Operand(following, INBOX, sent % WINDOW_SLOTS)
                chunk = hop.send[j]
                draft.append(_Signal(Put(chunk, slot, hop.source(chunk, j)), ("data", sent)))
                sent += 1
            if j < len(hop.receive):
                draft.append(_Await(preceding, ("data", received)))
                slot = Operand(rank, INBOX, received % WINDOW_SLOTS)
                draft.append(hop.take(hop.receive[j], j, slot))
                if credits and received + WINDOW_SLOTS < total:
                    draft.append(_Signal(Notify(preceding), ("free", received)))
                received += 1
    return draft


def _number_waits(draft_of: Callable[[int], _Draft], n: int, rank: int) -> Iterator[Instruction]:
    """Turn tags into counts: a peer's k-th notification to us is the one to wait for."""
    counts: dict[tuple[int, Hashable], int] = {}
    for peer in {(rank + 1) % n, (rank - 1) % n}:
        signals = (i for i in draft_of(peer) if isinstance(i, _Signal) and i.peer == rank)
        counts |= {(peer, signal.tag): count for count, signal in enumerate(signals, 1)}
    for item in draft_of(rank):
        if isinstance(item, _Await):
            yield Wait(item.peer, counts[item.peer, item.tag])
        elif isinstance(item, _Signal):
            yield item.instruction
        else:
            yield item


def _program(
    algorithm: str,
    n: int,
    rank: int,
    blocks: int,
    chunks: int,
    hops_of: Callable[[int], list[_Hop]],
    first: list[Copy],
    scratch_slots: int = 0,
) -> Program:
    walk: list[Instruction] = []
    if n > 1:
        walk = list(_number_waits(lambda r: _walk(n, r, hops_of(r)), n, rank))
    return Program(
        algorithm=algorithm,
        n=n,
        rank=rank,
        blocks=blocks,
        chunks=chunks,
        scratch_slots=scratch_slots,
        inbox_slots=WINDOW_SLOTS if n > 1 else 0,
        instructions=(*first, *walk),
    )


def _keep(rank: int) -> Callable[[int, int, Operand], Copy]:
    return lambda chunk, j, slot: Copy(chunk, Operand(rank, OUT, chunk), slot)


def _add_to_out(rank: int) -> Callable[[int, int, Operand], Reduce]:
    return lambda chunk, j, slot: Reduce(chunk, Operand(rank, OUT, chunk), slot, Operand(rank, IN, chunk))


def _add_to_scratch(rank: int) -> Callable[[int, int, Operand], Reduce]:
    return lambda chunk, j, slot: Reduce(chunk, Operand(rank, SCRATCH, j), slot, Operand(rank, IN, chunk))


def _from(rank: int, buffer: int) -> Callable[[int, int], Operand]:
    return lambda chunk, j: Operand(rank, buffer, j if buffer == SCRATCH else chunk)


def ring_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """Reduce-scatter round the ring, then all-gather round the ring; in place or not.

    Order (`ring_order`): a chunk of block b is the left fold over ranks b, b+1, …, b-1 (mod n). Partial sums
    travel from scratch to inbox, so they are not rounded on the way.
    """

    def hops_of(r: int) -> list[_Hop]:
        def block(b: int) -> range:
            return chunk_range(b % n, n, chunks)

        reducing = [
            _Hop(
                block(r - s),
                block(r - s - 1),
                _from(r, SCRATCH if s else IN),
                _add_to_scratch(r) if s < n - 2 else _add_to_out(r),
            )
            for s in range(n - 1)
        ]
        gathering = [_Hop(block(r + 1 - s), block(r - s), _from(r, OUT), _keep(r)) for s in range(n - 1)]
        return reducing + gathering

    alone = [Copy(c, Operand(rank, OUT, c), Operand(rank, IN, c)) for c in range(chunks) if n == 1]
    slots = -(-chunks // n) if n > 2 else 0
    return _program("ring_all_reduce", n, rank, 1, chunks, hops_of, alone, slots)


def ring_order(n: int, chunks: int, chunk: int) -> Tree:
    """The order in which `ring_all_reduce` combines ranks on `chunk`."""
    block = next(b for b in range(n) if chunk in chunk_range(b, n, chunks))
    return left_fold((block + i) % n for i in range(n))


def ring_reduce_scatter(n: int, rank: int, chunks: int) -> Program:
    """Reduce-scatter round the ring.

    Order (`ring_scatter_order`): block b is the left fold over ranks b+1, b+2, …, b (mod n).
    """

    def hops_of(r: int) -> list[_Hop]:
        def block(b: int) -> range:
            return chunk_range(b % n, n, chunks)

        return [
            _Hop(
                block(r - 1 - s),
                block(r - 2 - s),
                _from(r, SCRATCH if s else IN),
                _add_to_scratch(r) if s < n - 2 else _add_to_out(r),
            )
            for s in range(n - 1)
        ]

    alone = [Copy(c, Operand(rank, OUT, c), Operand(rank, IN, c)) for c in range(chunks) if n == 1]
    slots = chunks // n if n > 2 else 0
    return _program("ring_reduce_scatter", n, rank, n, chunks, hops_of, alone, slots)


def ring_scatter_order(n: int, chunks: int, chunk: int) -> Tree:
    """The order in which `ring_reduce_scatter` combines ranks on `chunk`."""
    block = chunk // (chunks // n)
    return left_fold((block + 1 + i) % n for i in range(n))


def ring_all_gather(n: int, rank: int, chunks: int) -> Program:
    """All-gather round the ring: block r sets out from rank r."""

    def hops_of(r: int) -> list[_Hop]:
        def block(b: int) -> range:
            return chunk_range(b % n, n, chunks)

        return [_Hop(block(r - s), block(r - s - 1), _from(r, OUT), _keep(r)) for s in range(n - 1)]

    own = [Copy(c, Operand(rank, OUT, c), Operand(rank, IN, c)) for c in chunk_range(rank, n, chunks)]
    return _program("ring_all_gather", n, rank, n, chunks, hops_of, own)
