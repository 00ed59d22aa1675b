"""Ranks that reduce once."""

from __future__ import annotations

import numpy as np

import zbmd


async def main() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        await group.all_reduce(np.ones(1))
        print("done", flush=True)
        await group.close()


zbmd.run(main())
