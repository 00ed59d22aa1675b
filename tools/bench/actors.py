"""Time actors through the public API: ask round trips, asks and tells a second, within and across processes.

    zbmd bench actors [--seconds S] [--vs xoscar,ray,monarch] [--json]

A library that has an interpreter of its own is named with it: `--vs ray=/opt/ray/bin/python`.

Everything is on: typed contracts, references, deadlines, bounded mailboxes, trace ids, frame headers, and the
capture ring of both processes, as ranks have it; one row has the smallest ask without that ring. The
other process is a plain child on the same host, reached over a shared-memory link; both run uvloop. A peer
that the interpreter given cannot import ends it with code 3 and the command that installs it.
`noise_percent` is the same measurement against itself (A against A).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import uvloop

import zbmd
from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import MailboxSpec
from zbmd.actors.core.ref import Ref
from zbmd.actors.system import ActorSystem
from zbmd.tools.bench.actor_lifecycle import life
from zbmd.tools.bench.figures import Figure, add_record, append_figures, new_figure
from zbmd.tools.bench.peer_catalogue import ASK_FLOOR, PeerMissing, compile_floor
from zbmd.tools.bench.peers.actor_asks import (
    EXIT_MISSING,
    INSTALL,
    LIBRARIES,
    SIZES,
    ActorMeasurement,
    percentile,
    table,
    tells_per_second,
)
from zbmd.tools.bench.result import command_line
from zbmd.tools.bench.workers import ContenderFailed
from zbmd.tools.cli.options import add_json
from zbmd.transport.capture.log import RingRecorder
from zbmd.transport.capture.recorder import Clocks, origin_of
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import UserError
from zbmd.transport.identity import Identity
from zbmd.transport.memory.segment import Segment
from zbmd.transport.shm.connect import Endpoint, dial, listen
from zbmd.transport.shm.link import ShmLink

IN_FLIGHT = 1000
TIMEOUT_S = 30.0
SECONDS_MAX = 60.0
BATCH = 200
TURNS = 16
"""Of asking with the capture ring, and without it."""
COOKIE = bytes(32)
ARENA_BYTES = 64 << 20
FLOOR = "floor: shared-memory ping-pong"
"""Without zbmd, each side busy for half of the median of an ask of 1 B: what interrupts hits both alike."""


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


@contextmanager
def _endpoint(name: str, slot: int, *, ring: bool) -> Generator[Endpoint]:
    """With memory, as the ranks of a job have it: large messages are read where they lie there.

    ring: whether all frames are taken down in a ring, as of ranks.
    """
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1, contracts=fingerprints())
    segment = Segment.create(slot=slot, incarnation=1, arena_bytes=ARENA_BYTES, inbox_bytes=0)
    try:
        clock = HybridClock()
        recorder = RingRecorder(origin_of(identity), Clocks(hybrid=clock)) if ring else None
        yield Endpoint(identity=identity, cookie=COOKIE, segment=segment, clock=clock, recorder=recorder)
    finally:
        segment.close()


async def _serve(address: str, *, ring: bool) -> None:
    system = ActorSystem("child")
    await system.spawn(Echo, name="echo")
    ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    with _endpoint("child", 1, ring=ring) as endpoint:
        system.attach(await dial(address, endpoint), on_closed=ended.set_result)
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
    return times_us


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


async def _measure(ref: Ref, where: str, seconds: float) -> list[ActorMeasurement]:
    rows: list[ActorMeasurement] = []
    for what, nbytes in SIZES:
        message = Ping(1, bytes(nbytes))
        first = await _round_trips(ref, message, seconds)
        again = await _round_trips(ref, message, seconds)
        p50_us, p50_again_us = percentile(first, 0.5), percentile(again, 0.5)
        rows.append(
            ActorMeasurement(
                what=what,
                where=where,
                p50_us=p50_us,
                p99_us=percentile(first, 0.99),
                per_second=len(first) / seconds,
                noise_percent=abs(p50_us - p50_again_us) / p50_us * 100,
            )
        )

    ping, note = Ping(1), Note(1)

    async def ask_many() -> float:
        return await _rate(seconds, lambda: ref.ask(ping, timeout=TIMEOUT_S), IN_FLIGHT)

    async def tell_many() -> float:
        return await tells_per_second(
            lambda: ref.tell(note), lambda: ref.ask(ping, timeout=TIMEOUT_S), seconds
        )

    for what, measure in ((f"asks, {IN_FLIGHT} in flight", ask_many), ("tells", tell_many)):
        rate, again_rate = await measure(), await measure()
        noise = abs(rate - again_rate) / rate * 100
        rows.append(ActorMeasurement(what=what, where=where, per_second=rate, noise_percent=noise))
    return rows


@asynccontextmanager
async def _other_process(*, ring: bool) -> AsyncGenerator[ActorSystem]:
    """A system that is linked with the process "child", which has the actor "echo"."""
    system = ActorSystem("bench")
    address = f"zbmd-bench-{os.getpid()}-{secrets.token_hex(4)}"
    came: asyncio.Future[ShmLink] = asyncio.get_running_loop().create_future()
    with _endpoint("bench", 0, ring=ring) as endpoint:
        listener = listen(address, came.set_result, endpoint)
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "zbmd.tools.bench.actors",
            "--serve",
            address,
            *([] if ring else ["--no-ring"]),
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                system.attach(await came)
            yield system
        finally:
            listener.close()
            await system.stop()
            await child.wait()


async def _without_ring(seconds: float) -> list[ActorMeasurement]:
    """The smallest ask with the capture ring and without it, in turn, so that both meet the same noise."""
    times_us: dict[bool, list[float]] = {True: [], False: []}
    async with _other_process(ring=True) as one, _other_process(ring=False) as other:
        for turn in range(TURNS):
            for ring in (True, False) if turn % 2 else (False, True):
                ref = (one if ring else other).ref("child/echo")
                times_us[ring] += await _round_trips(ref, Ping(1, b"x"), seconds / TURNS)
    return [
        ActorMeasurement(
            what=f"ask 1 B, {'with' if ring else 'without'} the ring, in turn",
            where="other process",
            p50_us=percentile(times, 0.5),
            p99_us=percentile(times, 0.99),
        )
        for ring, times in times_us.items()
    ]


async def _bench(seconds: float) -> list[ActorMeasurement]:
    async with _other_process(ring=True) as system:
        rows = await _measure(await system.spawn(Echo, name="echo"), "this process", seconds)
        across = await _measure(system.ref("child/echo"), "other process", seconds)
        rows += [across[0], await _floor(across[0], seconds), *across[1:]]
    return rows + await _without_ring(seconds)


async def _run_peer(library: str, python: str, *options: str) -> bytes:
    """Return what it printed. Raises `PeerMissing` and `ContenderFailed`."""
    command = ("-m", "zbmd.tools.bench.peers.actor_asks", library, *options)
    # An interpreter of its own has no zbmd: it finds this one, whose peers need nothing compiled.
    found = {**os.environ, "PYTHONPATH": str(Path(zbmd.__file__).parents[1])}
    pipe = asyncio.subprocess.PIPE
    peer = await asyncio.create_subprocess_exec(python, *command, env=found, stdout=pipe, stderr=pipe)
    told, said = await peer.communicate()
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    if peer.returncode == EXIT_MISSING:
        raise PeerMissing(
            f"{library} cannot be imported by {python}: {last}\n"
            f"Install it: {python} -m pip install {INSTALL[library]}"
        )
    if peer.returncode != 0:
        raise ContenderFailed(f"{library} failed, with code {peer.returncode}: {last}")
    return told


async def _beside(library: str, python: str, seconds: float) -> list[ActorMeasurement]:
    """The same by another library, in processes of its own. Raises as `_run_peer`."""
    told = await _run_peer(library, python, "--seconds", str(seconds), "--in-flight", str(IN_FLIGHT))
    rows: list[dict[str, Any]] = json.loads(told.splitlines()[-1])
    return [replace(ActorMeasurement(**row), by=library) for row in rows]


async def _floor(ask: ActorMeasurement, seconds: float) -> ActorMeasurement:
    """Measure round trips as long as ours without any of our code: see peers/ask_floor.c."""
    with tempfile.TemporaryDirectory(prefix="zbmd-bench-") as scratch:
        try:
            program = compile_floor(Path(scratch), ASK_FLOOR)
        except PeerMissing:
            return ActorMeasurement(what=f"{FLOOR}: no C compiler", where="other process", by="C")
        hold_ns = str(int(ask.p50_us * 1e3 / 2))
        floor = await asyncio.create_subprocess_exec(
            program, str(seconds), hold_ns, stdout=asyncio.subprocess.PIPE
        )
        told, _ = await floor.communicate()
    if floor.returncode != 0:
        raise ContenderFailed(f"{program} failed, with code {floor.returncode}")
    p50_us, p99_us = (float(word) for word in told.split())
    return ActorMeasurement(what=FLOOR, where="other process", p50_us=p50_us, p99_us=p99_us, by="C")


async def _all(seconds: float, libraries: dict[str, str]) -> list[ActorMeasurement]:
    for library, python in libraries.items():
        await _run_peer(library, python)  # before minutes are spent on the others
    rows = await _bench(seconds) + await life(seconds)
    for library, python in libraries.items():
        rows += await _beside(library, python, seconds)
    return rows


def _figures(rows: Sequence[ActorMeasurement], command: str) -> Iterator[Figure]:
    """Yield a figure for each of our rows, beside the best peer that measured the same."""
    for row in rows:
        if row.by != "zbmd":
            continue
        unit, value = _unit_and_value(row)
        peers = [r for r in rows if r.by in LIBRARIES and (r.what, r.where) == (row.what, row.where)]
        choose = max if unit == "/s" else min
        best = choose(peers, key=lambda peer: _unit_and_value(peer)[1], default=None)
        theirs = None if best is None else _unit_and_value(best)[1]
        ratio = None
        if theirs and value:
            ratio = round(value / theirs if unit == "/s" else theirs / value, 3)
        yield new_figure(
            "actors",
            f"{row.what}, {row.where}",
            command,
            value=value,
            unit=unit,
            peer=None if best is None else best.by,
            peer_value=theirs,
            ratio=ratio,
        )


def _unit_and_value(row: ActorMeasurement) -> tuple[str, float]:
    if row.p50_us:
        return "µs", row.p50_us
    return ("/s", row.per_second) if row.per_second else ("", row.amount)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement (%(default)s)")
    add_json(parser)
    add_record(parser)
    parser.add_argument(
        "--vs",
        default="",
        metavar="LIBRARIES",
        help=f"to run in turn, of {', '.join(LIBRARIES)}; NAME=PYTHON: in that interpreter",
    )


def run(options: argparse.Namespace) -> None:
    """Measure, and print a table, or JSON. Raises `UserError`, `PeerMissing`, `ContenderFailed`."""
    named = [one.partition("=") for one in options.vs.split(",") if one]
    libraries = {name: python or sys.executable for name, _, python in named}
    if missing := [python for python in libraries.values() if not os.access(python, os.X_OK)]:
        raise UserError(f"--vs …={missing[0]}: there is no interpreter; give its path.")
    if unknown := [name for name in libraries if name not in LIBRARIES]:
        raise UserError(f"--vs {unknown[0]} is not known: give some of {', '.join(LIBRARIES)}.")
    if not 0 < options.seconds <= SECONDS_MAX:
        raise UserError(f"--seconds {options.seconds:g} is out of range: give up to {SECONDS_MAX:g}.")
    rows = uvloop.run(_all(options.seconds, libraries))
    print(json.dumps([asdict(row) for row in rows]) if options.json else table(rows))
    if options.record is not None:
        append_figures(options.record, _figures(rows, command_line()))


def main() -> None:
    """Be the other process of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", metavar="ADDRESS", required=True)
    parser.add_argument("--no-ring", action="store_true")
    options = parser.parse_args()
    uvloop.run(_serve(options.serve, ring=not options.no_ring))


if __name__ == "__main__":
    main()
