"""Algorithms for ranks of one host, which put short chunks through a few inbox slots."""

from __future__ import annotations

from collections.abc import Callable

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
    chunk_range,
    peers_after,
)
from zbmd.collectives.programs.spec import left_fold

LAG = 3
"""Steps in which a rank puts chunks before it takes the first ones."""
SWAP_SLOTS = 2 * LAG + 2
"""Inbox slots for each peer where all ranks put at the same pace."""
PACED_SLOTS = 8
"""Inbox slots for a peer that is notified when they are free."""
ROOT_SLOTS = 4
"""Inbox slots of the root of `shared_reduce` for each peer."""
ROOT_PARTS, PEER_PARTS = 1, 2
"""Shares of more than two ranks: the root takes everybody's chunks out of their slots besides."""

_READ = "read"
"""The tag of the notification that a rank reads others' inputs no more."""
_INPUTS, _RESULTS = range(2)
"""The slots of `shared_all_reduce`, and the tags of what is put there."""


def swap_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """All-reduce by puts alone: no rank reads a peer's array, so arrays may lie anywhere.

    Every rank puts all of its input to every other, and reduces all of it where its own array lies. While a
    rank puts one chunk, its peers reduce those before. Two ranks move as much as halves that are reduced and
    then read would, with one notification a chunk and nothing to wait for at the end; n ranks move n / 2
    times as much.

    Order: left fold over ranks 0..n-1, the same bits as `direct_all_reduce`. In place or not.
    """
    return _swapped("swap_all_reduce", n, rank, 1, chunks, _swap_all_reduce, scratch=_partial_slots(n))


def swap_reduce_scatter(n: int, rank: int, chunks: int) -> Program:
    """Reduce-scatter by puts alone: every rank puts to each peer its block. Else as `swap_all_reduce`."""
    return _swapped(
        "swap_reduce_scatter", n, rank, n, chunks, _swap_reduce_scatter, scratch=_partial_slots(n)
    )


def swap_all_gather(n: int, rank: int, chunks: int) -> Program:
    """All-gather by puts alone, while each rank copies what it was put to its place."""
    return _swapped("swap_all_gather", n, rank, n, chunks, _swap_all_gather)


def swap_all_to_all(n: int, rank: int, chunks: int) -> Program:
    """All-to-all by puts alone. Block s*n + d of the full vector is what rank s sends to rank d."""
    return _swapped("swap_all_to_all", n, rank, n * n, chunks, _swap_all_to_all)


def shared_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """All-reduce of slices, one a rank, by puts alone: of inputs to the rank that reduces, and of results.

    More than two ranks move less than in `swap_all_reduce`, and wait more often. Order: left fold over ranks
    0..n-1, the same bits as `direct_all_reduce`. In place or not.
    """
    return _swapped(
        "shared_all_reduce", n, rank, 1, chunks, _shared_all_reduce, scratch=_partial_slots(n), kinds=2
    )


def _swapped(
    algorithm: str,
    n: int,
    rank: int,
    blocks: int,
    chunks: int,
    draft: Callable[[int, int, int], Draft],
    *,
    scratch: int = 0,
    kinds: int = 1,
) -> Program:
    """Make the program of a draft of (n, rank, chunks), with slots for chunks of so many kinds.

    No notification says that a slot is free: a rank that puts chunk s has taken s - `LAG` - 1 of every peer,
    which put that one after it took s - 2 * `LAG` - 2 of ours.
    """
    return finish_program(
        algorithm,
        n,
        rank,
        blocks,
        chunks,
        number_waits(lambda r: draft(n, r, chunks), rank),
        scratch_slots=scratch,
        inbox_slots=kinds * SWAP_SLOTS * (n - 1),
    )


def _swap_all_reduce(n: int, rank: int, chunks: int) -> Draft:
    def take(step: int) -> Draft:
        return _reduced_slots(n, rank, step, step)

    return _exchange(n, rank, chunks, lambda peer, step: step, take)


def _swap_reduce_scatter(n: int, rank: int, chunks: int) -> Draft:
    per = chunks // n

    def take(step: int) -> Draft:
        return _reduced_slots(n, rank, rank * per + step, step)

    return _exchange(n, rank, per, lambda peer, step: peer * per + step, take)


def _swap_all_gather(n: int, rank: int, chunks: int) -> Draft:
    per = chunks // n

    def take(step: int) -> Draft:
        return _own_copy(rank, rank * per + step) + _copies_of_slots(
            n, rank, lambda peer: peer * per + step, step
        )

    return _exchange(n, rank, per, lambda peer, step: rank * per + step, take)


def _swap_all_to_all(n: int, rank: int, chunks: int) -> Draft:
    per = chunks // n**2

    def take(step: int) -> Draft:
        return _own_copy(rank, (rank * n + rank) * per + step) + _copies_of_slots(
            n, rank, lambda peer: (peer * n + rank) * per + step, step
        )

    return _exchange(n, rank, per, lambda peer, step: (rank * n + peer) * per + step, take)


def _shared_all_reduce(n: int, rank: int, chunks: int) -> Draft:
    slices = [chunk_range(r, n, chunks) for r in range(n)]
    own, steps = slices[rank], max(map(len, slices))
    draft: Draft = []
    for step in range(steps + 2 * LAG):
        for peer in peers_after(rank, n):
            if step < len(slices[peer]):
                slot = _swap_slot(n, peer, rank, step)
                chunk = slices[peer][step]
                draft.append(Signal(Put(chunk, slot, Operand(rank, IN, chunk)), (_INPUTS, step)))
        if 0 <= (done := step - LAG) < len(own):
            draft += [Await(peer, (_INPUTS, done)) for peer in peers_after(rank, n)]
            draft += _reduced_slots(n, rank, own[done], done)
            result = Operand(rank, OUT, own[done])
            draft += [
                Signal(Put(own[done], _swap_slot(n, peer, rank, done, _RESULTS), result), (_RESULTS, done))
                for peer in peers_after(rank, n)
            ]
        if (over := step - 2 * LAG) >= 0:
            for peer in peers_after(rank, n):
                if over < len(slices[peer]):
                    chunk, slot = slices[peer][over], _swap_slot(n, rank, peer, over, _RESULTS)
                    draft += [Await(peer, (_RESULTS, over)), Copy(chunk, Operand(rank, OUT, chunk), slot)]
    return draft


def _exchange(
    n: int, rank: int, steps: int, chunk_of: Callable[[int, int], int], take: Callable[[int], Draft]
) -> Draft:
    """Make the draft in which a rank puts to each peer a chunk a step, `chunk_of` (peer, step), and takes."""
    draft: Draft = []
    for step in range(steps + LAG):
        if step < steps:
            for peer in peers_after(rank, n):
                chunk = chunk_of(peer, step)
                put = Put(chunk, _swap_slot(n, peer, rank, step), Operand(rank, IN, chunk))
                draft.append(Signal(put, step))
        if (done := step - LAG) >= 0:
            draft += [Await(peer, done) for peer in peers_after(rank, n)]
            draft += take(done)
    return draft


def _reduced_slots(n: int, rank: int, chunk: int, step: int) -> Draft:
    """Reduce a chunk of ours with those that the peers put in a step."""
    places = {peer: _swap_slot(n, rank, peer, step) for peer in peers_after(rank, n)}
    places[rank] = Operand(rank, IN, chunk)
    result = Operand(rank, OUT, chunk)
    return [*TreeReduction(rank).emit(left_fold(range(n)), chunk, places.__getitem__, result)]


def _copies_of_slots(n: int, rank: int, chunk_of: Callable[[int], int], step: int) -> Draft:
    return [
        Copy(chunk_of(peer), Operand(rank, OUT, chunk_of(peer)), _swap_slot(n, rank, peer, step))
        for peer in peers_after(rank, n)
    ]


def _own_copy(rank: int, chunk: int) -> Draft:
    return [Copy(chunk, Operand(rank, OUT, chunk), Operand(rank, IN, chunk))]


def _swap_slot(n: int, at: int, of: int, step: int, kind: int = 0) -> Operand:
    """The slot in which rank `at` receives what rank `of` puts in a step."""
    return Operand(at, INBOX, (kind * (n - 1) + (of - at) % n - 1) * SWAP_SLOTS + step % SWAP_SLOTS)


def shared_broadcast(n: int, rank: int, chunks: int, root: int) -> Program:
    """Broadcast by all ranks: the root puts chunk after chunk, and each rank takes them out of its slots.

    A rank that reads the root's array alone has what one core gets of memory, while the root's core stands
    by; and of another process's ordinary memory the kernel copies page by page, at a third of the speed.
    """

    def draft(r: int) -> Draft:
        return _from_root(n, r, root, chunks, lambda peer, step: step, OUT)

    return _rooted("shared_broadcast", n, rank, 1, chunks, draft, slots=PACED_SLOTS)


def shared_scatter(n: int, rank: int, chunks: int, root: int) -> Program:
    """Scatter by all ranks, as `shared_broadcast`."""
    per = chunks // n

    def draft(r: int) -> Draft:
        own = [copy for step in range(per if r == root else 0) for copy in _own_copy(r, r * per + step)]
        return own + _from_root(n, r, root, per, lambda peer, step: peer * per + step, IN)

    return _rooted("shared_scatter", n, rank, n, chunks, draft, slots=PACED_SLOTS)


def shared_gather(n: int, rank: int, chunks: int, root: int) -> Program:
    """Gather by all ranks: each puts its block to the root, which takes chunks of all in turn."""
    per = chunks // n

    def draft(r: int) -> Draft:
        return _at_root(n, root, per) if r == root else _to_root(n, r, root, per)

    return _rooted("shared_gather", n, rank, n, chunks, draft, slots=PACED_SLOTS * (n - 1))


def _rooted(
    algorithm: str,
    n: int,
    rank: int,
    blocks: int,
    chunks: int,
    draft: Callable[[int], Draft],
    *,
    slots: int,
) -> Program:
    instructions = number_waits(draft, rank)
    return finish_program(algorithm, n, rank, blocks, chunks, instructions, inbox_slots=slots)


def _from_root(
    n: int, rank: int, root: int, steps: int, chunk_of: Callable[[int, int], int], buffer: int
) -> Draft:
    """Make the draft in which the root puts to every peer a chunk of its `buffer` a step, `chunk_of` (peer,
    step), and each peer says when a slot is free.
    """
    draft: Draft = []
    for step in range(steps):
        for peer in peers_after(root, n) if rank == root else ():
            if step >= PACED_SLOTS:
                draft.append(Await(peer, step - PACED_SLOTS))
            chunk, slot = chunk_of(peer, step), Operand(peer, INBOX, step % PACED_SLOTS)
            draft.append(Signal(Put(chunk, slot, Operand(root, buffer, chunk)), step))
        if rank != root:
            chunk, slot = chunk_of(rank, step), Operand(rank, INBOX, step % PACED_SLOTS)
            draft += [Await(root, step), Copy(chunk, Operand(rank, OUT, chunk), slot)]
            if step + PACED_SLOTS < steps:
                draft.append(Signal(Notify(root), step))
    return draft


def _to_root(n: int, rank: int, root: int, per: int) -> Draft:
    draft: Draft = []
    for step in range(per):
        if step >= PACED_SLOTS:
            draft.append(Await(root, step - PACED_SLOTS))
        chunk = rank * per + step
        draft.append(Signal(Put(chunk, _paced_slot(n, rank, root, step), Operand(rank, IN, chunk)), step))
    return draft


def _at_root(n: int, root: int, per: int) -> Draft:
    draft: Draft = []
    for step in range(per):
        draft += _own_copy(root, root * per + step)
        for peer in peers_after(root, n):
            chunk = peer * per + step
            slot = _paced_slot(n, peer, root, step)
            draft += [Await(peer, step), Copy(chunk, Operand(root, OUT, chunk), slot)]
            if step + PACED_SLOTS < per:
                draft.append(Signal(Notify(peer), step))
    return draft


def _paced_slot(n: int, rank: int, root: int, step: int) -> Operand:
    """The slot in which the root receives what a rank puts in a step."""
    return Operand(root, INBOX, ((rank - root) % n - 1) * PACED_SLOTS + step % PACED_SLOTS)


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
