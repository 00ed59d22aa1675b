"""An actor in another process, by another actor library, in the way that its own guide shows.

    python -m zbmd.tools.bench.peers.actor_asks {xoscar,ray,monarch} [--seconds S --in-flight N]

Prints a JSON list of rows, or without --seconds none; exits with 3 if the library cannot be imported.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorMeasurement:
    """One measurement; what does not apply is 0. amount: what `what` says."""

    what: str
    where: str
    p50_us: float = 0.0
    p99_us: float = 0.0
    per_second: float = 0.0
    amount: float = 0.0
    noise_percent: float = 0.0
    by: str = "zbmd"


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which that part of the values lies; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0


def table(rows: Sequence[ActorMeasurement]) -> str:
    """The rows under a line of titles."""
    columns = "   p50 us    p99 us   per second    amount  noise %"
    lines = [f"{'':32} {'':14} {'by':8} {columns}"]
    for row in rows:
        latency = f"{row.p50_us:9.1f} {row.p99_us:9.1f}" if row.p50_us else f"{'':9} {'':9}"
        rate = f"{row.per_second:12,.0f}" if row.per_second else f"{'':12}"
        amount = f"{row.amount:9,.1f}" if row.amount else f"{'':9}"
        noise = f"{row.noise_percent:8.1f}" if row.noise_percent else ""
        lines.append(f"{row.what:32} {row.where:14} {row.by:8} {latency} {rate} {amount} {noise}".rstrip())
    return "\n".join(lines)


EXIT_MISSING = 3
WARM_UP = 200
BATCH = 1000
SIZES = (("ask 1 B", 1), ("ask 1 MiB", 1 << 20))
WHERE = "other process"
BACK_S = 60.0
"""Time that a killed process may take to come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The actor that is measured.

    echo: ask the actor, in another process; tell: send it bytes and expect no answer; spawn: make another
    actor and return the process that it answers from; spawns: of so many; pid: the actor's process;
    gone: what an ask of a killed one raises; none if nobody brings it back.
    """

    echo: Callable[[bytes], Awaitable[Any]]
    tell: Callable[[bytes], Awaitable[Any]]
    spawn: Callable[[], Awaitable[int]]
    spawns: int
    pid: Callable[[], Awaitable[int]]
    gone: tuple[type[Exception], ...]


async def measure(subject: Subject, seconds: float, in_flight: int) -> list[ActorMeasurement]:
    """All of it."""
    rows = await _asks(subject, seconds)
    rows.append(await _asks_in_flight(subject, seconds, in_flight))
    rows.append(await _tells(subject, seconds))
    rows += await _spawns(subject)
    if subject.gone:
        rows.append(await _restart(subject))
    return rows


async def _asks(subject: Subject, seconds: float) -> list[ActorMeasurement]:
    rows: list[ActorMeasurement] = []
    for what, nbytes in SIZES:
        payload, times_us = bytes(nbytes), list[float]()
        for _ in range(WARM_UP):
            await subject.echo(payload)
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            began_ns = time.perf_counter_ns()
            await subject.echo(payload)
            times_us.append((time.perf_counter_ns() - began_ns) / 1e3)
        p50_us, p99_us = percentile(times_us, 0.5), percentile(times_us, 0.99)
        rate = len(times_us) / seconds
        rows.append(ActorMeasurement(what=what, where=WHERE, p50_us=p50_us, p99_us=p99_us, per_second=rate))
    return rows


async def _asks_in_flight(subject: Subject, seconds: float, in_flight: int) -> ActorMeasurement:
    count, began_s = 0, time.perf_counter()

    async def work() -> None:
        nonlocal count
        while time.perf_counter() < began_s + seconds:
            await subject.echo(b"x")
            count += 1

    await asyncio.gather(*(work() for _ in range(in_flight)))
    rate = count / (time.perf_counter() - began_s)
    return ActorMeasurement(what=f"asks, {in_flight} in flight", where=WHERE, per_second=rate)


async def _tells(subject: Subject, seconds: float) -> ActorMeasurement:
    async def tell() -> None:
        await subject.tell(b"x")

    async def echo() -> None:
        await subject.echo(b"x")

    return ActorMeasurement(what="tells", where=WHERE, per_second=await tells_per_second(tell, echo, seconds))


async def tells_per_second(
    tell: Callable[[], Awaitable[object]], echo: Callable[[], Awaitable[object]], seconds: float
) -> float:
    """Of the median batch of `BATCH` tells and the ask that follows them, so that all have been handled."""
    times_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while (began_s := time.perf_counter()) < end_s:
        for _ in range(BATCH):
            await tell()
        await echo()
        times_s.append(time.perf_counter() - began_s)
    return BATCH / percentile(times_s, 0.5)


async def _spawns(subject: Subject) -> list[ActorMeasurement]:
    """Spawns a second, and what their processes hold more than before, by actor."""
    first = await subject.pid()
    before = _resident_bytes(first)
    began_s = time.perf_counter()
    pids = {await subject.spawn() for _ in range(subject.spawns)} | {first}
    rate = subject.spawns / (time.perf_counter() - began_s)
    nbytes = (sum(_resident_bytes(pid) for pid in pids) - before) / subject.spawns
    return [
        ActorMeasurement(what="spawns", where=WHERE, per_second=rate),
        ActorMeasurement(what=f"bytes an idle actor, of {subject.spawns:,}", where=WHERE, amount=nbytes),
    ]


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def _restart(subject: Subject, times: int = 5) -> ActorMeasurement:
    """From a SIGKILL of its process to its next answer."""
    times_us: list[float] = []
    for _ in range(times):
        pid = await subject.pid()
        began_ns = time.perf_counter_ns()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(BACK_S):
            while True:
                with suppress(*subject.gone):
                    if await subject.pid() != pid:
                        break
                await asyncio.sleep(0.001)
        times_us.append((time.perf_counter_ns() - began_ns) / 1e3)
    p50_us, p99_us = percentile(times_us, 0.5), percentile(times_us, 0.99)
    return ActorMeasurement(what="restart of a killed process", where=WHERE, p50_us=p50_us, p99_us=p99_us)


async def _xoscar(library: Any, seconds: float, in_flight: int) -> list[ActorMeasurement]:
    from zbmd.tools.bench.peers.xoscar_pair import Echo as XoscarEcho

    pool = await library.create_actor_pool("127.0.0.1:0", n_process=2)
    async with pool:
        place = library.allocate_strategy.ProcessIndex(1)

        async def create(uid: str) -> Any:
            return await library.create_actor(
                XoscarEcho, address=pool.external_address, uid=uid, allocate_strategy=place
            )

        gone = (library.errors.XoscarError, OSError, EOFError)
        actor, number = await create("echo"), iter(range(1, 1 << 30))

        async def spawn() -> int:
            return int(await (await create(f"echo{next(number)}")).pid())

        subject = Subject(
            echo=actor.echo, tell=actor.echo.tell, spawn=spawn, spawns=1000, pid=actor.pid, gone=gone
        )
        return await measure(subject, seconds, in_flight)


class _Echo:
    """What Ray makes an actor of."""

    def echo(self, payload: bytes) -> bytes:
        """Answer."""
        return payload

    def pid(self) -> int:
        """Return the process that it runs in."""
        return os.getpid()


async def _ray(library: Any, seconds: float, in_flight: int) -> list[ActorMeasurement]:
    library.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        # An actor is a process of its own; without a core to itself, so that all have room.
        gone = (library.exceptions.RayError,)
        make = library.remote(_Echo).options(max_concurrency=1, num_cpus=0, max_restarts=-1).remote
        actor, kept = make(), list[Any]()

        async def tell(payload: bytes) -> None:
            actor.echo.remote(payload)

        async def pid() -> int:
            return int(await actor.pid.remote())

        async def spawn() -> int:
            kept.append(make())
            return int(await kept[-1].pid.remote())

        subject = Subject(echo=actor.echo.remote, tell=tell, spawn=spawn, spawns=8, pid=pid, gone=gone)
        return await measure(subject, seconds, in_flight)
    finally:
        library.shutdown()


async def _monarch(library: Any, seconds: float, in_flight: int) -> list[ActorMeasurement]:
    endpoints = {"echo": library.endpoint(_monarch_echo), "pid": library.endpoint(_monarch_pid)}
    echo_class = type("MonarchEcho", (library.Actor,), {**endpoints, "__module__": __name__})
    processes = library.this_host().spawn_procs(per_host={"procs": 1})
    actor, kept = processes.spawn("echo", echo_class), list[Any]()

    async def tell(payload: bytes) -> None:
        actor.echo.broadcast(payload)

    async def spawn() -> int:
        kept.append(processes.spawn(f"echo{len(kept)}", echo_class))
        return int(await kept[-1].pid.call_one())

    # It reports a process that has ended, and restarts none by itself.
    subject = Subject(
        echo=actor.echo.call_one, tell=tell, spawn=spawn, spawns=100, pid=actor.pid.call_one, gone=()
    )
    return await measure(subject, seconds, in_flight)


async def _monarch_pid(_: Any) -> int:
    return os.getpid()


async def _monarch_echo(_: Any, payload: bytes) -> bytes:
    return payload


LIBRARIES: dict[str, tuple[str, Callable[[Any, float, int], Awaitable[list[ActorMeasurement]]]]] = {
    "xoscar": ("xoscar", _xoscar),
    "ray": ("ray", _ray),
    "monarch": ("monarch.actor", _monarch),
}
INSTALL = {"xoscar": "xoscar", "ray": "ray", "monarch": "torchmonarch"}
"""Their names for pip."""


def main() -> int:
    """Measure one library."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--in-flight", type=int, default=1)
    arguments = parser.parse_args()
    module, run = LIBRARIES[arguments.library]
    try:
        library = importlib.import_module(module)
    except ImportError as error:
        print(error, file=sys.stderr)
        return EXIT_MISSING
    if not arguments.seconds:
        return 0

    async def all_rows() -> list[ActorMeasurement]:
        return await run(library, arguments.seconds, arguments.in_flight)

    print(json.dumps([asdict(row) for row in asyncio.run(all_rows())]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
