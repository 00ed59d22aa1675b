"""RDMA links for the conformance suite, from one device to the other. See `link_harness`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager

from support.links.link_harness import COOKIE, INCARNATION, SMALL, Listening, OnLink, RealHarness, Who
from support.rdma.rdma_world import given_devices
from support.tcp.tcp_harness import TcpHarness
from zbmd.transport.link.base import LinkSide
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.memory.segment import Segment
from zbmd.transport.rdma.connect import Rdma, RdmaMemory, dial_rdma, listen_rdma, open_rdma_plane
from zbmd.transport.rdma.link import RdmaLink
from zbmd.transport.rdma.message_device import MessageDevice, open_rdma_device


@asynccontextmanager
async def rdma_link_pair(
    dialer: Endpoint, listener: Endpoint, *, timeout_ns: int | None = None
) -> AsyncGenerator[tuple[RdmaLink, RdmaLink]]:
    """A link from the first device to the last: its two ends, on the running loop, which users close.

    timeout_ns: for each side to set it up, by default as their endpoints have it.
    """
    devices = [open_rdma_device(*at) for at in given_devices()]
    accepted: asyncio.Queue[RdmaLink] = asyncio.Queue()
    listening = await listen_rdma(
        "127.0.0.1:0", accepted.put_nowait, listener, devices[-1], timeout_ns=timeout_ns
    )
    try:
        dialed = await dial_rdma(listening.address, dialer, devices[0], timeout_ns=timeout_ns)
        yield dialed, await accepted.get()
    finally:
        listening.close()
        await listening.wait_closed()
        for device in devices:
            await device.aclose()


@asynccontextmanager
async def rdma_offers() -> AsyncGenerator[list[tuple[Endpoint, Rdma]]]:
    """Devices and planes of two processes with RDMA links and memory, from the first device to the last."""
    async with AsyncExitStack() as stack:
        made: list[tuple[Endpoint, Rdma]] = []
        for slot, at in ((0, given_devices()[0]), (1, given_devices()[-1])):
            segment = Segment.create(
                slot=slot, incarnation=INCARNATION, arena_bytes=1 << 16, inbox_bytes=1 << 16
            )
            stack.callback(segment.close)
            device = open_rdma_device(*at)
            stack.push_async_callback(device.aclose)
            plane = open_rdma_plane(*at, segment=segment)
            stack.callback(plane.close)
            identity = Who(name=f"side{slot}", limits=SMALL).identity
            memory = RdmaMemory(plane=plane, slot_of=lambda peer: int(peer.name[-1]))
            endpoint = Endpoint(identity=identity, cookie=COOKIE, segment=segment)
            made.append((endpoint, Rdma(device=device, memory=memory)))
        yield made


class RdmaHarness(RealHarness):
    """The dialer has the first device, the listener the last."""

    transport = "rdma"
    guard_s = 300.0
    """The processor of the RDMA machine is an emulated one."""

    def __init__(self, loop: str) -> None:
        super().__init__(loop)
        self._devices: list[MessageDevice] = []

    async def _main(self, main: Coroutine[None, None, None]) -> None:
        given = given_devices()
        self._devices = [open_rdma_device(*at) for at in given]
        try:
            await main
        finally:
            for device in self._devices:
                await device.aclose()

    async def listen(self, on_link: OnLink, who: Who) -> tuple[Listening, str]:
        listener = await listen_rdma("127.0.0.1:0", on_link, self._endpoint(who), self._devices[-1])
        return listener, str(listener.address)

    async def dial(self, address: str, who: Who) -> LinkSide:
        return await dial_rdma(address, self._endpoint(who), self._devices[0])

    def die_at_message(self, number: int) -> None:
        TcpHarness("asyncio").die_at_message(number)

    def _endpoint(self, who: Who) -> Endpoint:
        return Endpoint(identity=who.identity, cookie=COOKIE, limits=who.limits)
