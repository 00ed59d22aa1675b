"""Ranks of which one is killed; its replacement takes a while before it joins. Argument: the seconds."""

from __future__ import annotations

import os
import signal
import sys
import threading

import zbmd

if os.environ["ZBMD_INCARNATION"] == "2" and os.environ["RANK"] == "1":
    threading.Event().wait(float(sys.argv[1]))  # an import, as it were


async def main() -> None:
    async with zbmd.join() as worker:
        if worker.incarnation == 1 and worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        await worker.view(after=1)
        print("incarnation", worker.incarnation, flush=True)


zbmd.run(main())
