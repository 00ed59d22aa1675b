"""Reduce by all ranks of a host: each reduces a share of the chunks, and puts what it has to the root.

A reduce-scatter and a gather (Rabenseifner, "Optimization of collective reduction operations", ICCS 2004),
chunk by chunk: a root that reads and adds alone has what one core gets of memory, and the others' cores stand
by. The root takes each chunk out of its slot, and says that it may be filled again, between its own chunks.
"""

from __future__ import annotations

from zbmd.collectives.algorithms.compose import TreeReduction, finish_program
from zbmd.collectives.algorithms.drafts import Await, Draft, Signal, number_waits
from zbmd.collectives.programs.program import (
    IN,
    INBOX,
    OUT,
    SCRATCH,
    Copy,
    Finish,
    Notify,
    Operand,
    Program,
    Put,
    Reduce,
    peers_after,
)
from zbmd.collectives.programs.spec import left_fold

WINDOW_SLOTS = 4
"""Inbox slots of the root for each peer."""
ROOT_PARTS, PEER_PARTS = 1, 2
"""Shares of more than two ranks: the root takes everybody's chunks out of their slots besides."""

_READ = "read"
"""The tag of the notification that a rank reads others' inputs no more."""


def shared_reduce(n: int, rank: int, chunks: int, root: int) -> Program:
    """Each rank reduces its share from all inputs. Order: left fold over ranks 0..n-1, as `direct_reduce`."""
    return finish_program(
        "shared_reduce",
        n,
        rank,
        1,
        chunks,
        number_waits(lambda r: _draft(n, r, chunks, root), rank),
        scratch_slots=_partial_slots(n) + (rank != root),
        inbox_slots=WINDOW_SLOTS * (n - 1),
    )


def _draft(n: int, rank: int, chunks: int, root: int) -> Draft:
    return _of_root(n, root, chunks) if rank == root else _of_peer(n, rank, chunks, root)


def _of_peer(n: int, rank: int, chunks: int, root: int) -> Draft:
    total = Operand(rank, SCRATCH, _partial_slots(n))
    draft: Draft = []
    for i, chunk in enumerate(_share(n, rank, chunks, root)):
        draft += _reduced(n, rank, chunk, total)
        if i >= WINDOW_SLOTS:
            draft.append(Await(root, i - WINDOW_SLOTS))
        draft.append(Signal(Put(chunk, _slot(n, rank, root, i), total), i))
    # The root knows by the last put.
    draft += [Signal(Notify(peer), _READ) for peer in peers_after(rank, n) if peer != root]
    draft += [Await(peer, _READ) for peer in peers_after(rank, n)]
    return draft


def _of_root(n: int, root: int, chunks: int) -> Draft:
    shares = {rank: _share(n, rank, chunks, root) for rank in range(n)}
    own: range = shares[root]
    draft: Draft = []
    for i in range(max(map(len, shares.values()))):
        if i < len(own):
            draft += _reduced(n, root, own[i], Operand(root, OUT, own[i]))
        if i == max(len(own) - 1, 0):
            draft += [Signal(Notify(peer), _READ) for peer in peers_after(root, n)]
        for peer in peers_after(root, n):
            if i < len(shares[peer]):
                chunk = shares[peer][i]
                draft += [
                    Await(peer, i),
                    Finish(chunk, Operand(root, OUT, chunk), _slot(n, peer, root, i)),
                ]
            if i + WINDOW_SLOTS < len(shares[peer]):
                draft.append(Signal(Notify(peer), i))
    return draft


def _share(n: int, rank: int, chunks: int, root: int) -> range:
    """The chunks that a rank reduces."""
    parts = [ROOT_PARTS if n > 2 and r == root else PEER_PARTS for r in range(n)]
    before, whole = sum(parts[:rank]), sum(parts)
    return range(before * chunks // whole, (before + parts[rank]) * chunks // whole)


def _reduced(n: int, rank: int, chunk: int, dst: Operand) -> list[Reduce | Copy]:
    places = [Operand(label, IN, chunk) for label in range(n)]
    return TreeReduction(rank).emit(left_fold(range(n)), chunk, places.__getitem__, dst)


def _partial_slots(n: int) -> int:
    """Slots of scratch for the partial sums of a left fold."""
    return 1 if n > 2 else 0


def _slot(n: int, rank: int, root: int, i: int) -> Operand:
    """Where the root gets the i-th chunk of a rank."""
    return Operand(root, INBOX, ((rank - root) % n - 1) * WINDOW_SLOTS + i % WINDOW_SLOTS)
