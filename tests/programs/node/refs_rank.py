"""A rank that spawns a `caller` and stays."""

from __future__ import annotations

import asyncio

from programs.node.refs_actors import Caller

import zbmd
from zbmd.actors.core.actor_base import allow_remote_modules


async def main() -> None:
    allow_remote_modules("programs.node.refs_actors")
    async with zbmd.join() as worker:
        await worker.system.spawn(Caller, name="caller")
        print("ready", flush=True)
        await asyncio.Event().wait()


zbmd.run(main())
