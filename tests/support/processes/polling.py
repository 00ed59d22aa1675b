"""Waiting for what another process does without a notice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.02


async def pause() -> None:
    """Leave the processor to the others for a moment."""
    await asyncio.sleep(POLL_S)


async def until(holds: Callable[[], bool]) -> None:
    """Return once it holds."""
    while not holds():
        await pause()


def wait_until(holds: Callable[[], bool]) -> None:
    """Return once it holds, for tests without an event loop."""
    never = threading.Event()
    while not holds():
        never.wait(POLL_S)


def is_done() -> bool:
    """Whether there is a file `done`, which a test makes in the working directory of what is to end."""
    return Path("done").exists()


async def until_done() -> None:
    """Return once the file `done` is there."""
    await until(is_done)
