"""How faults strike a `World`, and how it is healed of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from zbmd.transport.sim.faults import (
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
from zbmd.transport.sim.model import SIM_START_NS
from zbmd.transport.sim.parts.memory import MEMORY_BYTES_DEFAULT

if TYPE_CHECKING:
    from zbmd.transport.sim.world import SimProcess, World

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
                    self._plan(end_ns, fault, "restart", lambda: self._revive(name))
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
                self._revive(name)

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

    def _revive(self, name: str) -> None:
        place = self._world.place(name)
        if place.process is None and not place.starting:
            self._world.start(name, delay_ns=0)
