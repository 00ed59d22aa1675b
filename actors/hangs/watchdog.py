"""The watchdog of a process: a thread that looks whether all that is under way makes progress.

Once a look it feeds what its sources see to the progress machine (`progress.py`), tells the host that it
runs, and answers when the host asks where the rank stands. A process without a host logs what it finds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import structlog

from zbmd.actors.contracts import contract_tag
from zbmd.actors.core.cell import ActorCell
from zbmd.actors.core.system import CoreSystem
from zbmd.actors.hangs.loop_watch import ThreadWork, asked_address, task_frames, thread_frames
from zbmd.actors.hangs.progress import Looked, MovedOn, ProgressMachine, Sample, Stuck, look_ns
from zbmd.actors.hangs.root_cause import describe_place
from zbmd.actors.hangs.wire import (
    GROUPS_MAX,
    PACKET_BYTES_MAX,
    PLACES_MAX,
    Ask,
    Beat,
    Extend,
    Frame,
    FromRank,
    Hello,
    Place,
    PlaceKind,
    Position,
    Standing,
    cut,
    decode_from_host,
    encode,
)
from zbmd.transport.clock.deadlines import DURATION_S_MAX
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError, UserError

# --- sources: the event loop, the handlers of actors, declared activities -------------------------------
#
# Each source is asked for its samples on the watchdog's thread, once a look, and describes a place only
# when something is to be reported. No message calls anything here.


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
    doing: str = ""

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
            doing=cut(self.doing),
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
        self._work = ThreadWork()
        main = asyncio.current_task()
        self._main = None if main is None else weakref.ref(main)
        self._timer = self._loop.call_later(period_s, self._turn)

    def close(self) -> None:
        """No more turns are counted."""
        self._timer.cancel()

    def watched(self) -> Iterator[Watched]:
        """Return the loop's turns."""
        self._seen = (self._turns, self._seen[1] + 1 if self._seen[0] == self._turns else 0)
        self._work.look(self._turns)
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
            kind=PlaceKind.LOOP,
            who=self._name,
            what=where,
            frames=thread_frames(self._thread_id),
            doing=self._work.doing(),
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

    __slots__ = ("_counted", "_progress", "_what", "limit_ns", "task", "thread_id", "work")

    def __init__(self, what: str, limit_ns: int, progress: Callable[[], int] | None) -> None:
        self.limit_ns = limit_ns
        self.thread_id = threading.get_ident()
        self.work = ThreadWork()
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
    """The activities that the process has declared."""

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
            activity.work.look(activity.mark)
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
            doing="" if waits else activity.work.doing(),
        )


log: Final = structlog.stdlib.get_logger("zbmd.actors.watchdog")

CONNECT_S: Final = 5.0
ALLOWANCES_MAX: Final = 1024


class Watchdog:
    """Watches one process; made, started and closed on its event loop.

    name: the process's (`rank2`); deadline_ns: without progress for so long a thing is stuck, 0 watches
    nothing; address: of the host's collector, None for a process without one; on_extend: called on the
    watchdog's thread, at each look, while another rank is in a debugger.
    """

    def __init__(
        self,
        name: str,
        system: CoreSystem,
        *,
        deadline_ns: int,
        address: str | None,
        on_extend: Callable[[], object] = lambda: None,
    ) -> None:
        self.deadline_ns = deadline_ns
        self._on_extend = on_extend
        self._name = name
        self._address = address
        self._activities = ActivitySource(name)
        self._actors = ActorSource(system)
        self._groups: list[GroupSource] = []
        self._allowances: list[int] = []
        self._loop: LoopSource | None = None
        self._machine: ProgressMachine | None = None
        self._under_way: dict[str, Watched] = {}
        self._socket: socket.socket | None = None
        self._wake_fd = -1
        self._thread: threading.Thread | None = None

    # For the program.

    @contextmanager
    def doing(
        self, what: str, *, deadline: float | None = None, progress: Callable[[], int] | None = None
    ) -> Generator[Activity]:
        """Say what this thread or task does, and hold it to its deadline in seconds (default: the setting).

        It is reported when it has neither called `at()` of what this yields nor ended for so long. `deadline`
        may be longer or shorter than the setting. progress: gives a number that changes with each bit of
        progress; called on the watchdog's thread. Raises `UserError` if `deadline` is no number of seconds.
        """
        with self._activities.doing(what, _limit_ns(deadline), progress) as activity:
            yield activity

    @contextmanager
    def allow(self, seconds: float) -> Generator[None]:
        """Allow everything in this process `seconds` before it is reported, for as long as this lasts.

        For what is known to take long: a large checkpoint, a first compilation. Those who wait for it on
        other ranks must allow it too. Raises `UserError` if it is no number of seconds.
        """
        if len(self._allowances) >= ALLOWANCES_MAX:
            raise LocalProtocolError(f"{ALLOWANCES_MAX} allowances hold already: are they ever ended?")
        limit_ns = _limit_ns(seconds)
        self._allowances.append(limit_ns)
        try:
            yield
        finally:
            self._allowances.remove(limit_ns)

    def add_group(self, group: GroupSource) -> Callable[[], None]:
        """Watch the operations of a group too; returns what ends that."""
        self._groups.append(group)

        def remove() -> None:
            with contextlib.suppress(ValueError):
                self._groups.remove(group)

        return remove

    # Start and end.

    def start(self, rank: int, incarnation: int) -> None:
        """Begin to look. Without a connection to the host it logs what it finds."""
        if self.deadline_ns == 0:
            return
        period_ns = look_ns(self.deadline_ns)
        self._machine = ProgressMachine(deadline_ns=self.deadline_ns, look_ns=period_ns)
        self._loop = LoopSource(self._name, period_s=period_ns / 1e9)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if self._address is not None:
            self._socket = _connect(self._address, Hello(rank=rank, incarnation=incarnation))
        self._thread = threading.Thread(target=self._run, name="zbmd-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._loop is not None:
            self._loop.close()
        if self._thread is not None:
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
            self._thread = None
            os.close(self._wake_fd)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def standing(self) -> Standing:
        """Return where the process stands: what is stuck first, then what else is under way."""
        assert self._machine is not None and self._loop is not None
        places = [self._place(watched) for watched in self._under_way.values() if self._tells(watched)]
        main = self._loop.main()
        if main is not None:
            places.append(main.place(still_ns=0, stuck=False))
        places.sort(key=lambda place: (not place.stuck, -place.still_ns))
        groups = [
            group.position(
                still_ns=self._machine.still_ns(group.key), stuck=self._machine.is_stuck(group.key)
            )
            for group in list(self._groups)[:GROUPS_MAX]
        ]
        return Standing(places=tuple(places[:PLACES_MAX]), groups=tuple(groups))

    # On its thread.

    def _run(self) -> None:
        assert self._machine is not None
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        if self._socket is not None:
            poller.register(self._socket, select.POLLIN)
        period_ns = self._machine.look_ns
        due_ns = time.monotonic_ns() + period_ns
        while True:
            left_ms = max(0, -(-(due_ns - time.monotonic_ns()) // 1_000_000))
            ready = dict(poller.poll(left_ms))
            if self._wake_fd in ready:
                return
            if self._socket is not None and self._socket.fileno() in ready and not self._answer():
                poller.unregister(self._socket)
                self._socket.close()
                self._socket = None
            if time.monotonic_ns() >= due_ns:
                due_ns = time.monotonic_ns() + period_ns
                self._look()

    def _look(self) -> None:
        assert self._machine is not None and self._loop is not None
        sources: tuple[WatchSource, ...] = (self._loop, self._actors, self._activities, *self._groups)
        self._under_way = {w.sample.key: w for source in sources for w in source.watched()}
        looked = Looked(
            samples=tuple(watched.sample for watched in self._under_way.values()),
            allowed_ns=max(self._allowances, default=0),
        )
        actions = self._machine.handle(looked, now_ns=time.monotonic_ns())
        self._machine.check_invariants()
        if self._socket is not None:
            self._send(self.standing() if actions else Beat())
            return
        for action in actions:
            match action:
                case Stuck(key=key):
                    log.warning(describe_place(self._place(self._under_way[key])))
                case MovedOn(key=key):
                    log.warning(f"{self._name}: what was stuck goes on ({key})")

    def _tells(self, watched: Watched) -> bool:
        """Report nothing while the loop turns."""
        assert self._machine is not None and self._loop is not None
        return watched.sample.key != LoopSource.KEY or self._loop.seems_blocked

    def _place(self, watched: Watched) -> Place:
        assert self._machine is not None
        key = watched.sample.key
        return watched.describe().place(
            still_ns=self._machine.still_ns(key), stuck=self._machine.is_stuck(key)
        )

    def _answer(self) -> bool:
        """Take what the host says; False when it is gone."""
        assert self._socket is not None
        try:
            packet = self._socket.recv(PACKET_BYTES_MAX + 1, socket.MSG_DONTWAIT)
            if not packet:
                return False
            match decode_from_host(packet):
                case Ask():
                    self._send(self.standing())
                case Extend():
                    self._on_extend()
        except BlockingIOError:
            return True
        except (OSError, RemoteProtocolError) as error:
            log.info("the host's collector is gone", reason=str(error))
            return False
        return True

    def _send(self, message: FromRank) -> None:
        """What does not go through at once is not sent: the host reads slowly, and the next look says it
        again."""
        assert self._socket is not None
        with contextlib.suppress(OSError):
            self._socket.send(encode(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _connect(address: str, hello: Hello) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(f"\0{address}")
        sock.send(encode(hello))
    except OSError as error:
        log.warning("no connection to the host's collector of hangs", address=address, reason=str(error))
        sock.close()
        return None
    return sock


def _limit_ns(seconds: float | None) -> int:
    if seconds is None:
        return 0
    if not 0 < seconds <= DURATION_S_MAX:
        raise UserError(f"{seconds!r} is not a number of seconds in 0..{DURATION_S_MAX:g}")
    return round(seconds * 1e9)
