"""One incarnation of a simulated process, as the loop schedules it, and its clocks."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from types import FrameType
from typing import Any, Protocol, TypeVar

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.sim.model import Waiting

# ---- virtual clocks: one true time for the world, a clock of its own for each process, and the `time`
# module.
#
# While a simulation runs, `time.monotonic()`, `time.time()`, `time.perf_counter()`, their `_ns` forms and
# `time.sleep()` mean the clock of the simulated process that runs, `random`'s functions and `os.urandom()`
# the seed's streams. So code that was written for the real ones runs unchanged. Only the simulation's thread
# is concerned, and a function that was imported by name (`from time import monotonic`) is out of reach. After
# madsim, which puts itself in front of libc's `clock_gettime` and `getrandom` for the same end.

WALL_START_NS = 1_700_000_000_000_000_000
"""The time that a correct wall clock shows at virtual time 0."""

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
    """The source of the `time` module's clocks while a simulation runs."""

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
            (module, name, self._substituted(number, substitute))
            for number, (module, name, substitute) in enumerate(substitutes)
        ]

    def _substituted(self, number: int, substitute: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            return substitute(*args) if threading.get_ident() == self._thread else self._real[number](*args)

        return called

    def put_on(self) -> None:
        """Begin. Raises `LocalProtocolError` if another simulation of this process runs at the moment."""
        if not _taken.acquire(blocking=False):
            raise LocalProtocolError("another simulation is running in this process: run them one by one")
        self._real = [getattr(module, name) for module, name, _ in self._substitutes]
        self._thread = threading.get_ident()
        for module, name, substitute in self._substitutes:
            setattr(module, name, substitute)

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


# ---- suspended tasks: where they wait, and throwing them away in silence

FRAMES_MAX = 32
"""Greatest depth to which a chain of awaits is followed."""
WAITING_MAX = 200
"""Most tasks that a report lists."""


def waiting(processes: Iterable[LoopProcess]) -> list[Waiting]:
    """Return what every task of these processes waits for, the oldest of each first."""
    found = [
        Waiting(process=f"{process.name}#{process.incarnation}", task=task.get_name(), frames=_frames(task))
        for process in processes
        for task in process.pending()
    ]
    return found[:WAITING_MAX]


def _frames(task: asyncio.Task[Any]) -> tuple[str, ...]:
    frames: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None and len(frames) < FRAMES_MAX:
        frame: FrameType | None = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            break
        code = frame.f_code
        frames.append(f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} in {code.co_name}")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    # Without ids: they would differ from run to run.
    end = getattr(task, "_fut_waiter", None)
    if isinstance(end, asyncio.Task):
        frames.append(f"task {end.get_name()}")
    elif end is not None:
        frames.append("a future")
    return tuple(frames)


def discard(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Destroy suspended tasks. Their `finally` blocks run now, as Python must, but into the void."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine: Any = task.get_coro()
            try:
                if coroutine is not None:
                    coroutine.close()
            except BaseException as error:  # noqa: BLE001 (what a corpse says is nobody's)
                error.__traceback__ = None
    finally:
        sys.unraisablehook = hook


T = TypeVar("T")


class LoopProcess:
    """A process on a `SimLoop`: what runs in its context is its own, one callback at a time.

    Each callback takes virtual time, about `callback_ns`: while it is busy, paused or dead, what comes for
    it waits, or is dropped.
    """

    def __init__(
        self, name: str, incarnation: int, *, rng: random.Random, clock: LocalClock, callback_ns: int
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.rng = rng
        """For this incarnation's own use: one of the streams of the seed."""
        self.clock = clock
        self.callback_ns = callback_ns
        self.slowness = 1.0
        self.dead = False
        self.paused_until_ns = 0
        self.busy_until_ns = 0
        self.ready: deque[asyncio.Handle] = deque()
        self.scheduled = False
        """Whether a turn of this process is in the loop's heap."""
        self.made_tasks = 0
        self._tasks: weakref.WeakValueDictionary[int, asyncio.Task[Any]] = weakref.WeakValueDictionary()
        self.context: Context = copy_context()
        self.context.run(_current.set, self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}#{self.incarnation}{' dead' if self.dead else ''}>"

    @property
    def free_at_ns(self) -> int:
        """From when on it can run its next callback, true time."""
        return max(self.busy_until_ns, self.paused_until_ns)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """A task of this process was made. As in asyncio, whoever wants it to live keeps it."""
        self.made_tasks += 1
        self._tasks[self.made_tasks] = task

    def pending(self) -> list[asyncio.Task[Any]]:
        """Its tasks that have not ended, oldest first."""
        return [task for task in self._tasks.values() if not task.done()]


class SimFuture(asyncio.Future[T]):
    """A future whose hash is its number: sets of futures have one order, whatever their addresses."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop, number: int) -> None:
        super().__init__(loop=loop)
        self._number = number

    def __hash__(self) -> int:
        return self._number


class SimTask(asyncio.Task[T]):
    """A task whose hash is its number, as `SimFuture`'s."""

    def __init__(self, coro: Coroutine[Any, Any, T], *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


_current: ContextVar[LoopProcess | None] = ContextVar("zbmd_sim_process", default=None)


def process_of(context: Context) -> LoopProcess | None:
    """The process that a callback with this context belongs to; None: to the simulation itself."""
    found: LoopProcess | None = context.get(_current)
    return found


def current_process() -> LoopProcess | None:
    """The simulated process that the caller runs in, or None outside of any."""
    return _current.get()


async def run_to_end(program: Coroutine[Any, Any, None], process: LoopProcess) -> None:
    """Run the main coroutine of `process`, then cancel its other tasks and wait for them."""
    try:
        await program
    finally:
        ours = asyncio.current_task()
        others = [task for task in process.pending() if task is not ours]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
