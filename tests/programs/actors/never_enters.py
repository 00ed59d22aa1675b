"""Ranks that reduce together, of which rank `$HANGS` never comes, in its first incarnation."""

from __future__ import annotations

import asyncio
import os
import threading

import numpy as np

import zbmd


def load_batch() -> None:
    threading.Event().wait()  # STANDS HERE


async def main() -> None:
    async with zbmd.join(inbox_bytes=1 << 20) as worker:
        group = await zbmd.group(worker)
        if (worker.rank, worker.incarnation) == (int(os.environ["HANGS"]), 1):
            load_batch()
        done = False
        while not done:
            try:
                await group.all_reduce(np.ones(4, np.float32))
                done = True
            except (zbmd.PeerLost, zbmd.OperationAborted):  # or a rank that is done has left before
                group = await zbmd.group(worker, after=group.epoch)


asyncio.run(main())
