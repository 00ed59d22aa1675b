"""Time what capture adds to an ask, on the asking side; part of `zbmd.tools.lab.bench.actors.capture`.

An ask is a message to an actor of another process, over a link, and its answer. The asker is a *script* (code
that is no actor), whose frames its links record; or an *actor*, whose life is recorded besides, to be
replayed, wherever a log is asked for. All of them ask in turn, in rounds, each round in another order, so
that all meet the same noise; every asker has a system and a link of its own. `none again` is `none` against
itself: the noise.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import Ref
from zbmd.actors.replay.recording import captured_system
from zbmd.actors.system import ActorSystem
from zbmd.tools.bench.actors import Echo, Ping
from zbmd.transport import capture
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.identity import Identity
from zbmd.transport.shm.connect import Endpoint, dial, listen
from zbmd.transport.shm.link import ShmLink

TIMEOUT_S = 30.0
BATCH = 200
ROUNDS_MIN = 4
COOKIE = bytes(32)
ORIGIN = capture.Origin(process="bench", incarnation=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """One way to ask. recorder: `none`, `ring` or `log`; lives: the asker's life is recorded too."""

    name: str
    actor: bool
    recorder: str = "none"
    lives: bool = False


SCRIPT = "script, none"
ACTOR = "actor, none"
ASKING = (
    Asking(name=SCRIPT, actor=False),
    Asking(name="script, none again", actor=False),
    Asking(name="script, ring", actor=False, recorder="ring"),
    Asking(name="script, log", actor=False, recorder="log"),
    Asking(name=ACTOR, actor=True),
    Asking(name="actor, none again", actor=True),
    Asking(name="actor, ring", actor=True, recorder="ring"),
    Asking(name="actor, log without lives", actor=True, recorder="log"),
    Asking(name="actor, log", actor=True, recorder="log", lives=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskCost:
    """The median of an ask; what a message of it costs more than where nothing is recorded, ns.

    The latter is the median of the rounds' differences, with their quartiles.
    """

    name: str
    ask_p50_ns: float
    added_ns: float
    added_p25_ns: float
    added_p75_ns: float


class Go(Contract, id="bench.capture.go"):
    """Ask `count` questions, one after the other."""

    to: Ref
    count: int


class Gone(Contract, id="bench.capture.gone"):
    """The median of the asks, ns."""

    p50_ns: float


class AskingActor(Actor):
    """Asks from within a handler."""

    @on(Go)
    async def go(self, message: Go) -> Gone:
        """Ask."""
        return Gone(await _median_ask(message.to, message.count))


async def _median_ask(ref: Ref, count: int) -> float:
    question = Ping(1)
    times_ns: list[int] = []
    for _ in range(count):
        before_ns = time.perf_counter_ns()
        await ref.ask(question, timeout=TIMEOUT_S)
        times_ns.append(time.perf_counter_ns() - before_ns)
    return float(statistics.median(times_ns))


@contextmanager
def new_recorder(kind: str) -> Generator[capture.Recorder | None]:
    """A recorder of this kind, `none`, `ring` or `log`, and the end of it."""
    with tempfile.TemporaryDirectory(prefix="zbmd-bench-") as directory:
        recorder: capture.Recorder | None = None
        clocks = capture.Clocks(hybrid=HybridClock())
        if kind == "ring":
            recorder = capture.RingRecorder(ORIGIN, clocks)
        elif kind == "log":
            recorder = capture.LogRecorder(Path(directory), ORIGIN, clocks)
        try:
            yield recorder
        finally:
            if recorder is not None:
                recorder.close()


def _endpoint(name: str, recorder: capture.Recorder | None) -> Endpoint:
    clock = HybridClock() if recorder is None else recorder.clocks.hybrid
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1, contracts=fingerprints())
    return Endpoint(identity=identity, cookie=COOKIE, clock=clock, recorder=recorder)


async def serve_asks(addresses: list[str]) -> None:
    """Answer the asks of one system for each address, until the last has gone."""
    system = ActorSystem("child")
    await system.spawn(Echo, name="echo")
    loop = asyncio.get_running_loop()
    ends: list[asyncio.Future[object]] = []
    for address in addresses:
        ended: asyncio.Future[object] = loop.create_future()
        system.attach(await dial(address, _endpoint("child", None)), on_closed=ended.set_result)
        ends.append(ended)
    await asyncio.wait(ends)
    await system.stop()


Ask = Callable[[], Coroutine[Any, Any, float]]
"""Asks `BATCH` times; returns the median, ns."""


async def _asker(asking: Asking, system: ActorSystem) -> Ask:
    echo = system.ref("child/echo")
    if not asking.actor:
        return lambda: _median_ask(echo, BATCH)
    actor = await system.spawn(AskingActor, name="asker")

    async def ask() -> float:
        return (await actor.ask(Go(echo, BATCH), reply=Gone, timeout=TIMEOUT_S)).p50_ns

    return ask


class _Bench:
    """The systems of all askers, and the process that answers."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.systems: list[ActorSystem] = []
        self.asks: dict[str, Ask] = {}

    async def run(
        self, recorders: dict[str, capture.Recorder | None], seconds: float
    ) -> dict[str, list[float]]:
        """The medians of each asker's batches, a round each, ns."""
        addresses = [f"zbmd-bench-{os.getpid()}-{secrets.token_hex(4)}" for _ in ASKING]
        command = [sys.executable, "-m", "zbmd.tools.lab.bench.actors.capture", "--serve-asks", *addresses]
        links: list[asyncio.Future[ShmLink]] = [self._loop.create_future() for _ in ASKING]
        listeners = [
            listen(address, link.set_result, _endpoint(f"bench{n}", recorders[asking.recorder]))
            for n, (asking, address, link) in enumerate(zip(ASKING, addresses, links, strict=True))
        ]
        child = await asyncio.create_subprocess_exec(*command)
        try:
            for n, (asking, link) in enumerate(zip(ASKING, links, strict=True)):
                system = self._system(f"bench{n}", asking, recorders[asking.recorder])
                system.attach(await asyncio.wait_for(link, TIMEOUT_S))
                self.asks[asking.name] = await _asker(asking, system)
            return await self._rounds(seconds)
        finally:
            for listener in listeners:
                listener.close()
            for system in reversed(self.systems):
                await system.stop()
            await child.wait()

    def _system(self, name: str, asking: Asking, recorder: capture.Recorder | None) -> ActorSystem:
        if asking.lives:
            assert recorder is not None, f"{asking.name}: a life needs a recorder"
            system: ActorSystem = captured_system(name, recorder=recorder)
        else:
            system = ActorSystem(name)
        self.systems.append(system)
        return system

    async def _rounds(self, seconds: float) -> dict[str, list[float]]:
        medians: dict[str, list[float]] = {asking.name: [] for asking in ASKING}
        names = list(medians)
        end_s = time.perf_counter() + seconds * len(names)
        for number in itertools.count():
            if number >= ROUNDS_MIN and time.perf_counter() >= end_s:
                return medians
            first = number % len(names)
            for name in names[first:] + names[:first]:
                medians[name].append(await self.asks[name]())
        raise AssertionError("unreachable")


async def _measure(seconds: float) -> dict[str, list[float]]:
    with new_recorder("ring") as ring, new_recorder("log") as log:
        return await _Bench().run({"none": None, "ring": ring, "log": log}, seconds)


def bench_asks(seconds: float) -> list[AskCost]:
    """Measure what recording adds to an ask; `seconds` for each kind of asker."""
    medians = uvloop.run(_measure(seconds))
    costs: list[AskCost] = []
    for asking in ASKING:
        plain, found = medians[ACTOR if asking.actor else SCRIPT], medians[asking.name]
        # A question and its answer are two messages.
        added = [(mine - other) / 2 for mine, other in zip(found, plain, strict=True)]
        p25, p50, p75 = statistics.quantiles(added, n=4)
        costs.append(
            AskCost(
                name=asking.name,
                ask_p50_ns=statistics.median(found),
                added_ns=p50,
                added_p25_ns=p25,
                added_p75_ns=p75,
            )
        )
    return costs


def print_costs(costs: list[AskCost]) -> None:
    """As a table."""
    print(f"{'ask':26} {'p50 ns':>9} {'added/message':>14} {'p25':>7} {'p75':>7}")
    for cost in costs:
        print(
            f"{cost.name:26} {cost.ask_p50_ns:9,.0f} {cost.added_ns:14,.0f} "
            f"{cost.added_p25_ns:7,.0f} {cost.added_p75_ns:7,.0f}"
        )
