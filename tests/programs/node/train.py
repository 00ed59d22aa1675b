"""A rank that prints where it is and its arguments, until the file `done` is there."""

from __future__ import annotations

import asyncio
import os
import sys

from support.processes.polling import until_done

from zbmd.actors.rank.member import join


async def main() -> None:
    async with join() as worker:
        size, where = len(worker.peers) + 1, os.environ["WHERE"]
        print("rank", worker.rank, "of", size, where, *sys.argv[1:], flush=True)
        await until_done()


asyncio.run(main())
