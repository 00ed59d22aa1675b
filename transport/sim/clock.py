"""Virtual clocks: one true time for the world, a clock of its own for each process, and the `time` module.

While a simulation runs, `time.monotonic()`, `time.time()`, `time.perf_counter()`, their `_ns` forms and
`time.sleep()` mean the clock of the simulated process that runs, `random`'s functions and `os.urandom()` the
seed's streams. So code that was written for the real ones runs unchanged. Only the simulation's thread is
concerned, and a function that was imported by name (`from time import monotonic`) is out of reach.
After madsim, which puts itself in front of libc's `clock_gettime` and `getrandom` for the same end.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

from zbmd.transport.errors import LocalProtocolError

WALL_START_NS = 1_700_000_000_000_000_000
"""What a wall clock that is right shows at virtual time 0."""

_PPM = 1_000_000


class LocalClock:
    """A process's clocks, given true time: a monotonic one, which may drift, and a wall clock."""

    __slots__ = ("_anchor_ns", "_drift_ppm", "_local_ns", "_wall_step_ns")

    def __init__(self) -> None:
        self._anchor_ns = 0
        self._local_ns = 0
        self._drift_ppm = 0
        self._wall_step_ns = 0

    def local_ns(self, true_ns: int) -> int:
        """Return the monotonic clock, ns."""
        elapsed_ns = true_ns - self._anchor_ns
        return self._local_ns + elapsed_ns + elapsed_ns * self._drift_ppm // _PPM

    def true_ns(self, local_ns: int) -> int:
        """The first true time at which the monotonic clock shows `local_ns` or more."""
        ahead_ns = local_ns - self._local_ns
        return self._anchor_ns - (-ahead_ns * _PPM // (_PPM + self._drift_ppm))

    def wall_ns(self, true_ns: int) -> int:
        """Return the wall clock, ns since 1970."""
        return WALL_START_NS + self.local_ns(true_ns) + self._wall_step_ns

    def set_drift(self, true_ns: int, drift_ppm: int) -> None:
        """Run fast by so many parts in a million from now on."""
        self._local_ns = self.local_ns(true_ns)
        self._anchor_ns = true_ns
        self._drift_ppm = drift_ppm

    def step_wall(self, step_ns: int) -> None:
        """Make the wall clock jump."""
        self._wall_step_ns += step_ns


class Times(Protocol):
    """Whose time the `time` module tells while a simulation runs."""

    def monotonic_ns(self) -> int:
        """The monotonic clock of the process that runs."""
        ...

    def wall_ns(self) -> int:
        """Its wall clock."""
        ...

    def charge(self, busy_ns: int) -> None:
        """It is busy for so long."""
        ...


_taken = threading.Lock()


class Disguise:
    """`time` and `os.urandom` mean the simulation's while it is on; made once, and put on ever again.

    entropy: `os.urandom`'s. The thread that puts it on is the one that is concerned.
    """

    __slots__ = ("_real", "_substitutes", "_thread")

    def __init__(self, times: Times, entropy: random.Random) -> None:
        self._thread: int | None = None
        self._real: list[Callable[..., Any]] = []
        substitutes: list[tuple[Any, str, Callable[..., Any]]] = [
            (time, "time_ns", times.wall_ns),
            (time, "time", lambda: times.wall_ns() / 1e9),
            (time, "sleep", lambda seconds: times.charge(int(seconds * 1e9))),
            (os, "urandom", entropy.randbytes),
        ]
        for name in ("monotonic", "perf_counter"):
            substitutes.append((time, f"{name}_ns", times.monotonic_ns))
            substitutes.append((time, name, lambda: times.monotonic_ns() / 1e9))
        self._substitutes = [
            (module, name, self._told(number, substitute))
            for number, (module, name, substitute) in enumerate(substitutes)
        ]

    def _told(self, number: int, substitute: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any) -> Any:
            return substitute(*args) if threading.get_ident() == self._thread else self._real[number](*args)

        return told

    def put_on(self) -> None:
        """Begin. Raises `LocalProtocolError` if another simulation of this process runs at the moment."""
        if not _taken.acquire(blocking=False):
            raise LocalProtocolError("another simulation is running in this process: run them one by one")
        self._real = [getattr(module, name) for module, name, _ in self._substitutes]
        self._thread = threading.get_ident()
        for module, name, told in self._substitutes:
            setattr(module, name, told)

    def take_off(self) -> None:
        """End; once for each `put_on`."""
        self._thread = None
        for (module, name, _), real in zip(self._substitutes, self._real, strict=True):
            setattr(module, name, real)
        _taken.release()


@contextmanager
def in_place_of_real_time(disguise: Disguise, dice: random.Random) -> Generator[None]:
    """Let `time`, `random` and `os.urandom` mean the simulation's, for this thread, until the end.

    `random`'s functions go on from the state of `dice` and leave theirs there. Raises as `Disguise.put_on`.
    """
    disguise.put_on()
    try:
        state = random.getstate()
        random.setstate(dice.getstate())
        try:
            yield
        finally:
            dice.setstate(random.getstate())
            random.setstate(state)
    finally:
        disguise.take_off()


class StillDice:
    """`random`'s functions while nobody is to use them: from `dice`, and whether anyone did.

    To be swapped in and out at every turn, in a tenth of the time that it takes to look at a generator.
    """

    __slots__ = ("_expected", "_real", "_state")

    def __init__(self, dice: random.Random) -> None:
        self._state = dice.getstate()
        self._expected = dice.getrandbits(64)
        self._real = self._state

    def put_in(self) -> None:
        """Begin."""
        self._real = random.getstate()
        random.setstate(self._state)

    def take_out(self) -> bool:
        """End; whether someone has drawn from them."""
        drawn = random.getrandbits(64) != self._expected
        if drawn:
            self._state = random.getstate()
            self._expected = random.getrandbits(64)
        random.setstate(self._real)
        return drawn
