"""All-reduce without `async`, as in a notebook. Run it: zbmd-node run -n 4 examples/blocking.py"""

import numpy as np

import zbmd

with zbmd.init() as worker:
    group = worker.group()
    gradient = zbmd.empty((1_000_000,), np.float32)  # in shared memory: the host's ranks read it in place
    gradient[:] = worker.rank
    group.all_reduce(gradient)
    elsewhere = group.all_reduce(np.full(3, worker.rank + 1.0))  # any array will do
    if worker.rank == 0:
        print(f"{group!r}: ranks sum to {gradient[0]:.0f}, ranks + 1 to {elsewhere[0]:.0f}")
