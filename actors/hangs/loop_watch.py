"""A thread that logs which handler blocks the event loop, and where; the stacks that it and others show.

Every `LOOK_S` it looks whether a task runs. If one does, it asks the loop for a sign of life; if there is
none by the next look, and the same task runs on the same message, the loop is held. An idle loop sleeps on.

`sys._current_frames` and `cr_await` are read while the threads run, so a stack may be a moment old.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING
from weakref import WeakSet

import structlog

from zbmd.actors.core.services import Service

if TYPE_CHECKING:
    from zbmd.actors.core.cell import ActorCell
    from zbmd.actors.core.system import CoreSystem
    from zbmd.actors.hangs.wire import Frame
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from zbmd.actors.core.messaging import asks_of, awaited_by
from zbmd.actors.hangs.wire import FRAMES_MAX, RUNS, Frame, cut, cut_path
from zbmd.transport.host.topology.kernel_files import entries, read_fields, read_text

# --- stacks of threads and coroutines ---------------------------------------------------------------------


PROC = Path("/proc")
THREADS_LOOKED_AT_MAX = 256


def look_outside(pid: int, proc: Path = PROC) -> str | None:
    """Return why a process is silent, as the end of a sentence about it; None if it is gone."""
    folder = proc / str(pid)
    state = _state(folder)
    if state in ("", "Z", "X"):
        return None
    who = f"(pid {pid})"
    if state == "T":
        return f"{who} is stopped (SIGSTOP): kill -CONT {pid} lets it go on"
    if state == "t":
        return f"{who} is stopped by a debugger"
    threads = entries(folder / "task")[:THREADS_LOOKED_AT_MAX]
    for thread in threads:
        if "freeze" in _waits_in(thread):
            return f"{who} is frozen by its control group"
    for thread in threads:
        if _state(thread) == "D":
            where = _waits_in(thread)
            inside = f" in {where}" if where else ""
            return f"{who} is in uninterruptible sleep{inside}: a device or file system does not answer"
    where = _waits_in(folder)
    does = "runs" if state == "R" else f"sleeps{f' in {where}' if where else ''}"
    return f"{who} lives, but runs no Python: native code keeps the GIL (its main thread {does})"


def _state(folder: Path) -> str:
    """Return the kernel's state letter of a process or thread; empty if it has ended."""
    return read_fields(folder / "status", ":").get("State", "")[:1]


def _waits_in(folder: Path) -> str:
    """The kernel function that it sleeps in; nothing if it does not sleep, or the kernel does not say."""
    name = read_text(folder / "wchan") or ""
    return "" if name == "0" else name


RUNS_SHARE = 0.005
"""Of the time for which it has made no progress: a thread that used more runs, on a busy machine too."""


class ThreadWork:
    """Says what a thread without progress does meanwhile. Made on that thread, used by the watchdog's."""

    __slots__ = ("_folder", "_looks", "_mark", "_since")

    def __init__(self) -> None:
        self._folder = Path(f"/proc/self/task/{threading.get_native_id()}")
        self._mark: object = None
        self._looks = 0
        self._since = (0, 0)

    def look(self, mark: object) -> None:
        """Look once; `mark` changes with progress."""
        self._looks = self._looks + 1 if mark == self._mark else 0
        self._mark = mark
        if self._looks == 1:
            self._since = (monotonic_ns(), self._used_ns())

    def doing(self) -> str:
        """Return `RUNS`, the kernel's function that it sleeps in, or nothing if that is unknown."""
        at_ns, used_ns = self._since
        if self._looks < 2:
            return ""
        if self._used_ns() - used_ns > RUNS_SHARE * (monotonic_ns() - at_ns):
            return RUNS
        return _waits_in(self._folder)

    def _used_ns(self) -> int:
        fields = (read_text(self._folder / "schedstat") or "").split()
        return int(fields[0]) if fields else 0


_PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_OWN_PREFIX = "zbmd."


def thread_frames(thread_id: int) -> tuple[Frame, ...]:
    """Return where a thread stands; nothing if it has ended, or stands in no Python code."""
    frame = sys._current_frames().get(thread_id)
    found: list[FrameType] = []
    while frame is not None and len(found) < FRAMES_MAX:
        found.append(frame)
        frame = frame.f_back
    return _described(reversed(found))


def awaits(awaitable: Any) -> list[FrameType]:
    """Return the frames of a coroutine that waits, and of all that it awaits in turn, outermost first."""
    found: list[FrameType] = []
    for each in awaited_by(awaitable):
        frame = getattr(each, "cr_frame", None) or getattr(each, "gi_frame", None)
        if isinstance(frame, FrameType) and (not found or found[-1] is not frame):
            found.append(frame)
    return found


def task_frames(task: asyncio.Task[Any]) -> tuple[Frame, ...]:
    """Return where a task waits."""
    return _described(awaits(task.get_coro())[-FRAMES_MAX:])


def asked_address(task: asyncio.Task[Any]) -> str:
    """Return the address of the actor whose answer the task waits for; nothing if it waits for no answer.

    The stack says it, so that no ask pays for being found.
    """
    asking = asks_of(task)
    return "" if asking is None else asking.ref.address


def _described(frames: Iterable[FrameType]) -> tuple[Frame, ...]:
    return tuple(
        Frame(
            file=cut_path(_path(frame.f_code)),
            line=frame.f_lineno or frame.f_code.co_firstlineno,
            function=cut(frame.f_code.co_qualname),
            weight=_weight(frame),
        )
        for frame in frames
    )


def _path(code: CodeType) -> str:
    """Return the file's path, as short as it is unique."""
    path = Path(code.co_filename)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _weight(frame: FrameType) -> int:
    module = str(frame.f_globals.get("__name__", ""))
    if module.partition(".")[0] in sys.stdlib_module_names or frame.f_code.co_filename.startswith("<frozen"):
        return 0
    inside = module.startswith(_OWN_PREFIX) or frame.f_code.co_filename.startswith(_PACKAGES)
    return 1 if inside else 2


LOOK_S = 0.04
"""Held for so long at least, a loop is noticed, and after twice as long at most."""
NOTICES_MAX = 16

_log = structlog.get_logger("zbmd.actors")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldNotice:
    """A handler held the event loop.

    actor: its address, or the name of a task that is no actor's; contract: `"id/version"`, or empty; held_ms:
    for how long, at least, when it was noticed; stack: of the loop's thread then, innermost last.
    """

    actor: str
    contract: str
    held_ms: int
    stack: tuple[Frame, ...]


class LoopWatch(Service):
    """Watches one system's loop. `held`: how often it was held; `notices`: the last ones."""

    def __init__(self, system: CoreSystem) -> None:
        self.held = 0
        self.notices: deque[HeldNotice] = deque(maxlen=NOTICES_MAX)
        self._system = system
        self._loop = system.loop
        self._thread = threading.get_ident()
        self._asked_ns = 0
        self._answered = True
        self._reported = False
        self._running: tuple[object, object] = (None, None)

    @property
    def is_over(self) -> bool:
        """Return whether there is no loop any more."""
        return self._loop.is_closed()

    def stopping(self) -> None:
        """Watch no longer; the thread ends with its last loop."""
        _thread.remove(self)

    def look(self) -> None:
        """See whether the loop moves; called by the thread alone."""
        task = asyncio.current_task(self._loop)
        cell = self._cell_of(task)
        running = (task, None if cell is None else cell.current)
        if not self._answered:
            if task is not None and running == self._running and not self._reported:
                self._tell(task, cell)
            return
        if task is None:
            return
        self._running, self._reported, self._answered = running, False, False
        self._asked_ns = monotonic_ns()
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # closed just now
            self._answered = True

    def _answer(self) -> None:
        self._answered = True

    def _cell_of(self, task: asyncio.Task[object] | None) -> ActorCell | None:
        return None if task is None else self._system.serving(task)

    def _tell(self, task: asyncio.Task[object], cell: ActorCell | None) -> None:
        delivery = None if cell is None else cell.current
        contract = "" if delivery is None else str(delivery.message.__struct_config__.tag)
        notice = HeldNotice(
            actor=task.get_name() if cell is None else cell.ref.address,
            contract=contract,
            held_ms=(monotonic_ns() - self._asked_ns) // 1_000_000,
            stack=thread_frames(self._thread),
        )
        self._reported = True
        self.held += 1
        self.notices.append(notice)
        if self.held & (self.held - 1) == 0:  # the 1st, 2nd, 4th, 8th …
            # What is no actor's is ours, or a script's own: its user has nothing to put into a pool.
            tell = _log.debug if cell is None else _log.warning
            tell(
                "the event loop is held: let the handler run in a pool, or await now and then",
                actor=notice.actor,
                contract=notice.contract,
                held_ms=notice.held_ms,
                count=self.held,
                stack="\n".join(f"{frame.file}:{frame.line} in {frame.function}" for frame in notice.stack),
            )


class _Thread:
    """The watching thread for all loops of the process; it runs while there are any."""

    def __init__(self) -> None:
        self._watches: WeakSet[LoopWatch] = WeakSet()
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, watch: LoopWatch) -> None:
        with self._lock:
            self._watches.add(watch)
            if self._thread is None:
                self._changed.clear()
                self._thread = threading.Thread(target=self._run, name="zbmd loop watch", daemon=True)
                self._thread.start()

    def remove(self, watch: LoopWatch) -> None:
        with self._lock:
            self._watches.discard(watch)
            if self._watches or self._thread is None:
                return
            self._changed.set()
            thread, self._thread = self._thread, None
        thread.join()

    def _run(self) -> None:
        changed = self._changed
        while not changed.wait(LOOK_S):
            with self._lock:
                watches = [watch for watch in self._watches if not watch.is_over]
                if not watches:
                    if self._thread is threading.current_thread():
                        self._thread = None
                    return
            for watch in watches:
                watch.look()


_thread = _Thread()


def _after_fork() -> None:
    global _thread
    _thread = _Thread()


os.register_at_fork(after_in_child=_after_fork)


def watch_loop(system: CoreSystem) -> LoopWatch:
    """Watch the running loop, which is the system's, until it stops. Virtual time is not watched."""
    watch = LoopWatch(system)
    if not hasattr(system.loop, "monotonic_ns"):  # a loop that has a clock of its own is simulated
        _thread.add(watch)
    return watch
