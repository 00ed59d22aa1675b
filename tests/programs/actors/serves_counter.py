"""A process that dials an address, serves a counter, and lives until it is killed. Argument: the address."""

from __future__ import annotations

import asyncio
import sys

from support.actors.remote_counter import Counter, endpoint

from zbmd.actors.contracts import fingerprints
from zbmd.actors.system import ActorSystem
from zbmd.transport.shm.connect import dial


async def main() -> None:
    system = ActorSystem("rank1", 4)
    await system.spawn(Counter, name="counter")
    system.attach(await dial(sys.argv[1], endpoint("rank1", fingerprints(), incarnation=4)))
    await asyncio.Event().wait()


asyncio.run(main())
