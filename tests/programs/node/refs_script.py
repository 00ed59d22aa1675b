"""A script in a cluster that spawns a `caller` and stays."""

from __future__ import annotations

import asyncio

from programs.node.refs_actors import Caller

import zbmd


async def main() -> None:
    async with zbmd.connect() as system:
        await system.spawn(Caller, name="caller")
        print(f"{system.name} is in", flush=True)
        await asyncio.Event().wait()


zbmd.run(main())
