"""A rank that closes its group and leaves right after its last broadcast."""

from __future__ import annotations

import zbmd


async def main() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        x = zbmd.empty(1 << 20, "f8")
        x.fill(worker.rank)
        await group.broadcast(x, 0)
        await group.close()
    print("sum", x.sum())


zbmd.run(main())
