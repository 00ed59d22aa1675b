"""Stacks of threads and of waiting coroutines, read from any thread, and what the kernel shows of a process.

`sys._current_frames` and `cr_await` are read while the threads run, so a stack may be a moment old.
"""

from __future__ import annotations

import asyncio
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from zbmd.actors.core.native._asking import Asking
from zbmd.actors.hangs.wire import FRAMES_MAX, Frame, cut, cut_path
from zbmd.transport.host.topology.kernel_files import entries, read_fields, read_text

PROC = Path("/proc")
THREADS_LOOKED_AT_MAX = 256


def look_outside(pid: int, proc: Path = PROC) -> str | None:
    """What keeps a process from saying anything, as the end of a sentence about it; None if it is gone."""
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


AWAITS_MAX = 256
"""Coroutines, each awaiting the next, that are followed."""
_PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_OWN_PREFIX = "zbmd."


def thread_frames(thread_id: int) -> tuple[Frame, ...]:
    """Return where a thread stands; nothing if it has ended, or stands in no Python code."""
    frame = sys._current_frames().get(thread_id)
    found: list[FrameType] = []
    while frame is not None and len(found) < FRAMES_MAX:
        found.append(frame)
        frame = frame.f_back
    return _told(reversed(found))


def awaits(awaitable: Any) -> list[FrameType]:
    """Return the frames of a coroutine that waits, and of all that it awaits in turn, outermost first."""
    found: list[FrameType] = []
    for each in _chain(awaitable):
        frame = getattr(each, "cr_frame", None) or getattr(each, "gi_frame", None)
        if isinstance(frame, FrameType) and (not found or found[-1] is not frame):
            found.append(frame)
    return found


def _chain(awaitable: Any) -> Iterator[Any]:
    """Return a waiting awaitable and everything that it awaits in turn."""
    for _ in range(AWAITS_MAX):
        if awaitable is None:
            return
        yield awaitable
        # Of a future that is a task, say behind a shield, the task's coroutine is what goes on.
        inner = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
        awaitable = inner.get_coro() if isinstance(inner, asyncio.Task) else inner


def task_frames(task: asyncio.Task[Any]) -> tuple[Frame, ...]:
    """Return where a task waits."""
    return _told(awaits(task.get_coro())[-FRAMES_MAX:])


def asked_address(task: asyncio.Task[Any]) -> str:
    """Return the address of the actor whose answer the task waits for; nothing if it waits for no answer.

    The stack says it, so that no ask pays for being found.
    """
    asking = [each for each in _chain(task.get_coro()) if isinstance(each, Asking) and each.cr_await]
    return asking[-1].ref.address if asking else ""


def _told(frames: Iterable[FrameType]) -> tuple[Frame, ...]:
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
    """As short as it can be told here."""
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
