"""A rank dies during an operation, and the group continues with its replacement.

Run it: zbmd-node run -n 3 examples/peer_death.py
"""

import os
import signal

import numpy as np

import zbmd

ROUNDS = 5


async def main() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        done = 0
        while done < ROUNDS:
            try:
                rounds = await group.all_reduce(
                    np.array([done, worker.rank]), op="min"
                )  # the rank that is furthest behind
                done = int(rounds[0])
                if worker.rank == 1 and worker.incarnation == 1 and done == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                await group.all_reduce(np.ones(1000))
                done += 1
            except (zbmd.PeerLost, zbmd.OperationAborted) as error:
                print(f"rank {worker.rank}: {error}; waiting for its replacement")
                await group.close()
                group = await zbmd.group(worker, after=group.epoch)
                done = 0 if worker.incarnation > 1 else done
        print(f"rank {worker.rank} (incarnation {worker.incarnation}) finished {done} rounds in {group!r}")
        await group.close()


zbmd.run(main())
