"""A rank of a blocking script: rank 1 kills itself once, the others go on with its replacement."""

from __future__ import annotations

import os
import signal

import numpy as np

import zbmd

ROUNDS = 4

with zbmd.init() as worker:
    group = worker.group()
    done, total = 0, np.zeros(5)
    while done < ROUNDS:
        try:
            done = int(group.all_reduce(np.array([done]), op="min")[0])
            if worker.rank == 1 and worker.incarnation == 1 and done == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            total = group.all_reduce(np.full(5, worker.rank + 1.0))
            done += 1
        except (zbmd.PeerLost, zbmd.OperationAborted):
            group.close()
            group = worker.group(after=group.epoch)
            done = 0 if worker.incarnation > 1 else done
    print(f"rank {worker.rank} incarnation {worker.incarnation}: {total.tolist()} in epoch {group.epoch}")
