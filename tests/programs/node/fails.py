"""Ranks that reduce together until rank 1 raises or hangs (`$1`), or ranks that wait until one is killed."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import numpy as np

import zbmd


def load(how: str) -> None:
    if how == "raises":
        raise ValueError("sample 4711 has 3 fields, expected 4")  # FAILS HERE
    threading.Event().wait()  # HANGS HERE


async def main(how: str) -> None:
    print("pid", os.getpid(), flush=True)
    async with zbmd.join(inbox_bytes=1 << 20) as worker:
        if how == "waits":
            await asyncio.Event().wait()
        group = await zbmd.group(worker)
        while True:  # until rank 1 fails
            await group.all_reduce(np.ones(4, np.float32))
            if worker.rank == 1:
                load(how)


asyncio.run(main(sys.argv[1]))
