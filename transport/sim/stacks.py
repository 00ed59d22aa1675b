"""Looking into suspended tasks: where they wait, and throwing them away in silence."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

from zbmd.transport.sim.errors import Waiting
from zbmd.transport.sim.process import LoopProcess

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
