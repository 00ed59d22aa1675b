"""A rank that profiles one step of a run in `run`, and then waits until the file `done` is there."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.processes.polling import until_done

from zbmd.actors.rank.member import join
from zbmd.training.profiler.profiler import open_profiler


async def main() -> None:
    async with join():
        with open_profiler(Path("run"), None, sequences=1) as profiler, profiler.recording():
            profiler.begin_step(1)
            profiler.end_step()
            print("joined", flush=True)
            await until_done()


asyncio.run(main())
