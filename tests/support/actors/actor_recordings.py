"""Recording actors of a test, and replaying what was recorded."""

from __future__ import annotations

import asyncio
import contextlib
import pprint
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from zbmd.actors.replay.recording import captured_system
from zbmd.actors.system import ActorSystem
from zbmd.transport import capture
from zbmd.transport.capture.records import EventTaken, StreamDeclared
from zbmd.transport.clock.hlc import HybridClock

Scenario = Callable[[ActorSystem], Awaitable[None]]


@contextlib.asynccontextmanager
async def recorded(directory: Path, name: str = "rank0") -> AsyncGenerator[ActorSystem]:
    origin = capture.Origin(process=name, incarnation=1)
    recorder = capture.LogRecorder(directory, origin, capture.Clocks(hybrid=HybridClock()))
    factory = asyncio.get_running_loop().get_task_factory()
    system = captured_system(name, recorder=recorder)
    try:
        yield system
    finally:
        await system.stop(timeout=1)
        recorder.close()
        assert recorder.failure is None
        assert asyncio.get_running_loop().get_task_factory() is factory


def record(directory: Path, scenario: Scenario, run: Callable[..., Any] = uvloop.run) -> None:
    async def main() -> None:
        async with recorded(directory) as system:
            await scenario(system)

    run(main())


def replayed(directory: Path) -> dict[str, capture.Verdict]:
    """The verdicts by stream; of a stream that went on under its name, the last."""
    verdicts = {verdict.stream: verdict for verdict in capture.replay_log(directory)}
    assert verdicts
    return verdicts


def assert_identical(directory: Path) -> dict[str, capture.Verdict]:
    verdicts = replayed(directory)
    for verdict in verdicts.values():
        assert isinstance(verdict, capture.Identical), pprint.pformat(verdict, width=110)
    return verdicts


def events_of(directory: Path, stream: str) -> list[str]:
    """The names of a life's events."""
    number = -1
    found: list[str] = []
    for entry in (entry for log in capture.open_log(directory).processes for entry in log.entries()):
        match entry.record:
            case StreamDeclared(name=name, stream=declared) if name == stream:
                number = declared
            case EventTaken(tag=tag, stream=taken) if taken == number:
                found.append(tag)
            case _:
                pass
    return found


async def until(so: Callable[[], bool]) -> None:
    while not so():  # noqa: ASYNC110 (what it waits for has no event)
        await asyncio.sleep(0)
