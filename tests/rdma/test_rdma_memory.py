"""Memory over RDMA beyond what the suite of regions has: registrations, and credit."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support.links.region_harness import FAR, GUARD_NS, NEAR, Ends, RdmaEnds, RdmaHarness

from zbmd.transport.native import _native
from zbmd.transport.rdma.native._rdma import CREDITS, INLINE_BYTES
from zbmd.transport.rdma.peer import RdmaRegion
from zbmd.transport.rdma.plane import RdmaPlane
from zbmd.transport.rdma.transfer import TransferCounts

PUTS = 100
NBYTES = 4 * INLINE_BYTES
PATIENCE_S = 30.0
LOOK_S = 0.05
SLEEPS_FOR_BOTH = re.compile(r"\d+ 0x[0-9a-f]+ 0x2 ")
"""A thread in poll(2) or ppoll(2) with two descriptors: the device's, and that by which it is woken."""


def plane_of(ends: Ends, which: int) -> RdmaPlane:
    """0: the near end's."""
    assert isinstance(ends, RdmaEnds)
    return ends.planes[which]


def test_puts_from_the_arena_use_the_one_registration_that_is_there() -> None:
    async def scenario(ends: Ends) -> None:
        target, region = ends.far.inbox(ends.near, NBYTES)
        src = ends.near.memory.arena.from_array(np.arange(NBYTES, dtype=np.uint8))
        plane = plane_of(ends, 0)
        assert not plane.counts.transfers  # though the way was tried
        for value in range(1, PUTS + 1):
            await region.put(src, channel=0, value=value)
        await region.get(src)
        assert await ends.far.wait(NEAR, 0, PUTS) == _native.WAIT_OK
        assert np.array_equal(target, src)
        assert plane.counts == TransferCounts(in_segment=PUTS + 1)

    RdmaHarness().run(scenario)


def test_another_array_is_registered_once_and_not_beyond_its_life() -> None:
    async def scenario(ends: Ends) -> None:
        target, region = ends.far.inbox(ends.near, NBYTES)
        plane = plane_of(ends, 0)
        src = np.zeros(2 * NBYTES, np.uint8)
        for value in range(1, PUTS + 1):
            src[:] = value
            await region.put(src[value % 2 : value % 2 + NBYTES], channel=0, value=value)
        assert plane.counts == TransferCounts(registered=1, reused=PUTS - 1)
        assert plane.registrations.kept == 1
        del src
        gc.collect()
        assert plane.registrations.kept == 0
        assert await ends.far.wait(NEAR, 0, PUTS) == _native.WAIT_OK and set(target.tolist()) == {PUTS}

    RdmaHarness().run(scenario)


def test_both_sides_of_a_ping_are_told_what_each_round_took() -> None:
    """Natively, by puts that nobody asks about; more of them than a queue pair holds, between other puts."""
    rounds = 2 * CREDITS

    async def scenario(ends: Ends) -> None:
        regions = ends.far.inbox(ends.near, NBYTES)[1], ends.near.inbox(ends.far, NBYTES)[1]
        sources = [end.memory.arena.empty(8, np.uint8) for end in (ends.near, ends.far)]

        def ping(side: int) -> int:
            region = regions[side]
            assert isinstance(region, RdmaRegion)
            deadline_ns = _native.now_ns() + GUARD_NS
            took_ns = region.ping(
                sources[side], channel=0, value=1, first=side == 0, rounds=rounds, deadline_ns=deadline_ns
            )
            region.put(np.zeros(NBYTES, np.uint8), channel=1, value=1).wait(deadline_ns)
            return len(took_ns)

        sides = (asyncio.to_thread(ping, side) for side in range(2))
        assert await asyncio.gather(*sides) == [rounds, rounds]
        assert await ends.far.wait(NEAR, 1, 1) == await ends.near.wait(FAR, 1, 1) == _native.WAIT_OK

    RdmaHarness().run(scenario)


def test_who_polls_and_leaves_wakes_the_thread_that_sleeps_for_the_device() -> None:
    """A thread that polled may have taken the one word of the device that another sleeps for (a minute)."""

    async def scenario(ends: Ends) -> None:
        plane = plane_of(ends, 1)
        task = Path(f"/proc/self/task/{plane._thread.native_id}")
        until(lambda: SLEEPS_FOR_BOTH.match((task / "syscall").read_text()) is not None)
        slept = switches(task)
        plane.native.enter()
        plane.native.leave()
        until(lambda: switches(task) > slept)

    RdmaHarness().run(scenario)


def until(holds: Callable[[], bool]) -> None:
    limit_s, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not holds():
        assert time.monotonic() < limit_s
        pause.wait(LOOK_S)


def switches(task: Path) -> int:
    """The times that a thread has gone to sleep."""
    found = re.search(r"^voluntary_ctxt_switches:\s(\d+)", (task / "status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_a_region_that_is_released_has_no_registration_and_others_live_on() -> None:
    async def scenario(ends: Ends) -> None:
        _, first = ends.far.inbox(ends.near, NBYTES)
        target, second = ends.far.inbox(ends.near, NBYTES)
        assert 0 != first.handle.key != second.handle.key != 0
        ends.far.memory.regions.release(first.handle)
        await second.put(np.ones(NBYTES, np.uint8), channel=0, value=1)
        assert await ends.far.wait(NEAR, 0, 1) == _native.WAIT_OK and target.all()

    RdmaHarness().run(scenario)


def test_a_peer_that_takes_nothing_off_its_queue_is_not_overrun() -> None:
    """Its thread stands by, as for somebody who polls in its place."""

    async def scenario(ends: Ends) -> None:
        target, region = ends.far.inbox(ends.near, 8)
        far, many = plane_of(ends, 1), 3 * CREDITS
        far.native.enter()
        try:
            for value in range(1, many + 1):
                region.put(value.to_bytes(8, "little"), channel=0, value=value)
            region.put(np.zeros(8, np.uint8), channel=0, value=0)
        finally:
            far.native.leave()
        assert await ends.far.wait(NEAR, 0, many) == _native.WAIT_OK
        await region.get(np.zeros(8, np.uint8))
        assert not target.any()

    RdmaHarness().run(scenario)
