"""Processes of a simulated world: what `Simulation` and `World` share, and kills between two effects."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.sim.faults import CrashWithin
from zbmd.transport.sim.model import (
    SIM_START_NS,
    STORY_RECORDS,
    Arrived,
    Conditions,
    FailureKind,
    History,
    KillPoint,
    MessageT,
    Process,
    SimulationFailure,
    Stimulus,
)
from zbmd.transport.sim.network import NetworkPath, Weather

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
    noticed: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    routes: dict[str, tuple[Host[MessageT], NetworkPath]] = field(default_factory=dict[str, Any])


Entry: TypeAlias = tuple[
    int, float, int, Host[MessageT] | None, int, Stimulus[MessageT] | Callable[[], None], int
]
"""What is under way: time; tie, drawn; number. Then the host, its incarnation, the stimulus and, of a timer,
its version; or None, 0, and an act of the scenario or of the simulator itself."""

Flying: TypeAlias = tuple[int, float, int, Arrived[MessageT]]
"""A message under way: time, tie, number."""


class Place(Protocol):
    """The part of a process that outlives its incarnations."""

    name: str
    incarnation: int
    starting: bool

    @property
    def process(self) -> object | None:
        """The incarnation that lives, if one does."""
        ...


PlaceT = TypeVar("PlaceT", bound=Place)


class ProcessTable(ABC, Generic[PlaceT]):
    """The processes of a simulated world by name, with its checkers, its weather and its history.

    seed: names the history; print it first. conditions: may be replaced at any time (`sim.conditions = …`).
    """

    def __init__(self, seed: int | str, conditions: Conditions) -> None:
        self.seed = seed
        self.history = History()
        # One stream a purpose, so that a kill does not change the weather that came before it.
        self._network, self._deaths = self.rng("sim/net"), self.rng("sim/death")
        self.weather = Weather(conditions, self._network)
        self._places: dict[str, PlaceT] = {}
        self._checkers: list[tuple[str, Callable[[], None], int]] = []

    @abstractmethod
    def _moment(self) -> tuple[int, int]:
        """Return true virtual time, ns, and how many events have been taken."""

    @abstractmethod
    def call_at(self, at_ns: int, act: Callable[[], None]) -> None:
        """Run `act()` at virtual time `at_ns`; acts of one moment run in the order they were given."""

    @abstractmethod
    def begin(self, place: PlaceT) -> None:
        """The next incarnation starts now."""

    @abstractmethod
    def crash(self, name: str) -> None:
        """SIGKILL `name` now; nothing if it does not live."""

    def rng(self, purpose: str) -> random.Random:
        """A random stream of this seed for one purpose of the scenario, independent of all the others."""
        return random.Random(f"{self.seed}/{purpose}")

    @property
    def conditions(self) -> Conditions:
        """The network and the machine underneath, while no fault changes them."""
        return self.weather.conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        self.weather.conditions = conditions

    def add_checker(self, name: str, check: Callable[[], None], *, stride: int = 1) -> None:
        """Call `check()` after every `stride`-th event and at the end of each `run`.

        An `AssertionError` from it ends the run with the story.
        """
        self._checkers.append((name, check, stride))

    def start(self, name: str, *, delay_ns: int | None = None) -> None:
        """Start the next incarnation of `name` after `delay_ns` (default: drawn from the conditions).

        Raises `LocalProtocolError` if it lives or is starting already.
        """
        place = self.place(name)
        if place.process is not None or place.starting:
            raise LocalProtocolError(f"{name}#{place.incarnation} lives; kill it before its next incarnation")
        if delay_ns is None:
            delay_ns = self._deaths.randint(self.conditions.start_min_ns, self.conditions.start_max_ns)
        place.starting = True
        self.call_at(self._moment()[0] + delay_ns, lambda: self.begin(place))

    def revive(self, name: str) -> None:
        """Start the next incarnation now, unless one lives or is starting."""
        place = self.place(name)
        if place.process is None and not place.starting:
            self.start(name, delay_ns=0)

    def crash_at(self, name: str, at_ns: int) -> None:
        """SIGKILL `name` at virtual time `at_ns`."""
        self.place(name)
        self.call_at(at_ns, lambda: self.crash(name))

    def place(self, name: str) -> PlaceT:
        """The place of the process `name`. Raises `LocalProtocolError` if there is none."""
        try:
            return self._places[name]
        except KeyError:
            raise LocalProtocolError(
                f"no simulated process {name}; there are {sorted(self._places)}"
            ) from None

    def lives(self, name: str) -> bool:
        """Whether an incarnation of `name` is running."""
        return self.place(name).process is not None

    def incarnation(self, name: str) -> int:
        """The current incarnation of `name`, or the last one; 0 before the first start."""
        return self.place(name).incarnation

    def notes(self) -> Iterator[tuple[str, object]]:
        """The notes so far, as (process, value)."""
        return self.history.notes()

    def _new_place(self, name: str, place: PlaceT) -> PlaceT:
        if name in self._places:
            raise LocalProtocolError(f"simulated process {name} exists; give each its own name")
        self._places[name] = place
        return place

    def _check(self, events: int) -> None:
        """Run the checkers whose turn it is after so many events; 0 is everybody's turn."""
        for name, check, stride in self._checkers:
            if events % stride:
                continue
            try:
                check()
            except AssertionError as error:
                raise self._failure(f"checker {name}: {error}", FailureKind.SAFETY) from error

    def _failure(self, what: str, kind: FailureKind) -> SimulationFailure:
        seed, (at_ns, events), story = self.seed, self._moment(), self.history[-STORY_RECORDS:]
        return SimulationFailure(what, kind=kind, seed=seed, at_ns=at_ns, events=events, story=story)

    def _no_end(self, max_events: int) -> SimulationFailure:
        what = f"no end after {max_events} events: a livelock, or a bound that is too small"
        return self._failure(what, FailureKind.LIVENESS)
