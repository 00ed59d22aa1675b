"""All-reduce an array in shared memory, and one outside it.

Run it: zbmd-node run -n 4 examples/all_reduce.py
"""

import numpy as np

import zbmd


async def main() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        gradient = zbmd.empty(1_000_000, np.float32)  # in shared memory: peers read it in place
        gradient[:] = worker.rank
        await group.all_reduce(gradient)
        elsewhere = await group.all_reduce(np.full(3, worker.rank + 1.0))  # any array works
        if worker.rank == 0:
            print(f"{group!r}: ranks sum to {gradient[0]:.0f}, ranks + 1 to {elsewhere[0]:.0f}")
        await group.close()


zbmd.run(main())
