"""One incarnation of a simulated process, as the loop schedules it."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections import deque
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from zbmd.transport.sim.clock import LocalClock

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
