"""A rank that joins and does what its argument names: `host_jobs.py BEHAVIOUR`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

from support.processes.cut_connections import cut_connections

from zbmd.actors.rank.member import Worker, join


async def reports_once(worker: Worker) -> None:
    print("hello from", worker.rank)
    worker.report({"step": worker.rank, "loss": 0.5, "path": ["a", {"b": None}]})


async def loses_its_links(worker: Worker) -> None:
    while worker.epoch < 3:
        if worker.rank == 0:
            cut_connections()
        view = await worker.view(after=worker.epoch)
        print("entered", view.epoch, [member.incarnation for member in view.members])


async def reports_who_was_lost(worker: Worker) -> None:
    worker.report({"ready": worker.incarnation == 1})
    lost = asyncio.get_running_loop().create_future()
    worker.on_peer_lost(lambda *what: lost.set_result(what))
    if worker.epoch == 1:
        rank, incarnation, notice = await lost
        await worker.view(after=1)
        what = {"lost": [rank, incarnation, notice.clean], "at_ns": notice.at_ns, "epoch": worker.epoch}
        worker.report({**what, "peers": sorted(worker.peers)})


async def enters_a_second_view(worker: Worker) -> None:
    worker.report({"epoch": worker.epoch})
    if worker.epoch == 1:
        await worker.view(after=1)


async def prints_its_second_view(worker: Worker) -> None:
    worker.report({})
    view = await worker.view(after=1)
    print(view.ranks, view.lost, sorted(worker.peers))


async def raises_on_rank_1(worker: Worker) -> None:
    if worker.rank == 1:
        raise ValueError("what went wrong")
    await worker.view(after=worker.epoch)


async def waits_for_a_second_view(worker: Worker) -> None:
    await worker.view(after=1)


async def prints_its_peers(worker: Worker) -> None:
    print(sorted(worker.peers))


async def main(behaviour: Callable[[Worker], Awaitable[None]]) -> None:
    async with join() as worker:
        await behaviour(worker)


asyncio.run(main(globals()[sys.argv[1]]))
