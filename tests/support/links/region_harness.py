"""Runs one scenario over any transport that has regions: what `test_region_conformance` needs of each.

A scenario is a coroutine that is given both ends. The owner of the remote end can be killed, and replaced by
its next incarnation in the same slot. A transport adds a subclass of `RegionHarness` and an instance to
`HARNESSES`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import uvloop
from numpy.typing import NDArray

from support.rdma.rdma_world import given_devices
from zbmd.transport.bulk.plane import DataPlane
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Link
from zbmd.transport.memory.arena import Arena
from zbmd.transport.memory.region import Regions, RemoteRegion
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native import _native
from zbmd.transport.rdma.connect import RdmaMemory, dial_rdma, listen_rdma, open_rdma_plane
from zbmd.transport.rdma.link import RdmaLink
from zbmd.transport.rdma.message_device import MessageDevice, open_rdma_device
from zbmd.transport.shm.connect import Endpoint, link_pair
from zbmd.transport.shm.death_notice import DeathNotice, DeathWatch, LifeThread
from zbmd.transport.sim import SimProcess, World
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.connect import join_bulk
from zbmd.transport.tcp.link import TcpLink

if TYPE_CHECKING:
    from zbmd.transport.rdma.plane import RdmaPlane

GUARD_NS = 60_000_000_000
"""A wait of a scenario that is not over by then hangs."""
FRESH_BYTES = 1 << 30
NEAR, FAR = 1, 2
"""Slots."""


class Memory(Protocol):
    """A segment, real or simulated."""

    slot: int
    incarnation: int
    inbox: Arena
    arena: Arena
    regions: Regions

    def lost_mask(self) -> int: ...
    def clear_lost(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of both segments."""

    arena_bytes: int = 1 << 20
    inbox_bytes: int = 1 << 20


class End(ABC):
    """One end of a link, and the memory of its process."""

    def __init__(self, memory: Memory, link: Link) -> None:
        self.memory = memory
        self.link = link

    def inbox(self, other: End, nbytes: int) -> tuple[NDArray[np.uint8], RemoteRegion]:
        """A zeroed array in our inbox, and the region of it as `other` opens it.

        One of `FRESH_BYTES` or more must be the first in it, which is zeroed by the kernel.
        """
        array = self.memory.inbox.empty(nbytes, np.uint8)
        if nbytes < FRESH_BYTES:
            array[:] = 0
        return array, other.link.open_region(self.memory.regions.register(array))

    @abstractmethod
    async def wait(
        self, slot: int, channel: int, value: int, *, group_mask: int = 0, for_ns: int = GUARD_NS
    ) -> int:
        """`Segment.wait` on our memory."""

    @abstractmethod
    def abort(self, channel: int, epoch: int) -> None:
        """End our waits on a channel."""


class Ends(ABC):
    """The arguments of a scenario."""

    near: End
    far: End

    @abstractmethod
    async def kill_far(self) -> None:
        """Kill the owner of the remote end; return once our end has had the notice."""

    @abstractmethod
    async def replace_far(self) -> None:
        """The next incarnation takes the slot: `far` is another end, and `near` the other end of its link."""


Scenario = Callable[[Ends], Awaitable[None]]


class RegionHarness(ABC):
    """A transport."""

    name: str
    shares_memory = False
    owner_refuses = True
    """Whether the owner of a region has a look at what reaches it."""
    blocks = True
    """Whether a thread may block in `Transfer.wait`."""
    large_bytes = 1 << 30
    """Of the largest region that is tried."""

    @abstractmethod
    def run(self, scenario: Scenario, sizes: Sizes = Sizes()) -> None:
        """Run it to its end."""


# -- shared memory ---------------------------------------------------------------------------------------


class ShmEnd(End):
    def __init__(self, segment: Segment, link: Link) -> None:
        super().__init__(segment, link)
        self._segment = segment

    async def wait(
        self, slot: int, channel: int, value: int, *, group_mask: int = 0, for_ns: int = GUARD_NS
    ) -> int:
        """In a thread, as a rank's data plane does."""
        deadline_ns = _native.now_ns() + for_ns

        def block() -> int:
            return self._segment.wait(slot, channel, value, group_mask=group_mask, deadline_ns=deadline_ns)

        return await asyncio.to_thread(block)

    def abort(self, channel: int, epoch: int) -> None:
        _native.abort_channel(self._segment.base, channel, epoch)


class _Owner:
    """A real process that holds the words of life of a segment, so that its death is the owner's."""

    def __init__(self, segment: Segment) -> None:
        ready, tell = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(ready)
                life = LifeThread(segment)
                os.write(tell, b"1")
                signal.pause()
                life.goodbye()
            finally:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        os.close(tell)
        assert os.read(ready, 1) == b"1"
        os.close(ready)

    def kill(self) -> None:
        """SIGKILL, and reap. Idempotent."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0


class ShmEnds(Ends):
    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._links: list[Link] = []
        self._segments = [self._create(NEAR, 1), self._create(FAR, 1)]
        self._owner = _Owner(self._segments[1])
        self._noticed: asyncio.Event
        self._watch: DeathWatch

    def begin(self) -> None:
        """On the loop."""
        self._watch = DeathWatch(self._segments[0], asyncio.get_running_loop())
        self._connect()

    def _create(self, slot: int, incarnation: int) -> Segment:
        sizes = self._sizes
        return Segment.create(
            slot=slot,
            incarnation=incarnation,
            arena_bytes=sizes.arena_bytes,
            inbox_bytes=sizes.inbox_bytes,
        )

    def _connect(self) -> None:
        endpoints = [
            Endpoint(identity=_identity(segment), cookie=bytes(32), segment=segment)
            for segment in (self._segments[0], self._segments[-1])
        ]
        near, far = link_pair(*endpoints)
        self._links += [near, far]
        self.near = ShmEnd(self._segments[0], near)
        self.far = ShmEnd(self._segments[-1], far)
        assert near.peer_segment is not None
        self._noticed = asyncio.Event()
        self._watch.watch(near.peer_segment, self._on_death)

    def _on_death(self, slot: int, notice: DeathNotice) -> None:
        self._noticed.set()

    async def kill_far(self) -> None:
        self._owner.kill()
        await self._noticed.wait()

    async def replace_far(self) -> None:
        self._segments.append(self._create(FAR, self._segments[-1].incarnation + 1))
        self._owner = await asyncio.to_thread(_Owner, self._segments[-1])
        self._segments[0].clear_lost(FAR)
        self._connect()

    def end(self) -> None:
        """Give everything back."""
        self._owner.kill()
        self._watch.close()
        for link in self._links:
            link.close()

    def close(self) -> None:
        """Off the loop."""
        self._owner.kill()
        for segment in self._segments:
            segment.close()


def _identity(segment: Segment) -> Identity:
    return Identity(
        name=f"slot{segment.slot}",
        pid=os.getpid(),
        uid=os.getuid(),
        incarnation=segment.incarnation,
        job=1,
        contracts={},
    )


def run_between(ends: ShmEnds, scenario: Scenario) -> None:
    """Run `scenario` between `ends`, on a loop of its own, and give all of theirs back."""

    async def main() -> None:
        ends.begin()
        try:
            await scenario(ends)
        finally:
            ends.end()

    try:
        asyncio.run(main())
    finally:
        ends.close()


class ShmHarness(RegionHarness):
    """Both ends on one loop, over real segments; the far one's life is a real process's."""

    name = "shm"
    shares_memory = True
    owner_refuses = False

    def run(self, scenario: Scenario, sizes: Sizes = Sizes()) -> None:
        run_between(ShmEnds(sizes), scenario)


# -- TCP -------------------------------------------------------------------------------------------------


class Closes(Protocol):
    """Everything that is closed at the end."""

    def close(self) -> None: ...


PlaneT = TypeVar("PlaneT", bound=Closes)
LinkT = TypeVar("LinkT", bound=Link)


class PlaneEnds(Ends, Generic[PlaneT, LinkT]):
    """Both ends in this process, each with a segment and a plane; a death is what is left of one."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._links: list[LinkT] = []
        self._segments: list[Segment] = []
        self.planes: list[PlaneT] = []

    @abstractmethod
    def _plane(self, slot: int, segment: Segment) -> PlaneT:
        """A plane for a new life in that slot."""

    @abstractmethod
    async def _linked(
        self, near: tuple[Endpoint, PlaneT], far: tuple[Endpoint, PlaneT]
    ) -> tuple[LinkT, LinkT]:
        """Their links, near and far, with each other's memory."""

    @abstractmethod
    async def _end_far(self) -> None:
        """Do what the kernel does for a process that is killed."""

    async def begin(self) -> None:
        """On the loop."""
        self._own = self._process(NEAR, 1)
        await self._connect(1)

    def _process(self, slot: int, incarnation: int) -> tuple[Endpoint, PlaneT]:
        sizes = self._sizes
        segment = Segment.create(
            slot=slot,
            incarnation=incarnation,
            arena_bytes=sizes.arena_bytes,
            inbox_bytes=sizes.inbox_bytes,
        )
        self._segments.append(segment)
        plane = self._plane(slot, segment)
        self.planes.append(plane)
        return Endpoint(identity=_identity(segment), cookie=bytes(32), segment=segment), plane

    async def _connect(self, incarnation: int) -> None:
        near, far = await self._linked(self._own, self._process(FAR, incarnation))
        self._links += [near, far]
        self.near, self.far = ShmEnd(self._segments[0], near), ShmEnd(self._segments[-1], far)

    async def kill_far(self) -> None:
        await self._end_far()
        assert (
            await self.near.wait(FAR, _native.CHANNELS - 1, 1 << 63, group_mask=1 << FAR) == _native.WAIT_LOST
        )

    async def replace_far(self) -> None:
        self._segments[0].clear_lost(FAR)
        await self._connect(self._segments[-1].incarnation + 1)

    def close(self) -> None:
        """Give everything back."""
        for link in self._links:
            link.close()
        for plane in self.planes:
            plane.close()
        for segment in self._segments:
            segment.close()


class _TcpEnds(PlaneEnds[DataPlane, TcpLink]):
    """Of a process that is killed, closed sockets are left."""

    def __init__(self, sizes: Sizes, stripes: int) -> None:
        super().__init__(sizes)
        self._stripes = stripes

    def _plane(self, slot: int, segment: Segment) -> DataPlane:
        return DataPlane()

    async def _linked(
        self, near: tuple[Endpoint, DataPlane], far: tuple[Endpoint, DataPlane]
    ) -> tuple[TcpLink, TcpLink]:
        accepted: asyncio.Future[TcpLink] = asyncio.get_running_loop().create_future()
        listener = await tcp.listen("127.0.0.1:0", accepted.set_result, far[0])
        link = await tcp.dial(listener.address, near[0])
        other = await accepted
        await asyncio.gather(
            join_bulk(link, *near, slot=FAR, stripes=self._stripes),
            join_bulk(other, *far, slot=NEAR),
        )
        listener.close()
        return link, other

    async def _end_far(self) -> None:
        self.planes[-1].close()


class TcpHarness(RegionHarness):
    """Over loopback, with the MAC."""

    def __init__(self, stripes: int) -> None:
        self.name = f"tcp, {stripes} stripes"
        self._stripes = stripes

    def run(self, scenario: Scenario, sizes: Sizes = Sizes()) -> None:
        async def main() -> None:
            ends = _TcpEnds(sizes, self._stripes)
            try:
                await ends.begin()
                await scenario(ends)
            finally:
                ends.close()

        asyncio.run(main())


# -- simulated -------------------------------------------------------------------------------------------


class _SimEnd(End):
    def __init__(self, process: SimProcess, link: Link) -> None:
        assert process.segment is not None
        super().__init__(process.segment, link)
        self._process = process
        self._segment = process.segment

    async def wait(
        self, slot: int, channel: int, value: int, *, group_mask: int = 0, for_ns: int = GUARD_NS
    ) -> int:
        deadline_ns = self._process.clock.local_ns(self._process.world.now_ns) + for_ns
        return await self._segment.wait(slot, channel, value, group_mask=group_mask, deadline_ns=deadline_ns)

    def abort(self, channel: int, epoch: int) -> None:
        self._segment.abort_channel(channel, epoch)


class _SimEnds(Ends):
    def __init__(self, world: World, sizes: Sizes) -> None:
        self._world = world
        self._sizes = sizes
        self._accepted: list[_SimEnd] = []
        self._changed = asyncio.Event()
        self._listening = asyncio.Event()

    async def near_main(self, process: SimProcess, scenario: Scenario) -> None:
        """The program of the near process."""
        self._process = process
        self._open(process, NEAR)
        await self._connect()
        await scenario(self)
        self._world.crash("far")

    async def far_main(self, process: SimProcess) -> None:
        """The program of each incarnation of the remote process."""
        self._open(process, FAR)

        def accepted(link: Link) -> None:
            self._accepted.append(_SimEnd(process, link))
            self._changed.set()

        process.listen(accepted)
        self._listening.set()
        await asyncio.get_running_loop().create_future()

    def _open(self, process: SimProcess, slot: int) -> None:
        sizes = self._sizes
        process.open_segment(slot=slot, arena_bytes=sizes.arena_bytes, inbox_bytes=sizes.inbox_bytes)

    async def _connect(self) -> None:
        link = await self._process.dial("far")
        while not self._accepted:
            self._changed.clear()
            await self._changed.wait()
        self.near, self.far = _SimEnd(self._process, link), self._accepted.pop()

    async def kill_far(self) -> None:
        self._world.crash("far")
        outcome = await self.near.wait(FAR, _native.CHANNELS - 1, 1 << 63, group_mask=1 << FAR)
        assert outcome == _native.WAIT_LOST

    async def replace_far(self) -> None:
        self._listening.clear()
        self._world.start("far", delay_ns=0)
        await self._listening.wait()
        assert self._process.segment is not None
        self._process.segment.clear_lost(FAR)
        await self._connect()


class SimHarness(RegionHarness):
    """Two simulated processes; the scenario is the near one's program."""

    name = "sim"
    blocks = False

    def run(self, scenario: Scenario, sizes: Sizes = Sizes()) -> None:
        with World(seed=1) as world:
            ends = _SimEnds(world, sizes)
            done: list[bool] = []

            async def near(process: SimProcess) -> None:
                await ends.near_main(process, scenario)
                done.append(True)

            world.add("far", ends.far_main)
            world.add("near", near, start=False)
            world.start("near", delay_ns=1_000_000)
            world.run(until=lambda: bool(done))


# -- RDMA ------------------------------------------------------------------------------------------------


class RdmaEnds(PlaneEnds["RdmaPlane", RdmaLink]):
    """Each end has a device. Of a process that is killed, its queue pairs go first, and then its sockets."""

    def __init__(self, sizes: Sizes, devices: list[MessageDevice]) -> None:
        super().__init__(sizes)
        self._devices = devices

    def _plane(self, slot: int, segment: Segment) -> RdmaPlane:
        return open_rdma_plane(*given_devices()[0 if slot == NEAR else -1], segment=segment)

    async def _linked(
        self, near: tuple[Endpoint, RdmaPlane], far: tuple[Endpoint, RdmaPlane]
    ) -> tuple[RdmaLink, RdmaLink]:
        accepted: asyncio.Future[RdmaLink] = asyncio.get_running_loop().create_future()
        listener = await listen_rdma(
            "127.0.0.1:0",
            accepted.set_result,
            far[0],
            self._devices[-1],
            memory=RdmaMemory(plane=far[1], slot_of=lambda peer: NEAR),
        )
        link = await dial_rdma(
            listener.address,
            near[0],
            self._devices[0],
            memory=RdmaMemory(plane=near[1], slot_of=lambda peer: FAR),
        )
        other = await accepted
        listener.close()
        await listener.wait_closed()
        return link, other

    async def _end_far(self) -> None:
        await asyncio.to_thread(self.planes[-1].close)
        self._links[-1].tcp_link.close()


class RdmaHarness(RegionHarness):
    """From the first device that is given to the last."""

    name = "rdma"
    large_bytes = 20 << 20  # several messages; the processor of the RDMA machine is an emulated one

    def run(self, scenario: Scenario, sizes: Sizes = Sizes()) -> None:
        async def main() -> None:
            devices = [open_rdma_device(*at) for at in given_devices()]
            ends = RdmaEnds(sizes, devices)
            try:
                await ends.begin()
                await scenario(ends)
            finally:
                ends.close()
                for device in devices:
                    await device.aclose()

        uvloop.run(main())


WITHOUT_DEVICES: tuple[RegionHarness, ...] = (ShmHarness(), TcpHarness(1), TcpHarness(3), SimHarness())
HARNESSES: tuple[RegionHarness, ...] = (RdmaHarness(),) if given_devices() else WITHOUT_DEVICES
"""Where RDMA devices are given, the suite is about these: the others have been through it elsewhere."""
