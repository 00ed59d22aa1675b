"""The process that is killed: it joins the survivor, touches its memory, says so, and waits for its end.

`python -m zbmd.tools.bench.transport.victim --address NAME --incarnation N --bytes B`
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Final

import numpy as np
import uvloop

from zbmd.transport.host.prctl import end_with_parent
from zbmd.transport.identity import Identity
from zbmd.transport.link.endpoint import Endpoint
from zbmd.transport.memory.segment import Segment
from zbmd.transport.shm.connect import dial
from zbmd.transport.shm.death_notice import LifeThread

COOKIE: Final = bytes(32)
SLOT: Final = 1
READY: Final = "ready\n"


async def _live(address: str, incarnation: int, nbytes: int) -> None:
    segment = Segment.create(slot=SLOT, incarnation=incarnation, arena_bytes=0, inbox_bytes=0)
    life = LifeThread(segment)
    memory = np.ones(nbytes, np.uint8)
    identity = Identity(name="victim", pid=os.getpid(), uid=os.getuid(), incarnation=incarnation)
    link = await dial(address, Endpoint(identity=identity, cookie=COOKIE, segment=segment))
    link.on_frame = lambda header, payload: None
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    link.on_closed = lambda error: ended.set_result(None)
    sys.stdout.write(READY)
    sys.stdout.flush()
    await ended
    life.goodbye()
    del memory


def main() -> None:
    """Live until killed, or until the survivor has gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    arguments = parser.parse_args()
    end_with_parent(os.getppid())
    uvloop.run(_live(arguments.address, arguments.incarnation, arguments.bytes))


if __name__ == "__main__":
    main()
