"""A thread that notices when a handler keeps the event loop to itself, and tells by whom and where.

Every `LOOK_S` it looks whether a task runs. If one does, it asks the loop for a sign of life; if there is
none by the next look, and the same task runs on the same message, the loop is held. An idle loop sleeps on.
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
        from zbmd.actors.hangs.stacks import thread_frames  # which knows how a system asks

        self._frames_of = thread_frames
        self._system = system
        self._loop = system.loop
        self._thread = threading.get_ident()
        self._asked_ns = 0
        self._answered = True
        self._told = False
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
            if task is not None and running == self._running and not self._told:
                self._tell(task, cell)
            return
        if task is None:
            return
        self._running, self._told, self._answered = running, False, False
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
            stack=self._frames_of(self._thread),
        )
        self._told = True
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
