"""One incarnation of a simulated process, as the loop schedules it."""

from __future__ import annotations

import asyncio
import random
import sys
import weakref
from collections import deque
from collections.abc import Coroutine, Iterable
from contextvars import Context, ContextVar, copy_context
from types import FrameType
from typing import Any, TypeVar

from zbmd.transport.sim.clock import LocalClock
from zbmd.transport.sim.model import Waiting

# Looking into suspended tasks: where they wait, and throwing them away in silence.

FRAMES_MAX = 32
"""How deep a chain of awaits is followed."""
WAITING_MAX = 200
"""How many tasks are told of."""


def waiting(processes: Iterable[LoopProcess]) -> list[Waiting]:
    """What every task of these processes waits for, the oldest of each first."""
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
