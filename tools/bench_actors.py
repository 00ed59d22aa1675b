"""Time actors through the public API: ask round trips, asks and tells a second, within and across processes.

    python -m zbmd.tools.bench_actors [--seconds S] [--json]

Everything is on: typed contracts, references, deadlines, bounded mailboxes, trace ids, frame headers. The
other process is a plain child on the same host, reached over a shared-memory link; both run uvloop.
`noise_percent` is the same measurement against itself (A against A).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

import uvloop

from zbmd.actors.actor import Actor, on
from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.mailbox import MailboxSpec
from zbmd.actors.ref import Ref
from zbmd.actors.system import ActorSystem
from zbmd.transport.hello import Identity
from zbmd.transport.shm import Endpoint, dial, listen
from zbmd.transport.shm_link import ShmLink

IN_FLIGHT = 1000
TIMEOUT_S = 30.0
BATCH = 200
COOKIE = bytes(32)


class Ping(Contract, id="bench.ping"):
    """The smallest question."""

    value: int
    payload: bytes = b""


class Pong(Contract, id="bench.pong"):
    """Its answer."""

    value: int


class Note(Contract, id="bench.note"):
    """A message without an answer."""

    value: int


class Echo(Actor):
    """Answers pings, takes notes."""

    mailbox = MailboxSpec(capacity=65_536)

    @on(Ping)
    async def ping(self, message: Ping) -> Pong:
        """Answer."""
        return Pong(message.value)

    @on(Note)
    async def note(self, _: Note) -> None:
        """Take note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    what: str
    where: str
    p50_us: float = 0.0
    p99_us: float = 0.0
    per_second: float = 0.0
    noise_percent: float = 0.0


def _endpoint(name: str) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1, contracts=fingerprints())
    return Endpoint(identity=identity, cookie=COOKIE)


async def _serve(address: str) -> None:
    system = ActorSystem("child")
    await system.spawn(Echo, name="echo")
    ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    system.attach(await dial(address, _endpoint("child")), on_closed=ended.set_result)
    await ended
    await system.stop()


async def _round_trips(ref: Ref, message: Ping, seconds: float) -> list[float]:
    times_us: list[float] = []
    for _ in range(BATCH):
        await ref.ask(message, timeout=TIMEOUT_S)
    end_ns = time.perf_counter_ns() + int(seconds * 1e9)
    before_ns = time.perf_counter_ns()
    while before_ns < end_ns:
        await ref.ask(message, timeout=TIMEOUT_S)
        after_ns = time.perf_counter_ns()
        times_us.append((after_ns - before_ns) / 1e3)
        before_ns = after_ns
    return sorted(times_us)


async def _rate(seconds: float, one: Callable[[], Awaitable[object]], workers: int) -> float:
    count = 0
    end_s = time.perf_counter() + seconds

    async def work() -> None:
        nonlocal count
        while time.perf_counter() < end_s:
            await one()
            count += 1

    start_s = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(workers)))
    return count / (time.perf_counter() - start_s)


async def _measure(ref: Ref, where: str, seconds: float) -> list[Row]:
    rows: list[Row] = []
    for what, message in (("ask 1 B", Ping(1)), ("ask 64 KiB", Ping(1, bytes(1 << 16)))):
        first = await _round_trips(ref, message, seconds)
        again = await _round_trips(ref, message, seconds)
        p50_us, p50_again_us = first[len(first) // 2], again[len(again) // 2]
        rows.append(
            Row(
                what=what,
                where=where,
                p50_us=p50_us,
                p99_us=first[len(first) * 99 // 100],
                per_second=len(first) / seconds,
                noise_percent=abs(p50_us - p50_again_us) / p50_us * 100,
            )
        )

    async def note() -> None:
        for i in range(BATCH):
            await ref.tell(Note(i))
        await ref.ask(Ping(0), timeout=TIMEOUT_S)

    ping = Ping(1)
    for what, one, workers, factor in (
        (f"asks, {IN_FLIGHT} in flight", lambda: ref.ask(ping, timeout=TIMEOUT_S), IN_FLIGHT, 1),
        ("tells", note, 1, BATCH),
    ):
        rate = factor * await _rate(seconds, one, workers)
        again_rate = factor * await _rate(seconds, one, workers)
        noise = abs(rate - again_rate) / rate * 100
        rows.append(Row(what=what, where=where, per_second=rate, noise_percent=noise))
    return rows


async def _bench(seconds: float) -> list[Row]:
    system = ActorSystem("bench")
    address = f"zbmd-bench-{os.getpid()}-{secrets.token_hex(4)}"
    came: asyncio.Future[ShmLink] = asyncio.get_running_loop().create_future()
    listener = listen(address, came.set_result, _endpoint("bench"))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "zbmd.tools.bench_actors", "--serve", address
    )
    try:
        system.attach(await asyncio.wait_for(came, TIMEOUT_S))
        rows = await _measure(await system.spawn(Echo, name="echo"), "this process", seconds)
        rows += await _measure(system.ref("child/echo"), "other process", seconds)
    finally:
        listener.close()
        await system.stop()
        await child.wait()
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print a table, or JSON."""
    parser = argparse.ArgumentParser(
        prog="bench_actors", description="Time actors, within and across processes."
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement (default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        uvloop.run(_serve(options.serve))
        return 0
    rows = uvloop.run(_bench(options.seconds))
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    print(f"{'':24} {'':14} {'p50 us':>9} {'p99 us':>9} {'per second':>12} {'noise %':>8}")
    for row in rows:
        latency = f"{row.p50_us:9.1f} {row.p99_us:9.1f}" if row.p50_us else f"{'':9} {'':9}"
        print(f"{row.what:24} {row.where:14} {latency} {row.per_second:12,.0f} {row.noise_percent:8.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
