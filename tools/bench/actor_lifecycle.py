"""Time what actors cost apart from messages: to spawn, to keep, to restart, beside one that is flooded."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import ClassVar

import structlog

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import Ref
from zbmd.actors.errors import ActorFailed
from zbmd.actors.process_pool.devices import DeviceWorker, ProcessPool, cpu_cores
from zbmd.actors.supervision.machine import INTENSITY_MAX
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.actors.system import ActorSystem
from zbmd.tools.bench.peers.actor_asks import ActorMeasurement, percentile

TIMEOUT_S = 30.0
ACTORS = 20_000
NEIGHBOURS = 50
ROUNDS = 7
HERE = "this process"


class Nudge(Contract, id="bench.nudge"):
    """A message without meaning."""


class Break(Contract, id="bench.break"):
    """Make the actor fail."""


class Idle(Actor, remote=True):
    """Waits to be asked."""

    @on(Nudge)
    async def nudge(self, _: Nudge) -> None:
        """Answer."""


class Fragile(Actor):
    """Fails when told to, and notes when it began."""

    began_ns: ClassVar[int] = 0
    begun: ClassVar[asyncio.Event]

    async def started(self) -> None:
        """Take the time."""
        Fragile.began_ns = time.perf_counter_ns()
        Fragile.begun.set()

    @on(Break)
    async def fail(self, _: Break) -> None:
        """Fail."""
        raise RuntimeError("as told")


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def spawning(system: ActorSystem, count: int = ACTORS) -> list[ActorMeasurement]:
    """Spawns a second, and resident bytes of an idle actor that has answered once."""
    before_bytes = _resident_bytes()
    began_s = time.perf_counter()
    refs = [await system.spawn(Idle) for _ in range(count)]
    rate = count / (time.perf_counter() - began_s)
    for ref in refs:
        await ref.ask(Nudge(), timeout=TIMEOUT_S)
    nbytes = (_resident_bytes() - before_bytes) / count
    for ref in reversed(refs):
        await system.terminate(ref)
    return [
        ActorMeasurement(what="spawns", where=HERE, per_second=rate),
        ActorMeasurement(what=f"bytes an idle actor, of {count:,}", where=HERE, amount=nbytes),
    ]


async def restarting(system: ActorSystem, times: int = 200) -> list[ActorMeasurement]:
    """From a failure, as its asker learns of it, to `started()` of the next incarnation."""
    Fragile.begun = asyncio.Event()
    child = ChildSpec(name="fragile", actor=Fragile)
    supervisor = await system.supervise([child], intensity=INTENSITY_MAX)
    times_us: list[float] = []
    failed_ns = 0
    for _ in range(times):
        Fragile.begun.clear()
        try:
            await system.ref("fragile").ask(Break(), timeout=TIMEOUT_S)
        except ActorFailed:
            failed_ns = time.perf_counter_ns()
        await Fragile.begun.wait()
        times_us.append(max(0, Fragile.began_ns - failed_ns) / 1e3)
    await system.terminate(supervisor)
    p50_us, p99_us = percentile(times_us, 0.5), percentile(times_us, 0.99)
    return [ActorMeasurement(what="restart of a crashed actor", where=HERE, p50_us=p50_us, p99_us=p99_us)]


async def restarting_process(system: ActorSystem, times: int = 10) -> ActorMeasurement:
    """From a SIGKILL of a supervised process to the first answer of an actor in the next one.

    A worker of `zbmd.actors.process_pool.devices`, forked from its supervisor's template.
    """
    workers = ProcessPool(system, cpu_cores(capacity=2), modules=[__name__], failures=1000)
    supervisor = await system.supervise([workers.child("killed")], intensity=INTENSITY_MAX)
    times_us: list[float] = []
    try:
        for _ in range(times):
            cell = system.find("killed", 0)
            assert (
                cell is not None and isinstance(cell.actor, DeviceWorker) and cell.actor.process is not None
            )
            life, began_ns = system.peers["killed"], time.perf_counter_ns()
            os.kill(cell.actor.process.pid, signal.SIGKILL)
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    if system.peers.get("killed", life) != life:
                        break
                    await asyncio.sleep(0.001)
            await (await system.spawn_on("killed", Idle, timeout=TIMEOUT_S)).ask(Nudge(), timeout=TIMEOUT_S)
            times_us.append((time.perf_counter_ns() - began_ns) / 1e3)
            await settled(system, "killed")
    finally:
        await system.terminate(supervisor)
        await workers.close()
    p50_us, p99_us = percentile(times_us, 0.5), percentile(times_us, 0.99)
    return ActorMeasurement(what="restart of a killed process", where=HERE, p50_us=p50_us, p99_us=p99_us)


async def settled(system: ActorSystem, name: str) -> None:
    """Its actor here has seen it come up, so that the next kill meets one that runs."""
    cell = system.find(name, 0)
    if cell is not None:
        await system.until_started(cell)


@dataclass(slots=True)
class Times:
    """Return the times of asks: wall clock, and CPU time of the thread, which ignores other load."""

    wall_us: list[float] = field(default_factory=list[float])
    own_us: list[float] = field(default_factory=list[float])


async def _ask_all(refs: list[Ref], seconds: float) -> Times:
    times = Times()
    end_s = time.perf_counter() + seconds
    while not times.wall_us or time.perf_counter() < end_s:  # once, however short the time
        for ref in refs:
            began_ns, began_own_ns = time.perf_counter_ns(), time.thread_time_ns()
            await ref.ask(Nudge(), timeout=TIMEOUT_S)
            own_ns, wall_ns = time.thread_time_ns() - began_own_ns, time.perf_counter_ns() - began_ns
            times.wall_us.append(wall_ns / 1e3)
            times.own_us.append(own_ns / 1e3)
    return times


async def fairness(system: ActorSystem, seconds: float) -> list[ActorMeasurement]:
    """Asks of quiet actors, alone and while another one in the process receives more than it can handle.

    In turns, so that a drift of the machine meets both. The growth is the median over rounds.
    """
    flooded = await system.spawn(Idle, name="flooded")
    quiet = [await system.spawn(Idle) for _ in range(NEIGHBOURS)]
    cell = system.find("flooded", 0)
    assert cell is not None

    async def flood() -> None:
        while True:
            await flooded.tell(Nudge())

    alone, beside, handled = list[Times](), list[Times](), 0
    for _ in range(ROUNDS):
        alone.append(await _ask_all(quiet, seconds / ROUNDS))
        flooding = asyncio.create_task(flood())
        before = cell.handled
        beside.append(await _ask_all(quiet, seconds / ROUNDS))
        handled += cell.handled - before
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        await flooded.ask(Nudge(), timeout=TIMEOUT_S)
    rows = [
        ActorMeasurement(
            what=what,
            where=HERE,
            p50_us=median(percentile(times.wall_us, 0.5) for times in rounds),
            p99_us=median(percentile(times.wall_us, 0.99) for times in rounds),
        )
        for what, rounds in (("ask, alone", alone), ("ask, beside a flooded one", beside))
    ]
    rows.append(
        ActorMeasurement(what="messages of the flooded one", where=HERE, per_second=handled / seconds)
    )
    p99_grows = [
        (
            percentile(b.wall_us, 0.99) / percentile(a.wall_us, 0.99),
            percentile(b.own_us, 0.99) / percentile(a.own_us, 0.99),
        )
        for a, b in zip(alone, beside, strict=True)
    ]
    for place, what in enumerate(("growth of the p99, times", "the same of the loop's own time")):
        rows.append(
            ActorMeasurement(what=what, where=HERE, amount=median(grows[place] for grows in p99_grows))
        )
    return rows


async def life(seconds: float) -> list[ActorMeasurement]:
    """All of it, in a system of its own."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    system = ActorSystem("life")
    try:
        rows = await spawning(system)
        rows += await restarting(system)
        rows.append(await restarting_process(system))
        return rows + await fairness(system, seconds)
    finally:
        await system.stop()
