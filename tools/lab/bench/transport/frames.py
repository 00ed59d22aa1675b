"""Large frames between two processes over shm: in blocks that are lent, and in pieces, in turn.

    python -m zbmd.tools.lab.bench.transport.frames [--sizes 8K,64K,1000000] [--rounds N] [--iterations N]
        [--json]

A round trip is a frame of the size there, copied out by its reader as a decoder does, and an empty frame
back; a stream is many frames in a row, until the last has been answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Final

import uvloop

from zbmd.tools.bench.result import now_utc, this_machine
from zbmd.tools.bench.stats import median, parse_sizes
from zbmd.tools.cli.options import add_json, script_parser
from zbmd.transport.frames import FrameHeader
from zbmd.transport.host.process import end_with_parent
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.memory.segment import Segment
from zbmd.transport.shm.connect import dial, listen
from zbmd.transport.shm.link import ShmLink

COOKIE: Final = bytes(32)
ARENA_BYTES: Final = 64 << 20
KINDS: Final = ("blocks", "pieces")
ANSWER: Final = 1
"""The flag of a frame that wants an answer."""
STREAM_FRAMES: Final = 64


def _endpoint(slot: int, kind: str) -> Endpoint:
    """Without memory of its own, a link can lend no blocks."""
    segment = None
    if kind == "blocks":
        segment = Segment.create(slot=slot, incarnation=1, arena_bytes=ARENA_BYTES, inbox_bytes=0)
    identity = Identity(name=f"rank{slot}", pid=os.getpid(), uid=os.getuid(), incarnation=1)
    return Endpoint(identity=identity, cookie=COOKIE, segment=segment)


async def _echo(addresses: Sequence[str]) -> None:
    """The second process: answers on every link until all have ended."""

    def serve(link: ShmLink, over: asyncio.Future[None]) -> None:
        def on_frame(header: FrameHeader, payload: memoryview) -> None:
            bytes(payload)
            if header.flags & ANSWER:
                link.send(b"")

        link.on_frame = on_frame
        link.on_closed = lambda _: over.set_result(None)

    ends = []
    for kind, address in zip(KINDS, addresses, strict=True):
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        serve(await dial(address, _endpoint(1, kind)), over)
        ends.append(over)
    await asyncio.gather(*ends)


class Asker:
    """The first process's end of one link."""

    def __init__(self, link: ShmLink) -> None:
        self._link = link
        self._answer: asyncio.Future[None] | None = None
        link.on_frame = self._on_frame

    def _on_frame(self, header: FrameHeader, payload: memoryview) -> None:
        assert self._answer is not None
        self._answer.set_result(None)

    async def round_trip_us(self, payload: bytes) -> float:
        """One frame and its answer."""
        begin_ns = time.perf_counter_ns()
        await self._ask(payload)
        return (time.perf_counter_ns() - begin_ns) / 1e3

    async def stream_us(self, payload: bytes) -> float:
        """One frame of many in a row."""
        begin_ns = time.perf_counter_ns()
        for _ in range(STREAM_FRAMES - 1):
            await self._link.writable()
            self._link.send(payload)
        await self._link.writable()
        await self._ask(payload)
        return (time.perf_counter_ns() - begin_ns) / 1e3 / STREAM_FRAMES

    async def _ask(self, payload: bytes) -> None:
        self._answer = asyncio.get_running_loop().create_future()
        self._link.send(payload, flags=ANSWER)
        await self._answer


async def _measure(
    askers: dict[str, Asker], sizes: Sequence[int], rounds: int, iterations: int
) -> dict[tuple[str, int, str], list[float]]:
    """Medians of each round, by what, size and kind."""
    figures: dict[tuple[str, int, str], list[float]] = {}
    for nbytes in sizes:
        payload = bytes(nbytes)
        for _ in range(rounds):
            for kind, asker in askers.items():
                trips = [await asker.round_trip_us(payload) for _ in range(iterations)]
                figures.setdefault(("round trip", nbytes, kind), []).append(median(trips))
            for kind, asker in askers.items():
                figures.setdefault(("stream", nbytes, kind), []).append(await asker.stream_us(payload))
    return figures


async def _ask_all(
    sizes: Sequence[int], rounds: int, iterations: int
) -> dict[tuple[str, int, str], list[float]]:
    """Both processes; the second ends with its links, or with us."""
    names = [f"zbmd-bench-frames-{os.getpid()}-{kind}" for kind in KINDS]
    made: asyncio.Queue[ShmLink] = asyncio.Queue()
    listeners = [
        listen(name, made.put_nowait, _endpoint(0, kind)) for kind, name in zip(KINDS, names, strict=True)
    ]
    command = [sys.executable, "-m", "zbmd.tools.lab.bench.transport.frames", "--echo", *names]
    process = await asyncio.create_subprocess_exec(*command)
    links = [await made.get() for _ in KINDS]
    try:
        askers = {kind: Asker(link) for kind, link in zip(KINDS, links, strict=True)}
        return await _measure(askers, sizes, rounds, iterations)
    finally:
        for link in links:
            link.close()
        for listener in listeners:
            listener.close()
        await process.wait()


def table(figures: dict[tuple[str, int, str], list[float]]) -> str:
    """The figures as a person reads them: medians, us, and how much blocks take of what pieces take."""
    lines = [
        f"# us a frame; {now_utc()}  {this_machine()}",
        f"{'':12}{'bytes':>10}{'blocks':>10}{'pieces':>10}{'ratio':>8}",
    ]
    for what, nbytes, kind in figures:
        if kind == KINDS[0]:
            blocks, pieces = (median(figures[what, nbytes, each]) for each in KINDS)
            lines.append(f"{what:12}{nbytes:>10,}{blocks:>10.1f}{pieces:>10.1f}{blocks / pieces:>8.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = script_parser("lab.bench.transport.frames", __doc__)
    parser.add_argument("--sizes", default="8K,16K,32K,64K,256K,1000000", metavar="LIST")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=200, help="round trips in each turn")
    add_json(parser)
    parser.add_argument("--echo", nargs=len(KINDS), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.echo is not None:
        end_with_parent(os.getppid())
        uvloop.run(_echo(arguments.echo))
        return 0
    figures = uvloop.run(_ask_all(parse_sizes(arguments.sizes), arguments.rounds, arguments.iterations))
    if arguments.json:
        print(json.dumps([[*key, values] for key, values in figures.items()]))
    else:
        print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
