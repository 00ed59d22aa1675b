"""A rank that prints its rank and the number of ranks at each view, until the file `done` is there."""

from __future__ import annotations

from support.processes.polling import is_done

import zbmd


async def main() -> None:
    async with zbmd.join() as worker:
        while not is_done():
            print("rank", worker.rank, "of", len(worker.peers) + 1, flush=True)
            await worker.view(after=worker.epoch)


zbmd.run(main())
