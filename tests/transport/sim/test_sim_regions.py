"""Simulated regions under cuts and deaths, which real transports cannot be put through at will."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from zbmd.transport.errors import LinkFull, LocalProtocolError, OutOfMemory
from zbmd.transport.memory.region import RemoteRegion
from zbmd.transport.native import _native
from zbmd.transport.sim import SIM_START_NS, Crash, Cut, SimLink, SimProcess, World
from zbmd.transport.sim.links import TRANSFERS_MAX
from zbmd.transport.sim.storage import SimSegment

MS = 1_000_000
NBYTES = 100_000
OWNER, WRITER = 0, 1


@dataclass
class Owner:
    """A process whose inbox each incarnation of "writer" is handed; keeps what came, by incarnation."""

    write: Callable[[SimProcess, RemoteRegion], Awaitable[None]]
    segment: SimSegment = field(init=False)
    target: NDArray[np.uint8] = field(init=False)
    links: list[SimLink] = field(default_factory=list)
    handed: asyncio.Event = field(default_factory=asyncio.Event)

    async def own(self, process: SimProcess) -> None:
        self.segment = process.open_segment(slot=OWNER, arena_bytes=0, inbox_bytes=1 << 20)
        self.target = self.segment.inbox.empty(NBYTES, np.uint8)
        self.target[:] = 0
        process.listen(self.links.append)
        await asyncio.get_running_loop().create_future()

    async def writer(self, process: SimProcess) -> None:
        process.open_segment(slot=WRITER, arena_bytes=0, inbox_bytes=0)
        link = await process.dial("owner")
        await self.write(process, link.open_region(self.segment.regions.register(self.target)))

    def world(self, seed: int | str) -> World:
        world = World(seed)
        world.add("owner", self.own)
        world.add("writer", self.writer, start=False)
        world.start("writer", delay_ns=MS)
        return world


async def put_for_ever(process: SimProcess, region: RemoteRegion) -> None:
    """Round after round, each with bytes that tell the incarnation and the round."""
    for round_ in range(1, 100):
        src = np.full(NBYTES, (process.incarnation - 1) * 100 + round_, np.uint8)
        await region.put(src, channel=0, value=process.incarnation << 32 | round_)
    await asyncio.get_running_loop().create_future()


@given(seed=st.integers(0, 1 << 32), at_us=st.integers(1500, 12_000))
def test_a_put_that_a_death_cuts_off_may_land_in_part_and_is_not_notified(seed: int, at_us: int) -> None:
    owner = Owner(put_for_ever)
    with owner.world(seed) as world:
        world.crash_at("writer", SIM_START_NS + at_us * 1000)
        world.run(for_ns=40 * MS)
        told = owner.segment.cell_value(WRITER, 0) & 0xFFFFFFFF
        whole = NBYTES if told == 0 else int(np.count_nonzero(owner.target >= told))
        assert whole == NBYTES, "what was notified is whole"
        newer = int(np.count_nonzero(owner.target > told))
        assert set(owner.target[newer:].tolist()) <= {told}, "and the rest is a prefix of the next put"
        assert owner.segment.lost_mask() == (1 << WRITER if owner.links else 0)


@given(seed=st.integers(0, 1 << 32))
def test_what_a_cut_held_back_does_not_land_in_the_time_of_the_replacement(seed: int) -> None:
    async def put_once(process: SimProcess, region: RemoteRegion) -> None:
        src = np.full(NBYTES, process.incarnation, np.uint8)
        region.put(src, channel=process.incarnation, value=1)
        await asyncio.get_running_loop().create_future()

    owner = Owner(put_once)
    with owner.world(seed) as world:
        # The put follows the dial's answer, and is held back; the replacement starts before the cut ends.
        while not owner.links:
            world.run(for_ns=10_000)
        begins_ns = world.now_ns - SIM_START_NS
        world.apply(Cut(source="writer", target="owner", at_ns=begins_ns, for_ns=30 * MS))
        world.apply(Crash(process="writer", at_ns=begins_ns + 10 * MS, for_ns=10 * MS))
        world.run(for_ns=29 * MS)
        assert not owner.target.any() and owner.segment.lost_mask() == 0, (
            "held back, as is the news of its end"
        )
        world.run(for_ns=40 * MS)
        assert owner.segment.cell_value(WRITER, 2) == 1 and set(owner.target.tolist()) == {2}


def test_bytes_are_read_from_the_buffer_when_they_arrive() -> None:
    async def reuse_too_early(process: SimProcess, region: RemoteRegion) -> None:
        src = np.full(NBYTES, 1, np.uint8)
        transfer = region.put(src, channel=0, value=1)
        src[:] = 2
        with pytest.raises(LocalProtocolError, match="cannot block"):
            transfer.wait()
        await transfer
        transfer.wait()
        src[:] = 3

    owner = Owner(reuse_too_early)
    with owner.world(1) as world:
        world.run(for_ns=40 * MS)
        assert set(owner.target.tolist()) == {2}


def test_transfers_under_way_are_bounded() -> None:
    async def flood(process: SimProcess, region: RemoteRegion) -> None:
        transfers = [region.put(b"1", channel=0, value=1) for _ in range(TRANSFERS_MAX)]
        with pytest.raises(LinkFull):
            region.put(b"1", channel=0, value=1)
        await asyncio.gather(*(_awaited(transfer) for transfer in transfers))
        await region.put(b"1", channel=0, value=2)

    owner = Owner(flood)
    with owner.world(1) as world:
        world.run(until=lambda: bool(owner.links) and owner.segment.cell_value(WRITER, 0) == 2)


async def _awaited(transfer: Awaitable[None]) -> None:
    await transfer


def test_one_seed_is_one_history() -> None:
    def digest(seed: int) -> str:
        with Owner(put_for_ever).world(seed) as world:
            world.crash_at("writer", SIM_START_NS + 5 * MS)
            world.run(for_ns=20 * MS)
            return world.digest()

    assert digest(7) == digest(7) != digest(8)


def test_memory_is_the_processs_and_links_without_it_open_nothing() -> None:
    refused: list[str] = []

    async def lonely(process: SimProcess) -> None:
        with pytest.raises(OutOfMemory):
            process.open_segment(slot=0, arena_bytes=1 << 50, inbox_bytes=0)
        segment = process.open_segment(slot=0, arena_bytes=64, inbox_bytes=64)
        with pytest.raises(LocalProtocolError, match="already"):
            process.open_segment(slot=0, arena_bytes=64, inbox_bytes=64)
        assert process.memory.used_bytes == 128
        assert await segment.wait(1, 0, 1, deadline_ns=1) == _native.WAIT_DEADLINE
        handle = segment.regions.register(segment.arena.empty(8))
        process.listen(lambda link: None)
        link = await process.dial("bare")
        with pytest.raises(LocalProtocolError, match="no memory"):
            link.open_region(handle)
        segment.close()
        segment.close()
        assert process.memory.used_bytes == 0
        refused.append("all")

    async def bare(process: SimProcess) -> None:
        process.listen(lambda link: None)
        await asyncio.get_running_loop().create_future()

    with World(1) as world:
        world.add("bare", bare)
        world.add("lonely", lonely, start=False)
        world.start("lonely", delay_ns=MS)
        world.run(until=lambda: bool(refused))
