"""`World`: asyncio programs as simulated processes, with a network, disks and memory, under one seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias, assert_never

from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import LinkLimits
from zbmd.transport.sim.faults import (
    WORLD_FAULTS,
    Clog,
    Crash,
    CrashWithin,
    Cut,
    DiskFull,
    DiskReadErrors,
    DiskSlow,
    Fault,
    MemoryLimit,
    NetConditions,
    Partition,
    Pause,
    Skew,
    Slow,
    TornWrites,
    UnsupportedFault,
    names_of,
)
from zbmd.transport.sim.hosts import ProcessTable
from zbmd.transport.sim.links import LinkOptions, SimLink
from zbmd.transport.sim.loop import SimLoop
from zbmd.transport.sim.model import (
    CALM,
    MAX_EVENTS_DEFAULT,
    SIM_START_NS,
    Conditions,
    Deadlock,
    FailureKind,
    HistoryKind,
    Livelock,
    RunEnd,
)
from zbmd.transport.sim.network import Datagram, DatagramInbox, Network, OnLink, PathFlooded
from zbmd.transport.sim.process import LocalClock, LoopProcess, run_to_end
from zbmd.transport.sim.storage import MEMORY_BYTES_DEFAULT, SimDisk, SimMemory, SimSegment

CALLBACK_NS = 1_000
"""The virtual time that a callback of a process takes, half to one and a half times."""
DIAL_TIMEOUT_S = 5.0
TURNS_PER_DIGEST_RECORD = 64
"""Number of turns that one record of the order of turns covers."""

SIM_UID = 1000
PIDS_PER_PLACE = 10_000


class SimProcess(LoopProcess):
    """The handle that the program of a simulated process gets: its identity, clock, disk and network.

    `asyncio`, `time` and `random` mean this process's while it runs. Its end is that of its program: what
    tasks it left are cancelled, its links break unless it closed them.
    """

    def __init__(self, world: World, place: ProcessHome, rng: random.Random) -> None:
        super().__init__(
            place.name, place.incarnation, rng=rng, clock=place.clock, callback_ns=place.callback_ns
        )
        self.world = world
        self.disk = place.disk
        """Outlives this incarnation."""
        self.memory = SimMemory(place.memory_limit_bytes)
        self.segment: SimSegment | None = None
        self.hybrid_clock = HybridClock()
        self.main: asyncio.Task[None] | None = None
        self.pid = place.number * PIDS_PER_PLACE + place.incarnation
        self._datagrams = DatagramInbox(self.name, world.loop)

    def wall_ns(self) -> int:
        """This process's wall clock, ns since 1970."""
        return self.clock.wall_ns(self.world.loop.now_ns)

    def note(self, value: object) -> None:
        """Write a value into the history, for checkers and for whoever reads it."""
        self.world.record(self, HistoryKind.NOTE, value)

    def identity(self, options: LinkOptions) -> Identity:
        """Return the identity that this process proves at hello."""
        return Identity(
            name=options.hello or self.name,
            pid=self.pid,
            uid=SIM_UID,
            incarnation=self.incarnation,
            job=options.job,
            contracts=options.contracts,
        )

    def open_segment(self, *, slot: int, arena_bytes: int, inbox_bytes: int) -> SimSegment:
        """Memory that the peers of links made from now on can reach. It ends with this incarnation.

        Raises `OutOfMemory` beyond the process's limit, and `LocalProtocolError` if it has one.
        """
        if self.segment is not None:
            raise LocalProtocolError(f"{self.name} has opened its segment already")
        self.segment = SimSegment(
            slot,
            self.incarnation,
            memory=self.memory,
            local_ns=lambda: self.clock.local_ns(self.world.now_ns),
            arena_bytes=arena_bytes,
            inbox_bytes=inbox_bytes,
        )
        return self.segment

    def listen(
        self,
        on_link: OnLink,
        *,
        contracts: Mapping[str, str] | None = None,
        job: int = 0,
        limits: LinkLimits | None = None,
        hello: str = "",
    ) -> None:
        """Accept links; `on_link(link)` runs in this process. hello: what we call ourselves, or our name.

        Raises `LocalProtocolError` if it listens.
        """
        options = LinkOptions(
            contracts=dict(contracts or {}), job=job, limits=limits or LinkLimits(), hello=hello
        )
        self.world.network.listen(self, on_link, options)

    async def dial(
        self,
        to: str,
        *,
        contracts: Mapping[str, str] | None = None,
        job: int = 0,
        limits: LinkLimits | None = None,
        timeout_s: float = DIAL_TIMEOUT_S,
        hello: str = "",
    ) -> SimLink:
        """A link to the process `to`. hello: what we call ourselves there, by default our name.

        Raises `PeerLost` if it does not listen, `DeadlineExceeded`.
        """
        options = LinkOptions(
            contracts=dict(contracts or {}), job=job, limits=limits or LinkLimits(), hello=hello
        )
        return await self.world.network.dial(self, to, options, timeout_s)

    def send_datagram(self, to: str, data: bytes) -> None:
        """Send once: it may be lost, doubled or late. To its latest incarnation when it arrives."""
        self.world.network.send_datagram(self, to, data)

    async def receive_datagram(self) -> Datagram:
        """The next datagram; one task at a time may wait. Raises `LocalProtocolError` if another does."""
        return await self._datagrams.receive()

    def take_datagram(self, datagram: Datagram) -> bool:
        """The network delivers; False if there is no room."""
        return self._datagrams.put(datagram)


Program: TypeAlias = Callable[[SimProcess], Coroutine[Any, Any, None]]
"""The main function of a process, run again for each incarnation."""


@dataclass(slots=True, eq=False)
class ProcessHome:
    """The part of a process that outlives its incarnations."""

    name: str
    number: int
    program: Program
    clock: LocalClock
    disk: SimDisk
    callback_ns: int
    memory_limit_bytes: int = MEMORY_BYTES_DEFAULT
    incarnation: int = 0
    process: SimProcess | None = None
    starting: bool = False


class World(ProcessTable[ProcessHome]):
    """Programs under one seed. See the package's text for how to use it. Close it, or use it with `with`.

    seed: names the history; print it first. conditions: of the network, may be replaced at any time.
    """

    def __init__(self, seed: int | str, *, conditions: Conditions = CALM) -> None:
        super().__init__(seed, conditions)
        self.loop = SimLoop(seed)
        self.loop.on_turn = self._on_turn
        self.loop.on_unexpected = self._on_unexpected
        self.network = Network(self.loop, self.weather, self.process, self.record)
        self._unexpected: list[tuple[str, BaseException | None]] = []
        self._turns: list[int] = []
        self._strikes = Strikes(self)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Throw away what still runs. Idempotent."""
        self.loop.close()

    @property
    def supported(self) -> frozenset[type[Fault]]:
        """The faults that strike here: all."""
        return frozenset(WORLD_FAULTS)

    @property
    def now_ns(self) -> int:
        """True virtual time."""
        return self.loop.now_ns

    @property
    def events(self) -> int:
        """Callbacks run so far."""
        return self.loop.turns

    # -- building ------------------------------------------------------------------------------------

    def add(self, name: str, program: Program, *, start: bool = True, callback_ns: int = CALLBACK_NS) -> None:
        """Add a process: `program(process)` is its main coroutine, run again for each incarnation, from 1 on.

        With `start` the first one starts now. When the program returns, the process ends; when it raises,
        the run does. Raises `LocalProtocolError` if the name is taken.
        """
        disk = SimDisk(self.rng(f"disk/{name}"), self.loop.charge)
        number = len(self._places) + 1
        home = ProcessHome(name, number, program, LocalClock(), disk, callback_ns)
        self._new_place(name, home)
        if start:
            self.begin(home)

    # -- the scenario --------------------------------------------------------------------------------

    def call_at(self, at_ns: int, act: Callable[[], None]) -> None:
        """Run `act()` at true virtual time `at_ns`; acts of one moment run in the order they were given."""
        self.loop.act_at(at_ns, act)

    def crash(self, name: str) -> None:
        """SIGKILL `name` now; nothing if it does not live. No `finally` of it runs."""
        place = self.place(name)
        if place.process is not None:
            self._end(place, place.process, HistoryKind.CRASH)

    def pause(self, name: str, for_ns: int) -> None:
        """SIGSTOP `name` for a while: what comes for it waits."""
        process = self.place(name).process
        if process is not None:
            process.paused_until_ns = max(process.paused_until_ns, self.now_ns + for_ns)
            self.record(process, HistoryKind.PAUSE, f"for {for_ns} ns")

    def apply(self, fault: Fault) -> None:
        """Have `fault` strike at its time, counted from the start of virtual time."""
        self._strikes.apply(fault)

    def heal(self, core: frozenset[str], *, revive: bool) -> None:
        """No fault strikes from now on, and none of those that did lasts among `core`.

        What a process is busy with, such as a read from a slow disk, still takes its time. With `revive`,
        what is dead of the core starts again. All others stay as they are: dead, cut off.
        """
        self._strikes.heal(core, revive=revive)

    # -- looking -------------------------------------------------------------------------------------

    def process(self, name: str) -> SimProcess | None:
        """The incarnation of `name` that lives, if one does."""
        return self.place(name).process

    def digest(self) -> str:
        """A digest of the whole history, the order of all callbacks included: equal for equal seeds."""
        self._flush_turns()
        return self.history.digest()

    # -- running -------------------------------------------------------------------------------------

    def run(
        self,
        *,
        until: Callable[[], bool] | None = None,
        for_ns: int | None = None,
        max_events: int = MAX_EVENTS_DEFAULT,
    ) -> RunEnd:
        """Run until `until()` holds, nothing can run any more, or `for_ns` of virtual time have passed.

        Raises `SimulationFailure` when a checker fails, when a program or callback raises what nobody
        catches, or after `max_events` callbacks; and, unless `for_ns` is all that was asked for, when
        nothing can run although programs wait: a deadlock.
        """
        end_ns = None if for_ns is None else self.now_ns + for_ns
        with self.loop.entered():
            try:
                end = self._run(until, end_ns, max_events)
                self._check(0)
            except (Deadlock, Livelock, PathFlooded) as error:
                raise self._failure(str(error), FailureKind.LIVENESS) from error
        return end

    def _run(self, until: Callable[[], bool] | None, end_ns: int | None, max_events: int) -> RunEnd:
        loop, last = self.loop, self.loop.turns + max_events
        while loop.turns < last:
            if until is not None and until():
                return RunEnd.REACHED
            if loop.quiet():
                if (until or end_ns is None) and any(place.process for place in self._places.values()):
                    loop.take_turn()  # raises `Deadlock`
                return RunEnd.QUIET
            if end_ns is not None and loop.next_ns() > end_ns:
                loop.now_ns = end_ns
                return RunEnd.TIME_UP
            loop.take_turn()
            if self._unexpected:
                self._raise_unexpected()
            if self._checkers:
                self._check(loop.turns)
        if until is not None and until():
            return RunEnd.REACHED
        raise self._no_end(max_events)

    def _on_turn(self, now_ns: int, process: LoopProcess) -> None:
        turns = self._turns
        turns.append(now_ns)
        turns.append(process.pid if isinstance(process, SimProcess) else 0)
        if len(turns) >= 2 * TURNS_PER_DIGEST_RECORD:
            self._flush_turns()

    def _flush_turns(self) -> None:
        self.history.turns(self._turns)
        self._turns = []

    def _on_unexpected(self, process: LoopProcess | None, message: str, error: BaseException | None) -> None:
        self._unexpected.append((f"{process or 'the scenario'}: {message}: {error!r}", error))

    def _raise_unexpected(self) -> None:
        what, error = self._unexpected[0]
        self._unexpected.clear()
        kind = FailureKind.SAFETY if isinstance(error, AssertionError) else FailureKind.CRASH
        raise self._failure(what, kind) from error

    # -- life and death ------------------------------------------------------------------------------

    def begin(self, place: ProcessHome) -> None:
        """The next incarnation starts now."""
        place.starting = False
        place.incarnation += 1
        rng = self.rng(f"{place.name}#{place.incarnation}")
        process = place.process = SimProcess(self, place, rng)
        self.loop.add(process)
        self._strikes.on_start(process)
        self.record(process, HistoryKind.START, "")
        self.loop.call_soon(self._main, place, process, context=process.context.copy())

    def _main(self, place: ProcessHome, process: SimProcess) -> None:
        main = self.loop.create_task(run_to_end(place.program(process), process), name="main")
        process.main = main
        main.add_done_callback(lambda done: self._main_ended(place, process, done))

    def _main_ended(self, place: ProcessHome, process: SimProcess, main: asyncio.Task[None]) -> None:
        error = None if main.cancelled() else main.exception()
        if error is not None and not isinstance(error, SystemExit):
            self._on_unexpected(process, "its program raised", error)
        if place.process is process:
            self._end(place, process, HistoryKind.EXIT)

    def _end(self, place: ProcessHome, process: SimProcess, kind: HistoryKind) -> None:
        place.process = None
        self.record(process, kind, "")
        self.loop.kill(process)
        self.network.process_ended(process)
        if kind is HistoryKind.CRASH:
            place.disk.crash()

    # -- small parts ---------------------------------------------------------------------------------

    def _moment(self) -> tuple[int, int]:
        return self.loop.now_ns, self.loop.turns

    def record(self, process: SimProcess, kind: HistoryKind, detail: object) -> None:
        """Write into the history."""
        self.history.raw.append((self.now_ns, process.name, process.incarnation, kind, detail))

    def record_fault(self, fault: Fault, what: str) -> None:
        """A fault begins or ends."""
        self.history.raw.append((self.now_ns, "world", 0, HistoryKind.FAULT, f"{what} {fault}"))


LastingFault = Slow | Skew | DiskFull | DiskSlow | DiskReadErrors | TornWrites | MemoryLimit
"""Those that are in force at a process's place for a while, over restarts."""


class Strikes:
    """The faults of one world: those to come, and those in force."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._version = 0
        self._in_force: list[LastingFault] = []

    def apply(self, fault: Fault) -> None:
        """Have it strike at its time."""
        world = self._world
        for name in names_of(fault):
            world.place(name)
        end_ns = fault.at_ns + fault.for_ns
        match fault:
            case Crash(process=name):
                self._plan(fault.at_ns, fault, "crash", lambda: world.crash(name))
                if fault.for_ns:
                    self._plan(end_ns, fault, "restart", lambda: world.revive(name))
            case Pause(process=name, for_ns=for_ns):
                self._plan(fault.at_ns, fault, "begin", lambda: world.pause(name, for_ns))
            case Partition() | Cut() | Clog() | NetConditions():
                self._plan(fault.at_ns, fault, "begin", lambda: world.weather.begin(fault))
                self._plan(end_ns, fault, "end", lambda: world.weather.end(fault))
            case Slow() | Skew() | DiskFull() | DiskSlow() | DiskReadErrors() | TornWrites() | MemoryLimit():
                self._plan(fault.at_ns, fault, "begin", lambda: self._begin(fault))
                self._plan(end_ns, fault, "end", lambda: self._end(fault))
            case CrashWithin():
                raise UnsupportedFault("a program's effects take time: let a Crash fall between two")
            case _:
                assert_never(fault)

    def heal(self, core: frozenset[str], *, revive: bool) -> None:
        """See `World.heal`."""
        self._version += 1
        for fault in [fault for fault in self._in_force if fault.process in core]:
            self._end(fault)
        self._world.weather.heal(core)
        for name in sorted(core):
            process = self._world.process(name)
            if process is not None:
                self._wake(process)
            elif revive:
                self._world.revive(name)

    def on_start(self, process: SimProcess) -> None:
        """A new incarnation: what is in force at its place strikes it too."""
        self._settle(process.name)

    def _plan(self, at_ns: int, fault: Fault, what: str, act: Callable[[], None]) -> None:
        version = self._version

        def strike() -> None:
            if version == self._version:
                self._world.record_fault(fault, what)
                act()

        self._world.call_at(SIM_START_NS + at_ns, strike)

    def _begin(self, fault: LastingFault) -> None:
        self._in_force.append(fault)
        if isinstance(fault, Skew):
            self._world.place(fault.process).clock.step_wall(fault.step_ns)
        self._settle(fault.process)

    def _end(self, fault: LastingFault) -> None:
        self._in_force.remove(fault)
        if isinstance(fault, Skew):
            self._world.place(fault.process).clock.step_wall(-fault.step_ns)
        self._settle(fault.process)

    def _settle(self, name: str) -> None:
        """Bring the place in line with what is in force; of several faults of a kind the worst counts."""
        place = self._world.place(name)
        here = [fault for fault in self._in_force if fault.process == name]
        disk, process = place.disk, place.process
        disk.full = any(isinstance(fault, DiskFull) for fault in here)
        disk.torn = any(isinstance(fault, TornWrites) for fault in here)
        disk.delay_ns = max([fault.delay_ns for fault in here if isinstance(fault, DiskSlow)], default=0)
        disk.read_errors = max(
            [fault.probability for fault in here if isinstance(fault, DiskReadErrors)], default=0.0
        )
        place.memory_limit_bytes = min(
            [fault.limit_bytes for fault in here if isinstance(fault, MemoryLimit)],
            default=MEMORY_BYTES_DEFAULT,
        )
        drift_ppm = sum(fault.drift_ppm for fault in here if isinstance(fault, Skew))
        place.clock.set_drift(self._world.now_ns, drift_ppm)
        if process is not None:
            process.slowness = max([fault.factor for fault in here if isinstance(fault, Slow)], default=1.0)
            process.memory.limit_bytes = place.memory_limit_bytes
            self._world.loop.retime(process)

    def _wake(self, process: SimProcess) -> None:
        """Undo a pause. What the process is busy with, such as a read from a slow disk, takes its time."""
        process.paused_until_ns = min(process.paused_until_ns, self._world.now_ns)
        self._world.loop.reschedule(process)
