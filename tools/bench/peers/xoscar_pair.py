"""An asking process and an actor in a sub-process of xoscar's pool: round trips of bytes.

`python -m zbmd.tools.bench.peers.xoscar_pair --control NAME`
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
from typing import Any

from zbmd.tools.bench.peers.control import serve_on_loop, timed_on_loop

xoscar: Any = importlib.import_module("xoscar")
_Actor: Any = xoscar.Actor


class Echo(_Actor):  # type: ignore[misc]  # xoscar is loaded by name, so its classes are untyped here
    """Answers with what it was sent."""

    async def echo(self, payload: bytes) -> bytes:
        """Answer."""
        return payload

    async def pid(self) -> int:
        """Return the process that it runs in."""
        return os.getpid()


async def _serve(control: str) -> None:
    pool = await xoscar.create_actor_pool("127.0.0.1:0", n_process=2)
    async with pool:
        actor = await xoscar.create_actor(
            Echo,
            address=pool.external_address,
            uid="echo",
            allocate_strategy=xoscar.allocate_strategy.ProcessIndex(1),
        )

        async def measure(what: str, nbytes: int, iterations: int) -> list[float]:
            payload = bytes(nbytes)
            return await timed_on_loop(iterations, lambda: actor.echo(payload), 1)

        await serve_on_loop(control, 0, measure)


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    asyncio.run(_serve(parser.parse_args().control))


if __name__ == "__main__":
    main()
