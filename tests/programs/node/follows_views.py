"""A rank that prints each view that it enters, until the file `DONE` exists; SIGUSR1 cuts its connections.

The incarnation `MUTE_INCARNATION` never joins.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from support.processes.cut_connections import cut_connections

from zbmd.actors.rank.member import join


def is_over() -> bool:
    return Path(os.environ["DONE"]).exists()


async def main() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, cut_connections)
    async with join(inbox_bytes=1 << 20) as worker:
        while True:
            view = worker.latest
            entered = view.members if worker.epoch == view.epoch else ()
            members = ",".join(f"{m.rank}#{m.incarnation}" for m in entered)
            print(f"{worker.epoch} {os.environ['LOCAL_RANK']} {members}")
            view = await worker.view(after=worker.epoch)
            if is_over():
                break


if os.environ.get("MUTE_INCARNATION") == os.environ["ZBMD_INCARNATION"]:
    signal.pause()
asyncio.run(main())
