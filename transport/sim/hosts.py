"""Processes of a `Simulation`: where each runs, and the kills between two effects of a machine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias

from zbmd.transport.sim.faults import CrashWithin
from zbmd.transport.sim.model import SIM_START_NS, Arrived, KillPoint, MessageT, Process, Stimulus
from zbmd.transport.sim.network import NetworkPath

# ---- kills: where they could have been, and where they are to be


@dataclass(slots=True, eq=False)
class _Doom:
    """A `CrashWithin` whose time has come, and how many effects are left until it strikes."""

    fault: CrashWithin
    left: int


class Kills:
    """Those of one simulation.

    delivered: every stimulus so far: process, incarnation, its number, how many effects it had, and when;
    armed: whether `strikes` has anything to look for.
    """

    def __init__(self) -> None:
        self.delivered: list[tuple[str, int, int, int, int]] = []
        self.armed = False
        self._points: dict[tuple[str, int, int], int] = {}
        self._dooms: dict[str, list[_Doom]] = {}

    def aim(self, point: KillPoint) -> None:
        """Kill at this point."""
        self._points[point.process, point.incarnation, point.delivery] = point.effects
        self.armed = True

    def arm(self, fault: CrashWithin) -> None:
        """The fault's time has come: count the effects of its process, whichever incarnation it is."""
        self._dooms.setdefault(fault.process, []).append(_Doom(fault, fault.effects))
        self.armed = True

    def disarm(self) -> None:
        """No fault strikes any more."""
        self._dooms.clear()

    def strikes(
        self, process: str, incarnation: int, delivery: int, effects: int
    ) -> tuple[int, CrashWithin | None] | None:
        """After how many of the stimulus's effects the process dies, and of what fault; else None."""
        done = self._points.pop((process, incarnation, delivery), None)
        if done is not None:
            return done, None
        dooms = self._dooms.get(process)
        if not dooms:
            return None
        soonest = min(dooms, key=lambda doom: doom.left)
        strikes = soonest.left <= effects
        passed = min(soonest.left, effects)
        for doom in dooms:
            doom.left -= passed
        if not strikes:
            return None
        dooms.remove(soonest)
        return passed, soonest.fault

    def points(self) -> tuple[KillPoint, ...]:
        """See `Simulation.kill_points`."""
        return tuple(
            KillPoint(name, incarnation, delivery, effects)
            for name, incarnation, delivery, total, _ in self.delivered
            for effects in range(total + 1)
        )

    def faults(self, victims: Collection[str]) -> list[CrashWithin]:
        """See `Simulation.kill_faults`."""
        found: list[CrashWithin] = []
        done: dict[tuple[str, int], int] = {}
        for name, _, _, total, at_ns in self.delivered:
            if name not in victims:
                continue
            before = done.get((name, at_ns), 0)  # what it takes at one moment counts as one
            done[name, at_ns] = before + total
            found += [
                CrashWithin(process=name, effects=effects, at_ns=at_ns - SIM_START_NS, for_ns=0)
                for effects in range(before, before + total + 1)
            ]
        return found


Factory: TypeAlias = Callable[[int], Process[MessageT]]
"""Makes a process for the incarnation it is given."""


@dataclass(slots=True, eq=False)
class Host(Generic[MessageT]):
    """A process's place: the factory outlives incarnations, the rest belongs to the current one."""

    name: str
    factory: Factory[MessageT]
    process: Process[MessageT] | None = None
    incarnation: int = 0
    starting: bool = False
    ended_clean: bool = False
    deliveries: int = 0
    paused_until_ns: int = 0
    timers: dict[str, int] = field(default_factory=dict[str, int])
    told: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    routes: dict[str, tuple[Host[MessageT], NetworkPath]] = field(default_factory=dict[str, Any])


Entry: TypeAlias = tuple[
    int, float, int, Host[MessageT] | None, int, Stimulus[MessageT] | Callable[[], None], int
]
"""What is under way: time; tie, drawn; number. Then the host, its incarnation, the stimulus and, of a timer,
its version; or None, 0, and an act of the scenario or of the simulator itself."""

Flying: TypeAlias = tuple[int, float, int, Arrived[MessageT]]
"""A message under way: time, tie, number."""
