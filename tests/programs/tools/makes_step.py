"""A rank that makes a step with all others, and runs until there is a file. argv: its path."""

from __future__ import annotations

import sys
from pathlib import Path

from support.processes.polling import until

import zbmd


async def main() -> None:
    """Report once all ranks have met."""
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        await group.barrier()
        print(f"rank {worker.rank} of {worker.world_size} has made a step", flush=True)
        await until(Path(sys.argv[1]).exists)
        await group.close()


zbmd.run(main())
