"""Algorithms for ranks of one host, which put short chunks through a few inbox slots."""

from __future__ import annotations

from zbmd.collectives.algorithms.compose import (
    Await,
    Draft,
    Signal,
    TreeReduction,
    finish_program,
    number_waits,
)
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

LAG = 3
"""Chunks that a rank of `swap_all_reduce` puts before it takes the first."""
SWAP_SLOTS = 2 * LAG + 2
"""Inbox slots of `swap_all_reduce` for each peer."""
ROOT_SLOTS = 4
"""Inbox slots of the root of `shared_reduce` for each peer."""
ROOT_PARTS, PEER_PARTS = 1, 2
"""Shares of more than two ranks: the root takes everybody's chunks out of their slots besides."""

_READ = "read"
"""The tag of the notification that a rank reads others' inputs no more."""


def swap_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """All-reduce by puts alone: no rank reads a peer's array, so arrays may lie anywhere.

    Every rank puts all of its input to every other, and reduces all of it where its own array lies. While a
    rank puts one chunk, its peers reduce those before. Two ranks move as much as halves that are reduced and
    then read would, with one notification a chunk and nothing to wait for at the end; n ranks move n / 2
    times as much.

    No notification says that a slot is free: a rank that puts chunk s has taken s - `LAG` - 1 of every peer,
    which put that one after it took s - 2 * `LAG` - 2 of ours.

    Order: left fold over ranks 0..n-1, the same bits as `direct_all_reduce`. In place or not.
    """
    return finish_program(
        "swap_all_reduce",
        n,
        rank,
        1,
        chunks,
        number_waits(lambda r: _swap_draft(n, r, chunks), rank),
        scratch_slots=1 if n > 2 else 0,
        inbox_slots=SWAP_SLOTS * (n - 1),
    )


def _swap_draft(n: int, rank: int, chunks: int) -> Draft:
    reduction, order = TreeReduction(rank), left_fold(range(n))
    draft: Draft = []
    for step in range(chunks + LAG):
        if step < chunks:
            draft += [
                Signal(Put(step, _swap_slot(n, peer, rank, step), Operand(rank, IN, step)), step)
                for peer in peers_after(rank, n)
            ]
        if (chunk := step - LAG) >= 0:
            places = {peer: _swap_slot(n, rank, peer, chunk) for peer in peers_after(rank, n)}
            places[rank] = Operand(rank, IN, chunk)
            draft += [Await(peer, chunk) for peer in peers_after(rank, n)]
            draft += reduction.emit(order, chunk, places.__getitem__, Operand(rank, OUT, chunk))
    return draft


def _swap_slot(n: int, at: int, of: int, chunk: int) -> Operand:
    """The slot in which rank `at` receives a chunk of rank `of`."""
    return Operand(at, INBOX, ((of - at) % n - 1) * SWAP_SLOTS + chunk % SWAP_SLOTS)


def shared_reduce(n: int, rank: int, chunks: int, root: int) -> Program:
    """Reduce by all ranks: each reduces a share of the chunks, and puts what it has to the root.

    A reduce-scatter and a gather (Rabenseifner, "Optimization of collective reduction operations", ICCS
    2004), chunk by chunk: a root that reads and adds alone has what one core gets of memory, and the others'
    cores stand by. The root takes each chunk out of its slot, and says that it may be filled again, between
    its own chunks. Order: left fold over ranks 0..n-1, as `direct_reduce`.
    """
    return finish_program(
        "shared_reduce",
        n,
        rank,
        1,
        chunks,
        number_waits(lambda r: _shared_draft(n, r, chunks, root), rank),
        scratch_slots=_partial_slots(n) + (rank != root),
        inbox_slots=ROOT_SLOTS * (n - 1),
    )


def _shared_draft(n: int, rank: int, chunks: int, root: int) -> Draft:
    return _of_root(n, root, chunks) if rank == root else _of_peer(n, rank, chunks, root)


def _of_peer(n: int, rank: int, chunks: int, root: int) -> Draft:
    total = Operand(rank, SCRATCH, _partial_slots(n))
    draft: Draft = []
    for i, chunk in enumerate(_share(n, rank, chunks, root)):
        draft += _reduced(n, rank, chunk, total)
        if i >= ROOT_SLOTS:
            draft.append(Await(root, i - ROOT_SLOTS))
        draft.append(Signal(Put(chunk, _root_slot(n, rank, root, i), total), i))
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
                    Finish(chunk, Operand(root, OUT, chunk), _root_slot(n, peer, root, i)),
                ]
            if i + ROOT_SLOTS < len(shares[peer]):
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


def _root_slot(n: int, rank: int, root: int, i: int) -> Operand:
    """The slot in which the root receives the i-th chunk of a rank."""
    return Operand(root, INBOX, ((rank - root) % n - 1) * ROOT_SLOTS + i % ROOT_SLOTS)
