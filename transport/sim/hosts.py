"""A simulated process's place in a `Simulation`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias

from zbmd.transport.sim.model import Arrived, MessageT, Process, Stimulus
from zbmd.transport.sim.weather import NetworkPath

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
