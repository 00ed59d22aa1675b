"""Time capture: what a recorded message costs its process, how fast a log replays, how fast a step is found.

    python -m zbmd.tools.lab.bench.actors.capture [--seconds S] [--events N] [--only PART] [--json]

A message's cost is measured on a real link between two processes: round trips with nothing recorded, with
the ring and with a log, in turns, each with both of its messages recorded by the asking side. `none again` is
`none` against itself: the noise. `cpu ns` is the time that all threads of the process spend on a record when
nothing else is done, writing included.
Replay runs the commit machine over a simulated job's log.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import Ref
from zbmd.actors.replay.recording import captured_system
from zbmd.actors.system import ActorSystem
from zbmd.tools.bench.actors import Echo, Ping
from zbmd.tools.cli.options import add_json, script_parser
from zbmd.training.redundancy.machine import MIRROR, Action, Event, Mirror, mirror_config
from zbmd.training.scenarios.commit import CommitScenario
from zbmd.training.scenarios.world import CommitOptions
from zbmd.transport import capture
from zbmd.transport.capture.files import LogFiles
from zbmd.transport.capture.records import RawRecord, RecordType
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.frames import HEADER_BYTES, FrameHeader, pack_header
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Link
from zbmd.transport.shm.connect import Endpoint, dial, listen
from zbmd.transport.shm.link import ShmLink

TIMEOUT_S = 30.0
ASKS = 200
ROUNDS_MIN = 4
COOKIE = bytes(32)
ORIGIN = capture.Origin(process="bench", incarnation=1)
BATCH = 500
PAYLOAD = bytes(64)
FRAME = pack_header(FrameHeader(payload_bytes=len(PAYLOAD), job=1, incarnation=1)) + PAYLOAD
STEP_EVENTS = 1000
LOOKUPS = 50


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


def _endpoint(name: str, recorder: capture.Recorder | None = None) -> Endpoint:
    clock = HybridClock() if recorder is None else recorder.clocks.hybrid
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1, contracts=fingerprints())
    return Endpoint(identity=identity, cookie=COOKIE, clock=clock, recorder=recorder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Effect of recording on a round trip: median, and what a recorded message adds to it, ns."""

    recorder: str
    round_trip_p50_ns: float
    added_ns: float
    thread_ns: float
    cpu_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Finding a step of a log of `events` records: opening it, finding the step, reading its first record."""

    index: str
    events: int
    p50_ms: float
    max_ms: float


class Asker:
    """Asks over a link, one question after the other."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._recorder: capture.Recorder | None = None
        self._stream = 0
        self._left = 0
        self._asked_ns = 0
        self._times_ns: list[int] = []
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        link.on_frame = self._answered

    async def ask(self, recorder: capture.Recorder | None, stream: int) -> float:
        """The median of `BATCH` round trips, ns."""
        self._recorder, self._stream, self._left = recorder, stream, BATCH
        self._times_ns = []
        self._done = asyncio.get_running_loop().create_future()
        self._send()
        await self._done
        return statistics.median(self._times_ns)

    def _send(self) -> None:
        self._asked_ns = time.perf_counter_ns()
        self._link.send(PAYLOAD)
        if self._recorder is not None:
            self._recorder.frame_out(self._stream, FRAME[:HEADER_BYTES], PAYLOAD, self._asked_ns)

    def _answered(self, header: FrameHeader, payload: memoryview) -> None:
        if self._recorder is not None:
            self._recorder.frame_in(self._stream, FRAME, header.hlc)
        self._times_ns.append(time.perf_counter_ns() - self._asked_ns)
        self._left -= 1
        if self._left:
            self._send()
        else:
            self._done.set_result(None)


async def _serve(address: str) -> None:
    link = await dial(address, _endpoint("echo"))
    ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    link.on_frame = lambda header, payload: link.send(bytes(payload))
    link.on_closed = ended.set_result
    await ended


async def _round_trips(seconds: float) -> dict[str, float]:
    """The median round trip with each recorder, ns; the kinds take turns, so that all meet the same noise."""
    kinds = ("none", "none again", "ring", "log")
    medians: dict[str, list[float]] = {kind: [] for kind in kinds}
    address = f"zbmd-bench-{os.getpid()}-{secrets.token_hex(4)}"
    came: asyncio.Future[ShmLink] = asyncio.get_running_loop().create_future()
    listener = listen(address, came.set_result, _endpoint("bench"))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "zbmd.tools.lab.bench.actors.capture", "--serve", address
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            link = await came
        asker = Asker(link)
        with new_recorder("ring") as ring, new_recorder("log") as log:
            recorders = {"none": None, "none again": None, "ring": ring, "log": log}
            streams = {kind: 0 if one is None else one.link("echo", 1) for kind, one in recorders.items()}
            end_s = time.perf_counter() + seconds * len(kinds)
            while time.perf_counter() < end_s:
                for kind in kinds:
                    medians[kind].append(await asker.ask(recorders[kind], streams[kind]))
        link.close()
    finally:
        listener.close()
        await child.wait()
    return {kind: statistics.median(found) for kind, found in medians.items()}


def _append_costs(kind: str) -> tuple[float, float]:
    """ns of the recording thread, and of all threads, for one record, when nothing else is done."""
    count, rounds = 20_000, 10
    with new_recorder(kind) as recorder:
        if recorder is None:
            return 0.0, 0.0
        stream = recorder.link("echo", 1)
        thread_ns = 0
        cpu_before_ns = time.process_time_ns()
        for _ in range(rounds):
            before_ns = time.thread_time_ns()
            for hlc in range(count // 2):
                recorder.frame_out(stream, FRAME[:HEADER_BYTES], PAYLOAD, hlc)
                recorder.frame_in(stream, FRAME, hlc)
            thread_ns += time.thread_time_ns() - before_ns
            if isinstance(recorder, capture.LogRecorder):
                recorder.flush()
        cpu_ns = time.process_time_ns() - cpu_before_ns
    return thread_ns / count / rounds, cpu_ns / count / rounds


def bench_messages(seconds: float) -> list[Message]:
    """Measure what a recorded message costs."""
    medians = uvloop.run(_round_trips(seconds))
    found: list[Message] = []
    for kind, median_ns in medians.items():
        thread_ns, cpu_ns = _append_costs(kind)
        added_ns = (median_ns - medians["none"]) / 2  # a question and its answer
        found.append(
            Message(
                recorder=kind,
                round_trip_p50_ns=median_ns,
                added_ns=added_ns,
                thread_ns=thread_ns,
                cpu_ns=cpu_ns,
            )
        )
    return found


# ---- asks: a message to an actor of another process, over a link, and its answer
#
# The asker is a *script* (code that is no actor), whose frames its links record; or an *actor*, whose life is
# recorded as well, to be replayed, wherever a log is asked for. All of them ask in turn, in rounds, each
# round in another order, so that all meet the same noise; every asker has a system and a link of its own.


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


async def serve_asks(addresses: list[str]) -> None:
    """Answer the asks of one system for each address, until the last has gone."""
    system = ActorSystem("child")
    await system.spawn(Echo, name="echo")
    loop = asyncio.get_running_loop()
    ends: list[asyncio.Future[object]] = []
    for address in addresses:
        ended: asyncio.Future[object] = loop.create_future()
        system.attach(await dial(address, _endpoint("child")), on_closed=ended.set_result)
        ends.append(ended)
    await asyncio.wait(ends)
    await system.stop()


Ask = Callable[[], Coroutine[Any, Any, float]]
"""Asks `ASKS` times; returns the median, ns."""


async def _asker(asking: Asking, system: ActorSystem) -> Ask:
    echo = system.ref("child/echo")
    if not asking.actor:
        return lambda: _median_ask(echo, ASKS)
    actor = await system.spawn(AskingActor, name="asker")

    async def ask() -> float:
        return (await actor.ask(Go(echo, ASKS), reply=Gone, timeout=TIMEOUT_S)).p50_ns

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
                async with asyncio.timeout(TIMEOUT_S):
                    system.attach(await link)
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


def _print_asks(costs: list[AskCost]) -> None:
    print(f"{'ask':26} {'p50 ns':>9} {'added/message':>14} {'p25':>7} {'p75':>7}")
    for cost in costs:
        print(
            f"{cost.name:26} {cost.ask_p50_ns:9,.0f} {cost.added_ns:14,.0f} "
            f"{cost.added_p25_ns:7,.0f} {cost.added_p75_ns:7,.0f}"
        )


# ---- replay


def bench_replay(events: int) -> dict[str, float]:
    """Replay the machines of simulated jobs, at least `events` events of them: events a second."""
    with tempfile.TemporaryDirectory(prefix="zbmd-bench-") as directory:
        recorder = capture.LogRecorder(Path(directory), ORIGIN, capture.Clocks(hybrid=HybridClock()))

        class Recorded(Mirror):
            def __init__(self, **arguments: Any) -> None:
                super().__init__(**arguments)
                config = mirror_config(self, outlives=arguments["outlives"])
                name = f"rank{self.place}"
                self._tap = capture.Tap(recorder, MIRROR, name, MIRROR.build(config), config)

            def handle(self, event: Event, *, now_ns: int) -> list[Action]:
                taken[0] += 1
                self._tap.handle(event, now_ns=now_ns)
                return super().handle(event, now_ns=now_ns)

        taken = [0]
        seed = 0
        options = CommitOptions(world_size=4, steps=50, kills=2)
        while taken[0] < events:
            CommitScenario(mirror=Recorded).run(seed, options)
            seed += 1
        recorder.close()
        before_s = time.perf_counter()
        verdicts = list(capture.replay_log(Path(directory)))
        took_s = time.perf_counter() - before_s
    assert all(isinstance(verdict, capture.Identical) for verdict in verdicts), "the replay is not identical"
    replayed = sum(verdict.events for verdict in verdicts if isinstance(verdict, capture.Identical))
    return {"events": replayed, "seconds": took_s, "events_per_s": replayed / took_s}


# ---- the index


def _write_log(directory: Path, events: int) -> Path:
    """A log of `events` records, a step every `STEP_EVENTS` of them."""
    files = LogFiles(
        directory,
        ORIGIN,
        capture.DiskLimits(segment_bytes=16 << 20),
        capture.Clocks(hybrid=HybridClock()).anchor,
    )
    rng = random.Random(1)
    for first in range(0, events, STEP_EVENTS):
        records: list[RawRecord] = [(int(RecordType.MARK), 1, first, first, first // STEP_EVENTS)]
        records += [
            (int(RecordType.FRAME_IN), 1, number, number, FRAME + rng.randbytes(16))
            for number in range(first + 1, first + STEP_EVENTS)
        ]
        files.write(records)
    files.close()
    return files.path


def bench_lookups(events: int) -> list[Lookup]:
    """Find random steps, with the index and without."""
    found: list[Lookup] = []
    rng = random.Random(2)
    with tempfile.TemporaryDirectory(prefix="zbmd-bench-") as name:
        path = _write_log(Path(name), events)
        for index in ("stored", "missing"):
            if index == "missing":
                for file in path.glob("*.zidx"):
                    file.unlink()
            times_ms: list[float] = []
            for _ in range(LOOKUPS):
                step = rng.randrange(events // STEP_EVENTS)
                before_ns = time.perf_counter_ns()
                (log,) = capture.open_log(Path(name)).processes
                place = log.find_step(step)
                assert place is not None and place.number == step * STEP_EVENTS, (step, place)
                next(log.entries(place))
                times_ms.append((time.perf_counter_ns() - before_ns) / 1e6)
            found.append(
                Lookup(index=index, events=events, p50_ms=statistics.median(times_ms), max_ms=max(times_ms))
            )
    return found


def _print_messages(rows: list[Message]) -> None:
    print(f"{'recorder':12} {'round trip ns':>14} {'added/message':>14} {'thread ns':>10} {'cpu ns':>8}")
    for row in rows:
        print(
            f"{row.recorder:12} {row.round_trip_p50_ns:14,.0f} {row.added_ns:14,.0f} "
            f"{row.thread_ns:10,.0f} {row.cpu_ns:8,.0f}"
        )


def _print_lookups(rows: list[Lookup]) -> None:
    for row in rows:
        print(
            f"find a step  {row.events:14,} events, index {row.index}: "
            f"p50 {row.p50_ms:.1f} ms, max {row.max_ms:.1f} ms"
        )


def _print_replay(found: dict[str, float]) -> None:
    print(f"replay       {found['events']:14,.0f} events, {found['events_per_s']:,.0f} a second")


PARTS: Final[dict[str, tuple[Callable[[argparse.Namespace], Any], Callable[[Any], None]]]] = {
    "messages": (lambda options: bench_messages(options.seconds), _print_messages),
    "asks": (lambda options: bench_asks(options.seconds), _print_asks),
    "replay": (lambda options: bench_replay(options.replayed), _print_replay),
    "lookups": (lambda options: bench_lookups(options.events), _print_lookups),
}
"""The measurement of each part, and the function that prints it."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print tables, or JSON."""
    parser = script_parser("lab.bench.actors.capture", __doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of round trips a recorder (default 1)")
    parser.add_argument(
        "--events", type=int, default=1_000_000, help="in the log to search (default 1000000)"
    )
    parser.add_argument("--replayed", type=int, default=20_000, help="events to replay (default 20000)")
    parser.add_argument("--only", choices=PARTS, help="run this part alone")
    add_json(parser)
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--serve-asks", nargs="+", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        uvloop.run(_serve(options.serve))
        return 0
    if options.serve_asks is not None:
        uvloop.run(serve_asks(options.serve_asks))
        return 0
    found: dict[str, Any] = {}
    for part in [options.only] if options.only else PARTS:
        measure, show = PARTS[part]
        found[part] = measure(options)
        if not options.json:
            show(found[part])
    if options.json:
        print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
