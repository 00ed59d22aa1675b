"""Do something that all members of a view do together, and give it up if one of them is lost meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from zbmd.actors.rank.member import Worker
from zbmd.actors.view import View
from zbmd.transport.shm.death_notice import DeathNotice

ResultT = TypeVar("ResultT")


async def unless_lost(worker: Worker, view: View, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """Return the result of `work`; None, once it is cancelled, if a member of the view is lost meanwhile.

    A rank gives up whichever member it loses, not only one that its own part concerns: the others there may
    have lost one elsewhere, and will not come. A late notice of a member's predecessor does not count: nobody
    else would give up then, and no other view come.
    """
    working = asyncio.ensure_future(work)
    members = frozenset((member.rank, member.incarnation) for member in view.members)

    def lost(rank: int, incarnation: int, _notice: DeathNotice) -> None:
        if (rank, incarnation) in members:
            working.cancel()

    undo = worker.on_peer_lost(lost)
    try:
        if worker.segment.lost_mask() & sum(1 << member.rank for member in view.members):
            working.cancel()  # it was lost before we listened
        await asyncio.wait([working])
    finally:
        undo()
        working.cancel()
        await asyncio.wait([working])
    return None if working.cancelled() else working.result()
