"""Stacks as they are told in a notice: of a thread, and of a coroutine that waits, from any thread.

`sys._current_frames` and `cr_await` are read without stopping anybody, so a stack may be a moment old.
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
