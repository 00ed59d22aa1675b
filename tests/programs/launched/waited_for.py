"""Ranks whose first one stops in a debugger while the others wait. Argument: "timeouts", or nothing."""

from __future__ import annotations

import sys

import numpy as np

import zbmd


async def main() -> None:
    timeout = 5.0 if sys.argv[1:] == ["timeouts"] else None
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        await group.barrier()
        if worker.rank == 0:
            breakpoint()
        if timeout is not None and worker.rank == 2:
            await group.recv(0, timeout=timeout)
        elif timeout is not None and worker.rank == 0:
            await group.send(np.ones(1), 2)
        await group.all_reduce(np.ones(1), timeout=timeout)
        print("rank", worker.rank, "went on", flush=True)
        await group.close()


zbmd.run(main())
