"""Why some round trips of a frame take long: which side parked for it, and why it did not spin.

    python -m zbmd.tools.lab.bench.transport.frame_tail [--trips N] [--spin-us US] [--json]

Two processes exchange a frame of 8 bytes over shm, through uvloop. The answer carries how often its sender
has parked so far, and why; so each round trip is told by what happened on both sides meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import uvloop

from zbmd.tools.bench.result import now_utc, this_machine
from zbmd.tools.bench.stats import percentile
from zbmd.transport.frames import FrameHeader
from zbmd.transport.host.prctl import end_with_parent
from zbmd.transport.identity import Identity
from zbmd.transport.link.endpoint import Endpoint
from zbmd.transport.link.interface import LinkLimits
from zbmd.transport.link.spin import SpinChoice
from zbmd.transport.shm.connect import dial, listen
from zbmd.transport.shm.link import ShmLink

COOKIE: Final = bytes(32)
WARM_UP_TRIPS: Final = 1000
CHOICES: Final = tuple(SpinChoice)
_PARKS: Final = struct.Struct(f"<{len(CHOICES)}Q")
LATE_US: Final = 30
"""The goal of the p99."""

Parks = tuple[int, ...]
Trips = list[tuple[float, str]]
"""Microseconds of each round trip, and what happened on the way."""


def _endpoint(name: str, spin_us: int) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1)
    return Endpoint(identity=identity, cookie=COOKIE, limits=LinkLimits(spin_ns=1000 * spin_us))


def _parks(link: ShmLink) -> Parks:
    return tuple(link.spins.parks[choice] for choice in CHOICES)


async def _answer(address: str, spin_us: int) -> None:
    """The second process."""
    link = await dial(address, _endpoint("answers", spin_us))
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    link.on_frame = lambda header, payload: link.send(_PARKS.pack(*_parks(link)))
    link.on_closed = lambda _: over.set_result(None)
    await over


def _why(side: str, before: Parks, after: Parks) -> str:
    """What made this side park meanwhile; empty if nothing did."""
    for choice, had, has in zip(CHOICES, before, after, strict=True):
        if has > had:
            return f"{side} parked: " + ("it spun in vain" if choice is SpinChoice.SPIN else choice.value)
    return ""


async def _ask(trips: int, spin_us: int) -> Trips:
    address = f"zbmd-bench-tail-{os.getpid()}"
    made: asyncio.Queue[ShmLink] = asyncio.Queue()
    listener = listen(address, made.put_nowait, _endpoint("asks", spin_us))
    command = [sys.executable, "-m", "zbmd.tools.lab.bench.transport.frame_tail", "--answer", address]
    process = await asyncio.create_subprocess_exec(*command, "--spin-us", str(spin_us))
    link = await made.get()
    listener.close()
    try:
        return await _round_trips(link, WARM_UP_TRIPS + trips)
    finally:
        link.close()
        await process.wait()


async def _round_trips(link: ShmLink, count: int) -> Trips:
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Parks] = loop.create_future()

    def on_frame(header: FrameHeader, payload: memoryview) -> None:
        answered.set_result(_PARKS.unpack(payload))

    link.on_frame = on_frame
    found: Trips = []
    ours, theirs = _parks(link), (0,) * len(CHOICES)
    for _ in range(count):
        begin_ns = time.perf_counter_ns()
        link.send(b"question")
        after = await answered
        took_us = (time.perf_counter_ns() - begin_ns) / 1e3
        answered = loop.create_future()
        now = _parks(link)
        reasons = [_why("we", ours, now), _why("the peer", theirs, after)]
        found.append((took_us, "; ".join(filter(None, reasons)) or "nobody parked"))
        ours, theirs = now, after
    return found[WARM_UP_TRIPS:]


def table(trips: Trips) -> str:
    """The round trips by what happened, the most frequent first."""
    machine = this_machine()
    every = [took_us for took_us, _ in trips]
    late = sum(took_us > LATE_US for took_us in every)
    classes: dict[str, list[float]] = defaultdict(list)
    for took_us, why in trips:
        classes[why].append(took_us)
    p50, p99 = percentile(every, 0.5), percentile(every, 0.99)
    lines = [
        f"# {len(every):,} round trips: p50 {p50:.1f} us, p99 {p99:.1f}; {late / len(every):.1%} are late, "
        f"above {LATE_US} us; {machine.cpu}, {machine.cores} cores, "
        f"load {machine.load_average:.1f}, {now_utc()}",
        f"{'trips':>8}{'p50 us':>9}{'p99 us':>9}{'of late':>9}  what happened",
    ]
    for why, times in sorted(classes.items(), key=lambda item: -len(item[1])):
        part = sum(took_us > LATE_US for took_us in times) / max(1, late)
        p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
        lines.append(f"{len(times):>8,}{p50:>9.1f}{p99:>9.1f}{part:>9.1%}  {why}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trips", type=int, default=20_000)
    parser.add_argument("--spin-us", type=int, default=LinkLimits().spin_ns // 1000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.answer is not None:
        end_with_parent(os.getppid())
        uvloop.run(_answer(arguments.answer, arguments.spin_us))
        return 0
    trips = uvloop.run(_ask(arguments.trips, arguments.spin_us))
    print(json.dumps(trips) if arguments.json else table(trips))
    return 0


if __name__ == "__main__":
    sys.exit(main())
