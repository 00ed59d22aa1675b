"""Ranks that reduce with a short time-out; the last one comes late, and says it was in a debugger."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np
from support.processes.polling import until

import zbmd
from zbmd.actors.process.exit import STDERR_FD, TERMINAL_BACK_MARK, TERMINAL_MARK

TIMEOUT_S = 2.0


async def main() -> None:
    async with zbmd.join(inbox_bytes=1 << 20) as worker:
        group = await zbmd.group(worker)
        if worker.rank == group.size - 1:
            os.write(STDERR_FD, TERMINAL_MARK + b"\n")
        await group.barrier()  # the others have begun
        if worker.rank == group.size - 1:
            end_s = time.monotonic() + 1.5 * TIMEOUT_S
            await until(lambda: time.monotonic() > end_s)
            os.write(STDERR_FD, TERMINAL_BACK_MARK + b"\n")
        found = await group.all_reduce(np.ones(4, np.float32), timeout=TIMEOUT_S)
        print("sum", int(found[0]), flush=True)
        await group.close()


asyncio.run(main())
