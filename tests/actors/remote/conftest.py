"""What goes over links runs on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories() -> dict[str, LoopFactory]:
    """The loops by name."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
