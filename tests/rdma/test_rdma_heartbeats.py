"""Heartbeats by one-sided writes, between nodes that have a device each; a third of this host has none."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from rdma_world import given_devices
from thread_nodes import Told, node

from zbmd.actors.cluster.lives import Acting, Suspecting
from zbmd.actors.cluster.node import ClusterNode
from zbmd.actors.cluster.node_life import NodeLife
from zbmd.actors.runtime_env import LINKS_VARIABLE
from zbmd.transport.rdma_use import DEVICES_VARIABLE

BUDGET_NS = 5_000_000_000
SILENCES_HELD = 2
"""For so many times the silence that is suspect the GIL is held; a lease is longer."""
BEATS_HELD = 2 * SILENCES_HELD
"""At least so many come meanwhile, on a machine however slow: one would keep off half the suspicions."""
PATIENCE_S = 120.0
OTHER = """
import asyncio, itertools, sys, time
from pathlib import Path
from thread_nodes import node

MEASURED_S = 0.2

def busy(turns):
    # One call into C, which gives nobody the GIL; how many seconds it took.
    began = time.monotonic()
    sum(itertools.repeat(0, turns))
    return time.monotonic() - began

def hold(seconds):
    turns = 1_000
    while (took := busy(turns)) < MEASURED_S:
        turns *= 2
    return busy(int(turns * seconds / took))

async def main():
    async with node(Path(sys.argv[1]), "other", sys.argv[2]) as (_, told):
        await told.acts_on(2)
        print("in", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print("held", hold(float(line)), flush=True)

asyncio.run(main())
"""


async def look(node: ClusterNode, at: Callable[[NodeLife], int]) -> int:
    """Look at its life, on its thread."""

    async def there() -> int:
        return at(node._inside._living())

    assert node._inner is not None
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), node._inner))


async def until(node: ClusterNode, holds: Callable[[NodeLife], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await look(node, holds):
            pass  # asked anew: there and back takes its time


@asynccontextmanager
async def other_node(
    directory: Path, address: str, **environment: str
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A node in a process of its own, which has joined. It holds its GIL for so many seconds as it reads."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OTHER, str(directory), address),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    try:
        await said(process, "in")
        yield process
    finally:
        with suppress(ProcessLookupError):  # the test may have killed it
            process.kill()
        await process.wait()


async def said(process: asyncio.subprocess.Process, wanted: str) -> list[str]:
    """The words behind that; its log goes to the same place."""
    assert process.stdout is not None
    while line := (await process.stdout.readline()).decode().split():
        if line[0] == wanted:
            return line[1:]
    raise AssertionError("it has ended")


def suspected(told: Told) -> list[Suspecting]:
    return [event for event in told.events if isinstance(event, Suspecting)]


async def test_a_node_whose_python_stands_still_is_heard_and_a_host_that_does_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ("@".join(at) for at in given_devices())
    monkeypatch.setenv(DEVICES_VARIABLE, ours)
    async with node(tmp_path, "one", budget_ns=BUDGET_NS) as (one, told):
        await told.acts_on(1)
        async with other_node(tmp_path, one.me.address, **{DEVICES_VARIABLE: theirs}) as process:
            epoch = (await told.acts_on(2)).view.epoch
            await until(one, lambda life: bool(life.ways.by_rdma()))
            await until(one, lambda life: life.beats._native.sent_by_way > 3)
            (peer,) = (each.key for each in one.view.nodes if each.key != one.me.key)
            limit_ns = await look(one, lambda life: life.beats.silence(peer)[1])
            come = await look(one, lambda life: life.beats._native.come_by_way)
            assert process.stdin is not None
            process.stdin.write(f"{SILENCES_HELD * limit_ns / 1e9}\n".encode())
            (held_s,) = await said(process, "held")
            assert float(held_s) > limit_ns / 1e9, "it has not stood still for long enough to be suspected"
            assert await look(one, lambda life: life.beats._native.come_by_way) >= come + BEATS_HELD
            assert not suspected(told) and one.view.epoch == epoch
            process.send_signal(signal.SIGSTOP)  # a host that stands still: nothing of it is proven
            await told.until(lambda event: isinstance(event, Suspecting))
            assert [event.key for event in suspected(told)] == [peer]
            process.kill()
            await told.until(lambda event: isinstance(event, Acting) and event.view.epoch > epoch)


async def test_without_a_device_beats_go_by_tcp_and_both_know_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, "@".join(given_devices()[0]))
    async with node(tmp_path, "one", budget_ns=BUDGET_NS) as (one, told):
        await told.acts_on(1)
        monkeypatch.setenv(LINKS_VARIABLE, "tcp")
        async with node(tmp_path, "two", one.me.address) as (two, _):
            await told.acts_on(2)
            for each in (one, two):
                await until(each, lambda life: any("=tcp on " in why for _, why in life.ways._told))
                await until(each, lambda life: life.beats._native.beats_sent > 3)
                assert await look(each, lambda life: life.beats._native.sent_by_way) == 0
