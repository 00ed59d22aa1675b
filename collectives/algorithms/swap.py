"""All-reduce of few ranks by puts alone: no rank reads a peer's array, so arrays may lie anywhere.

Every rank puts all of its input to every other, and reduces all of it where its own array lies. Chunks pass
through a few slots of the inbox: while a rank puts one, its peers reduce those before. Of two ranks it moves
as much as halves that are reduced and then read would, with one notification a chunk and nothing to wait for
at the end; of more ranks it moves n / 2 times as much.

Nobody says that a slot is free. Who puts chunk s has taken s - `LAG` - 1 of every peer, which put that one
after it took s - 2 * `LAG` - 2 of ours.
"""

from __future__ import annotations

from zbmd.collectives.algorithms.compose import TreeReduction, finish_program
from zbmd.collectives.algorithms.drafts import Await, Draft, Signal, number_waits
from zbmd.collectives.programs.program import IN, INBOX, OUT, Operand, Program, Put, peers_after
from zbmd.collectives.programs.spec import left_fold

LAG = 3
"""How many chunks a rank puts before it takes the first."""
WINDOW_SLOTS = 2 * LAG + 2
"""Inbox slots for each peer."""


def swap_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """Every rank puts its input to all, and reduces all inputs.

    Order: left fold over ranks 0..n-1, the same bits as `direct_all_reduce`. In place or not.
    """
    return finish_program(
        "swap_all_reduce",
        n,
        rank,
        1,
        chunks,
        number_waits(lambda r: _draft(n, r, chunks), rank),
        scratch_slots=1 if n > 2 else 0,
        inbox_slots=WINDOW_SLOTS * (n - 1),
    )


def _draft(n: int, rank: int, chunks: int) -> Draft:
    reduction, order = TreeReduction(rank), left_fold(range(n))
    draft: Draft = []
    for step in range(chunks + LAG):
        if step < chunks:
            draft += [
                Signal(Put(step, _slot(n, peer, rank, step), Operand(rank, IN, step)), step)
                for peer in peers_after(rank, n)
            ]
        if (chunk := step - LAG) >= 0:
            places = {peer: _slot(n, rank, peer, chunk) for peer in peers_after(rank, n)}
            places[rank] = Operand(rank, IN, chunk)
            draft += [Await(peer, chunk) for peer in peers_after(rank, n)]
            draft += reduction.emit(order, chunk, places.__getitem__, Operand(rank, OUT, chunk))
    return draft


def _slot(n: int, at: int, of: int, chunk: int) -> Operand:
    """Where rank `at` gets a chunk of rank `of`."""
    return Operand(at, INBOX, ((of - at) % n - 1) * WINDOW_SLOTS + chunk % WINDOW_SLOTS)
