"""A rank that saves at SIGTERM; argv: `slowly`, `together` with the other ranks, or `never` at all."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import numpy as np
from support.processes.polling import until

import zbmd


async def save(worker: zbmd.Worker, group: zbmd.Group | None) -> None:
    if group is not None:  # none leaves before all have saved
        await group.all_reduce(np.ones(1))
        await group.barrier()
    else:  # twice as long as the ranks of a run that failed have
        end_ns = time.monotonic_ns() + 2 * worker.deadlines.stop_grace_ns
        await until(lambda: time.monotonic_ns() > end_ns)
    print("saved", flush=True)


async def main(how: str) -> None:
    # Alone, a rank saves whether or not the others have come: the first view may be of one node.
    async with zbmd.join(enter=how == "together") as worker:
        asked = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
        group = await zbmd.group(worker) if how == "together" else None
        print("ready", flush=True)
        await asked.wait()
        print("asked", flush=True)
        if how == "never":
            await asyncio.Event().wait()
        await save(worker, group)


asyncio.run(main(sys.argv[1]))
