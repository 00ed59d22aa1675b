"""Rank 0 forks children that unwind its frames, take its signals, use its group or join; then all go on."""

import asyncio
import os
import signal
import subprocess
import sys

import numpy as np

import zbmd


def report(what: str, pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    print(what, os.waitstatus_to_exitcode(status), flush=True)


async def main() -> None:
    loop = asyncio.get_running_loop()
    asked: list[str] = []
    loop.add_signal_handler(signal.SIGTERM, lambda: asked.append("SIGTERM"))
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        await group.all_reduce(np.ones(4))
        for what in ("exits", "raises", "returns", "calls") if worker.rank == 0 else ():
            pid = os.fork()
            if pid == 0:
                if what == "exits":
                    sys.exit(3)
                if what == "raises":
                    raise ValueError("of a child")
                if what == "calls":
                    try:
                        group.blocking.all_reduce(np.ones(4))
                    except zbmd.ZbmdError as error:
                        sys.exit(f"refused: {error}")
                return
            report(what, pid)
        if worker.rank == 0:
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(write, b"x")
                signal.pause()
            os.read(read, 1)
            os.kill(pid, signal.SIGTERM)
            report("is ended", pid)
            joins = [sys.executable, "-c", "import zbmd\nwith zbmd.init(): pass"]
            child = await asyncio.create_subprocess_exec(*joins, stderr=subprocess.PIPE)
            _, errors = await child.communicate()
            print("joins", child.returncode, b"a rank is one process" in errors, flush=True)
        total = await group.all_reduce(np.ones(4))
        print(f"rank {worker.rank} has {total[0]:g} and was asked {asked}", flush=True)
        await group.close()


asyncio.run(main())
pid = os.fork()
if pid == 0:
    sys.exit(4)
report("at the end", pid)
