"""A rank of a blocking script with an elastic group: a death is repaired inside of the operation."""

from __future__ import annotations

import os
import signal

import numpy as np

import zbmd

with zbmd.init() as worker:
    group = worker.elastic_group()
    while True:
        # The result is the same on all contributors, so all leave the loop after the same operation.
        result = group.all_reduce(np.array([1.0, worker.incarnation - 1]), inputs="preserve")
        if worker.rank == 2 and worker.incarnation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if result.value[1]:
            break
    print(f"rank {worker.rank}: {result.value.tolist()} from {result.contributors}")
    group.barrier()
