"""A rank that joins and ends as its argument names: `ends.py BEHAVIOUR`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable

from zbmd.actors.rank.member import Worker, join
from zbmd.transport.capture.log import LogRecorder


async def well(worker: Worker) -> None:
    pass


async def raises(worker: Worker) -> None:
    if worker.rank == 1:
        raise ValueError("a bug")
    await asyncio.Event().wait()


async def dies_once(worker: Worker) -> None:
    if worker.rank == 1 and worker.incarnation == 1:
        assert isinstance(worker.recorder, LogRecorder) and worker.recorder.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if worker.epoch == 1:
        await worker.view(after=1)


async def main(behaviour: Callable[[Worker], Awaitable[None]]) -> None:
    async with join() as worker:
        await behaviour(worker)


asyncio.run(main(globals()[sys.argv[1]]))
