"""Algorithms of about log2 n rounds: halving-doubling all-reduce, Bruck's all-to-all, the barrier."""

from __future__ import annotations

from functools import cache

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
    Wait,
    chunk_range,
)
from zbmd.collectives.programs.spec import Tree

ROUND_SLOTS = 2
"""Inbox slots of a round. Both workers put one and take one in turn, so neither is more than one ahead."""


def workers_of(n: int) -> tuple[int, int]:
    """(p, r): the workers, a power of two, and how many ranks are left over."""
    p = 1 << (n.bit_length() - 1)
    return p, n - p


def halving_doubling_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """Recursive halving, then recursive doubling, for any number of ranks. In place or not.

    (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
    19(1), 2005; for what is no power of two, Rabenseifner and Träff, EuroPVM/MPI 2004.) Let p be the largest
    power of two with p + r = n. Each of the first r odd ranks reduces its own input and that of the even rank
    before it; then p *workers* halve: in log2 p rounds, a worker gives half of what it still holds to the
    worker whose number differs in one bit, and reduces the other half. In log2 p more rounds they read each
    other's results, doubling what they have; the even ranks read all of it from their odd neighbours at the
    end. Order (`halving_order`): in every round the lower worker's partial sum comes first.
    """
    p, left_over = workers_of(n)
    rounds = p.bit_length() - 1
    if n == 1:
        return finish_program("halving_doubling_all_reduce", n, rank, 1, chunks, copy_if_alone(n, chunks))
    follows = rank < 2 * left_over and rank % 2 == 0
    return finish_program(
        "halving_doubling_all_reduce",
        n,
        rank,
        1,
        chunks,
        number_waits(lambda r: _Walk(n, r, chunks).draft(), rank),
        scratch_slots=0 if follows else chunks,
        inbox_slots=0 if follows else ROUND_SLOTS * rounds,
    )


def halving_order(n: int, chunks: int, chunk: int) -> Tree:
    """The order in which `halving_doubling_all_reduce` combines ranks on `chunk`."""
    p, left_over = workers_of(n)
    block = next(b for b in range(p) if chunk in chunk_range(b, p, chunks))

    def held(worker: int, distance: int) -> Tree:
        """The part of the sum that a worker holds after the round over `distance`."""
        if distance == p:
            return (2 * worker, 2 * worker + 1) if worker < left_over else worker + left_over
        low = worker & ~distance
        return (held(low, 2 * distance), held(low | distance, 2 * distance))

    return held(block, 1)


class _Walk:
    """The steps of one rank."""

    def __init__(self, n: int, rank: int, chunks: int) -> None:
        self._rank, self._chunks = rank, chunks
        self._p, self._left_over = workers_of(n)
        self._paired = rank < 2 * self._left_over
        self._worker = rank // 2 if self._paired else rank - self._left_over

    def draft(self) -> Draft:
        if self._paired and self._rank % 2 == 0:
            return self._follow()
        return [*self._fold_neighbour(), *self._halve(), *self._double(), *self._part()]

    def _rank_of(self, worker: int) -> int:
        return 2 * worker + 1 if worker < self._left_over else worker + self._left_over

    def _held(self, worker: int, distance: int) -> range:
        """The chunks that a worker is responsible for between rounds: blocks that share its high bits."""
        first = worker & ~(distance - 1)
        begin = chunk_range(first, self._p, self._chunks)
        end = chunk_range(first + distance - 1, self._p, self._chunks)
        return range(begin.start, end.stop)

    def _follow(self) -> Draft:
        """The even rank of a pair: its input is read, and it reads the result."""
        odd = self._rank + 1
        return [
            Await(odd, "result"),
            *(Copy(c, Operand(self._rank, OUT, c), Operand(odd, OUT, c)) for c in range(self._chunks)),
            Signal(Notify(odd), "read"),
        ]

    def _fold_neighbour(self) -> Draft:
        if not self._paired:
            return []
        rank, even = self._rank, self._rank - 1
        return [
            Reduce(c, Operand(rank, SCRATCH, c), Operand(even, IN, c), Operand(rank, IN, c))
            for c in range(self._chunks)
        ]

    def _partial(self, chunk: int, distance: int) -> Operand:
        """The place of this rank's sum of a chunk before the round over `distance`."""
        first = 2 * distance == self._p and not self._paired
        return Operand(self._rank, IN if first else SCRATCH, chunk)

    def _halve(self) -> Draft:
        draft: Draft = []
        distance, first_slot = self._p // 2, 0
        while distance:
            other = self._worker ^ distance
            peer = self._rank_of(other)
            give, keep = self._held(other, distance), self._held(self._worker, distance)
            for j in range(max(len(give), len(keep))):
                slot = first_slot + j % ROUND_SLOTS
                if j < len(give):
                    source = self._partial(give[j], distance)
                    put = Put(give[j], Operand(peer, INBOX, slot), source)
                    draft.append(Signal(put, ("half", distance, j)))
                if j < len(keep):
                    draft.append(Await(peer, ("half", distance, j)))
                    draft.append(self._add(keep[j], distance, Operand(self._rank, INBOX, slot), other))
            distance, first_slot = distance // 2, first_slot + ROUND_SLOTS
        return draft

    def _add(self, chunk: int, distance: int, came: Operand, other: int) -> Reduce:
        mine = self._partial(chunk, distance)
        a, b = (came, mine) if other < self._worker else (mine, came)
        return Reduce(chunk, Operand(self._rank, OUT if distance == 1 else SCRATCH, chunk), a, b)

    def _double(self) -> Draft:
        draft: Draft = []
        distance = 1
        while distance < self._p:
            other = self._worker ^ distance
            peer = self._rank_of(other)
            draft += [Signal(Notify(peer), ("have", distance)), Await(peer, ("have", distance))]
            draft += [
                Copy(c, Operand(self._rank, OUT, c), Operand(peer, OUT, c))
                for c in self._held(other, distance)
            ]
            draft.append(Signal(Notify(peer), ("read", distance)))
            distance *= 2
        return draft

    def _part(self) -> Draft:
        """Hand on the result to the even rank, and end when nobody reads here any more."""
        draft: Draft = [Signal(Notify(self._rank - 1), "result")] if self._paired else []
        distance = 1
        while distance < self._p:
            draft.append(Await(self._rank_of(self._worker ^ distance), ("read", distance)))
            distance *= 2
        if self._paired:
            draft.append(Await(self._rank - 1, "read"))
        return draft


def bruck_all_to_all(n: int, rank: int, chunks: int) -> Program:
    """All-to-all in ceil(log2 n) rounds, for many ranks and small blocks.

    (Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
    message-passing systems", IEEE TPDS 8(11), 1997.) A block from rank s to rank d has j = (d - s) mod n
    ranks to go. In round k every block whose j has bit k set is moved on by 2^k ranks. A block on its way
    stays in the inbox slot that it was put into; each has a slot of its own.
    """
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
            *number_waits(lambda r: _bruck_draft(n, r, chunks), rank),
        ],
        inbox_slots=slots,
    )


def _bruck_draft(n: int, rank: int, chunks: int) -> Draft:
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
                    at = Operand(rank, INBOX, _bruck_slot(j, k - 1, i, per_block))
                put = Put(chunk, Operand(ahead, INBOX, _bruck_slot(j, k, i, per_block)), at)
                draft.append(Signal(put, (k, j, i)))
        for j in moving:
            for i in range(per_block):
                draft.append(Await(behind, (k, j, i)))
                if j >> (k + 1) == 0:
                    chunk = ((rank - j) % n * n + rank) * per_block + i
                    slot = Operand(rank, INBOX, _bruck_slot(j, k, i, per_block))
                    draft.append(Copy(chunk, Operand(rank, OUT, chunk), slot))
    return draft


def _bruck_slot(j: int, k: int, i: int, per_block: int) -> int:
    """The slot of a block with `j` to go that has been moved in round `k`, or last in a round before it."""
    moved = (j & ((1 << (k + 1)) - 1)).bit_count() - 1
    return (_hops_below(j) + moved) * per_block + i


@cache
def _hops_below(j: int) -> int:
    """Moves of all blocks with less than `j` to go."""
    return sum(below.bit_count() for below in range(j))


def dissemination_barrier(n: int, rank: int) -> Program:
    """ceil(log2 n) rounds; in round k notify rank + 2^k, then wait for rank - 2^k (mod n).

    (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J. Parallel
    Programming 17(1), 1988.) No peer is met twice, so every count is 1.
    """
    instructions: list[Instruction] = []
    for k in range((n - 1).bit_length()):
        instructions += [Notify((rank + (1 << k)) % n), Wait((rank - (1 << k)) % n, 1)]
    return finish_program("dissemination_barrier", n, rank, 1, 1, instructions)
