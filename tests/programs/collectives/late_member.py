"""A rank of a pair: the first call of a sub-group times out, since rank 1 never makes it."""

from __future__ import annotations

import numpy as np

import zbmd


async def main() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        if worker.rank == 0:
            try:
                await group.subgroup([0, 1], timeout=0.05)
            except zbmd.DeadlineExceeded as error:
                assert "sub-group of ranks [0, 1]" in str(error), error
            else:
                raise AssertionError("nobody came")
        await group.barrier()
        again = await group.subgroup([0, 1])  # the other has called this once less
        assert (await again.all_reduce(np.ones(1)))[0] == 2
        await group.barrier()
        await again.close()
        pair = await group.subgroup([1, 0])
        if worker.rank == 0:  # the other may still be in the pair's last operation, and read our descriptor
            await pair.close()
        part = await group.subgroup([worker.rank])
        assert part.communicator.channel != pair.communicator.channel
        await part.barrier()
        await group.barrier()  # once both have closed the pair, its channel may be used again
        await pair.close()
        await part.close()
        await group.close()


zbmd.run(main())
