"""What a process's watchdog looks at: its event loop, its actors' handlers, activities that were declared.

Each source is asked for its samples on the watchdog's thread, once a look, and describes a place only when
something is to be told. Nothing here is called on the way of a message.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from zbmd.actors.contracts import contract_tag
from zbmd.actors.core.cell import ActorCell
from zbmd.actors.core.system import CoreSystem
from zbmd.actors.hangs.loop_watch import asked_address, task_frames, thread_frames
from zbmd.actors.hangs.progress import Sample
from zbmd.actors.hangs.wire import Frame, Place, PlaceKind, Position, cut
from zbmd.transport.errors import LocalProtocolError

CELLS_A_LOOK_MAX: Final = 2048
"""Actors that are looked at in one look, for about half a millisecond; of more, the others come next."""
ACTIVITIES_MAX: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A place as text; the fields are those of `zbmd.actors.hangs.wire.Place`."""

    kind: PlaceKind
    who: str
    what: str
    frames: tuple[Frame, ...] = ()
    waits_for: str = ""

    def place(self, *, still_ns: int, stuck: bool) -> Place:
        """As it is sent."""
        return Place(
            kind=self.kind,
            who=cut(self.who),
            what=cut(self.what),
            still_ns=still_ns,
            stuck=stuck,
            frames=self.frames,
            waits_for=cut(self.waits_for),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One thing under way; `describe` is called on the watchdog's thread, soon after or never."""

    sample: Sample
    describe: Callable[[], Described]


class WatchSource(Protocol):
    """A kind of things to look at."""

    def watched(self) -> Iterator[Watched]:
        """Return all that is under way. On the watchdog's thread, and quick."""
        ...


class GroupSource(WatchSource, Protocol):
    """A group: beside its operation under way, how far this rank has come in it."""

    @property
    def key(self) -> str:
        """Of the sample that it gives."""
        ...

    def position(self, *, still_ns: int, stuck: bool) -> Position:
        """Return how far this rank has come. On the watchdog's thread."""
        ...


class LoopSource:
    """The event loop: it makes progress as long as it gets round. Made on the loop; `close` it there.

    `main` is the task that made it, where the user's own code is most likely to stand.
    """

    KEY: Final = "loop"

    def __init__(self, name: str, *, period_s: float) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._period_s = period_s
        self._turns = 0
        self._seen = (-1, 0)
        main = asyncio.current_task()
        self._main = None if main is None else weakref.ref(main)
        self._timer = self._loop.call_later(period_s, self._turn)

    def close(self) -> None:
        """No more turns are counted."""
        self._timer.cancel()

    def watched(self) -> Iterator[Watched]:
        """Return the loop's turns."""
        self._seen = (self._turns, self._seen[1] + 1 if self._seen[0] == self._turns else 0)
        yield Watched(sample=Sample(key=self.KEY, mark=self._turns), describe=self.blocked)

    @property
    def seems_blocked(self) -> bool:
        """Return whether the loop has not got round for two looks."""
        return self._seen[1] >= 2

    def blocked(self) -> Described:
        """Return the code that keeps the loop from going on."""
        task = asyncio.current_task(self._loop)
        where = "its event loop is blocked" + (f" in task {task.get_name()}" if task is not None else "")
        return Described(
            kind=PlaceKind.LOOP, who=self._name, what=where, frames=thread_frames(self._thread_id)
        )

    def main(self) -> Described | None:
        """Return where the program itself waits; None once it has ended."""
        task = None if self._main is None else self._main()
        if task is None or task.done():
            return None
        if task is asyncio.current_task(self._loop):
            frames = thread_frames(self._thread_id)
        else:
            frames = task_frames(task)
        return Described(
            kind=PlaceKind.MAIN,
            who=self._name,
            what="its main task",
            frames=frames,
            waits_for=asked_address(task),
        )

    def _turn(self) -> None:
        self._turns += 1
        self._timer = self._loop.call_later(self._period_s, self._turn)


class ActorSource:
    """The actors of a system: a handler makes progress whenever what it awaits comes and it goes on."""

    def __init__(self, system: CoreSystem) -> None:
        self._system = system
        self._left: Iterator[ActorCell] = iter(())
        self._found: dict[str, Watched] = {}

    def watched(self) -> Iterator[Watched]:
        """Return the handlers that wait for something, of all actors or of the next `CELLS_A_LOOK_MAX`."""
        part = list(itertools.islice(self._left, CELLS_A_LOOK_MAX))
        if not part:
            cells = self._system.cells()
            self._found = {cell.name: self._found[cell.name] for cell in cells if cell.name in self._found}
            self._left = iter(cells)
            part = list(itertools.islice(self._left, CELLS_A_LOOK_MAX))
        for cell in part:
            found = self._look(cell)
            if found is None:
                self._found.pop(cell.name, None)
            else:
                self._found[cell.name] = found
        yield from self._found.values()

    def _look(self, cell: ActorCell) -> Watched | None:
        task = cell.task
        if task is None:
            return None
        # A future that came and went leaves a dead reference, which is equal to none but itself.
        waits_for: object = getattr(task, "_fut_waiter", None)
        mark = (weakref.ref(task), cell.handled, object() if waits_for is None else weakref.ref(waits_for))
        limit_s = type(cell.actor).progress_deadline_s
        sample = Sample(
            key=f"actor {cell.name}#{cell.ref.incarnation}",
            mark=mark,
            limit_ns=0 if limit_s is None else round(limit_s * 1e9),
        )
        return Watched(sample=sample, describe=partial(_describe_handler, cell, task))


def _describe_handler(cell: ActorCell, task: asyncio.Task[None]) -> Described:
    return Described(
        kind=PlaceKind.HANDLER,
        who=cell.ref.address,
        what=_handler_name(cell),
        frames=task_frames(task),
        waits_for=asked_address(task),
    )


def _handler_name(cell: ActorCell) -> str:
    delivery = cell.current
    if delivery is None:
        return f"{type(cell.actor).__name__}, {cell.state.value}"
    handler = cell.handlers.get(type(delivery.message))
    name = contract_tag(delivery.message) if handler is None else _qualified(handler.function)
    return f"handler {name}"


def _qualified(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function)).replace("<locals>.", "")


class Activity:
    """Something that a thread or task does, from `doing` to its end."""

    __slots__ = ("_counted", "_progress", "_what", "limit_ns", "task", "thread_id")

    def __init__(self, what: str, limit_ns: int, progress: Callable[[], int] | None) -> None:
        self.limit_ns = limit_ns
        self.thread_id = threading.get_ident()
        self._what = what
        self._counted = progress
        self._progress = 0
        try:
            task = asyncio.current_task()
        except RuntimeError:
            task = None
        self.task: weakref.ref[asyncio.Task[Any]] | None = None if task is None else weakref.ref(task)

    @property
    def what(self) -> str:
        """Return it as text."""
        return self._what

    @property
    def mark(self) -> tuple[int, int]:
        """Changes with each bit of progress."""
        return self._progress, 0 if self._counted is None else self._counted()

    def at(self, what: str | None = None) -> None:
        """It has made progress; what it does now has other words, if they are given."""
        if what is not None:
            self._what = what
        self._progress += 1


class ActivitySource:
    """What the process has declared that it does."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = itertools.count(1)
        self._activities: dict[int, Activity] = {}

    @contextmanager
    def doing(
        self, what: str, limit_ns: int, progress: Callable[[], int] | None = None
    ) -> Generator[Activity]:
        """Declare an activity of this thread or task."""
        if len(self._activities) >= ACTIVITIES_MAX:
            raise LocalProtocolError(f"{ACTIVITIES_MAX} activities are declared: are they ever ended?")
        number, activity = next(self._numbers), Activity(what, limit_ns, progress)
        self._activities[number] = activity
        try:
            yield activity
        finally:
            del self._activities[number]

    def watched(self) -> Iterator[Watched]:
        """Each activity."""
        for number, activity in list(self._activities.items()):
            sample = Sample(key=f"activity {number}", mark=activity.mark, limit_ns=activity.limit_ns)
            yield Watched(sample=sample, describe=partial(self._describe, activity))

    def _describe(self, activity: Activity) -> Described:
        task = None if activity.task is None else activity.task()
        waits = task is not None and getattr(task, "_fut_waiter", None) is not None
        return Described(
            kind=PlaceKind.ACTIVITY,
            who=self._name,
            what=activity.what,
            frames=task_frames(task) if task is not None and waits else thread_frames(activity.thread_id),
            waits_for=asked_address(task) if task is not None and waits else "",
        )
