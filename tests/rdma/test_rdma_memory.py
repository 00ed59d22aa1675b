"""Memory over RDMA beyond what the suite of regions has: registrations, and credit."""

from __future__ import annotations

import gc

import numpy as np
from region_harness import NEAR, Ends, RdmaEnds, RdmaHarness

from zbmd.transport import _native
from zbmd.transport._rdma import CREDITS, INLINE_BYTES
from zbmd.transport.rdma_plane import RdmaPlane

PUTS = 100
NBYTES = 4 * INLINE_BYTES


def plane_of(ends: Ends, which: int) -> RdmaPlane:
    """0: the near end's."""
    assert isinstance(ends, RdmaEnds)
    return ends.planes[which]


def test_puts_from_the_arena_use_the_one_registration_that_is_there() -> None:
    async def scenario(ends: Ends) -> None:
        target, region = ends.far.inbox(ends.near, NBYTES)
        src = ends.near.memory.arena.from_array(np.arange(NBYTES, dtype=np.uint8))
        for value in range(1, PUTS + 1):
            await region.put(src, channel=0, value=value)
        await region.get(src)
        assert await ends.far.wait(NEAR, 0, PUTS) == _native.WAIT_OK
        assert np.array_equal(target, src)
        plane = plane_of(ends, 0)
        assert (plane.reused, plane.registered) == (PUTS + 1, 0)

    RdmaHarness().run(scenario)


def test_another_array_is_registered_once_and_not_beyond_its_life() -> None:
    async def scenario(ends: Ends) -> None:
        target, region = ends.far.inbox(ends.near, NBYTES)
        plane = plane_of(ends, 0)
        src = np.zeros(2 * NBYTES, np.uint8)
        for value in range(1, PUTS + 1):
            src[:] = value
            await region.put(src[value % 2 : value % 2 + NBYTES], channel=0, value=value)
        assert (plane.registered, plane.registrations.kept) == (1, 1)
        assert plane.reused / (plane.reused + plane.registered) >= 0.99
        del src
        gc.collect()
        assert plane.registrations.kept == 0
        assert await ends.far.wait(NEAR, 0, PUTS) == _native.WAIT_OK and set(target.tolist()) == {PUTS}

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
