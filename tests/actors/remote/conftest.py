"""Tests over links run on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from support.rdma.rdma_world import given_devices

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In a machine whose RDMA devices are given: what runs over them, on the loop that ranks use."""
    if given_devices():
        here = str(Path(__file__).parent)
        items[:] = [
            item
            for item in items
            if not str(item.path).startswith(here)
            or ("pair" in getattr(item, "fixturenames", ()) and "uvloop" in item.name)
        ]


def pytest_asyncio_loop_factories() -> dict[str, LoopFactory]:
    """The loops by name."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
