"""An asking process and an actor in a sub-process of xoscar's pool: round trips of bytes.

`python -m zbmd.tools.bench.peers.xoscar_pair --control NAME`
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import time
from typing import Any

from zbmd.tools.bench.peers.control import connect, encode_reply, parse_command, warmups

xoscar: Any = importlib.import_module("xoscar")
_Actor: Any = xoscar.Actor


class Echo(_Actor):  # type: ignore[misc]  # xoscar is loaded by name, so its classes are untyped here
    """Answers with what it was sent."""

    async def echo(self, payload: bytes) -> bytes:
        """Answer."""
        return payload

    async def pid(self) -> int:
        """Where it lives."""
        return os.getpid()


async def _round_trips(actor: Any, nbytes: int, iterations: int) -> list[float]:
    payload, samples = bytes(nbytes), list[float]()
    for _ in range(warmups(iterations)):
        await actor.echo(payload)
    for _ in range(iterations):
        began_ns = time.perf_counter_ns()
        await actor.echo(payload)
        samples.append(time.perf_counter_ns() - began_ns)
    return samples


async def _serve(control: str) -> None:
    pool = await xoscar.create_actor_pool("127.0.0.1:0", n_process=2)
    async with pool:
        actor = await xoscar.create_actor(
            Echo,
            address=pool.external_address,
            uid="echo",
            allocate_strategy=xoscar.allocate_strategy.ProcessIndex(1),
        )
        reader, writer = await asyncio.open_unix_connection(sock=connect(control, 0))
        while line := await reader.readline():
            _, nbytes, iterations = parse_command(line)
            writer.write(encode_reply(await _round_trips(actor, nbytes, iterations)))
            await writer.drain()
        writer.close()


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    asyncio.run(_serve(parser.parse_args().control))


if __name__ == "__main__":
    main()
