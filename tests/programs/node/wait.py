"""A rank that follows the views until the file `done` is there; argv: rank 1 ends at once instead."""

from __future__ import annotations

import asyncio
import os
import sys

from support.processes.polling import until_done

from zbmd.actors.rank.member import Worker, join


async def follow(worker: Worker) -> None:
    while True:
        print("rank", worker.rank, "of", len(worker.peers) + 1, flush=True)
        await worker.view(after=worker.epoch)  # a rank that joins later waits for the others


def fail(how: str) -> None:
    """End as the test says: `exit` with a code of the script's own, or `raise`."""
    if how == "exit":
        raise SystemExit(2)
    raise ValueError("no")


async def main() -> None:
    async with join() as worker:
        following = asyncio.create_task(follow(worker))
        await until_done()
        following.cancel()


if sys.argv[1:] and os.environ["RANK"] == "1":
    fail(sys.argv[1])
asyncio.run(main())
