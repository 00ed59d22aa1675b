"""RDMA links for the conformance suite, from one device to the other. See `link_harness`."""

from __future__ import annotations

from collections.abc import Coroutine

from link_harness import COOKIE, Listening, OnLink, RealHarness, Who
from rdma_world import given_devices
from tcp_harness import TcpHarness

from zbmd.transport import rdma
from zbmd.transport.endpoint import Endpoint
from zbmd.transport.link_side import LinkSide
from zbmd.transport.rdma_device import RdmaDevice, open_device


class RdmaHarness(RealHarness):
    """Who dials has the first device, who listens the last."""

    transport = "rdma"
    guard_s = 120.0
    """The processor of the RDMA machine is an emulated one."""

    def __init__(self, loop: str) -> None:
        super().__init__(loop)
        self._devices: list[RdmaDevice] = []

    async def _main(self, main: Coroutine[None, None, None]) -> None:
        given = given_devices()
        self._devices = [open_device(*at) for at in given]
        try:
            await main
        finally:
            for device in self._devices:
                await device.aclose()

    async def listen(self, on_link: OnLink, who: Who) -> tuple[Listening, str]:
        listener = await rdma.listen("127.0.0.1:0", on_link, self._endpoint(who), self._devices[-1])
        return listener, str(listener.address)

    async def dial(self, address: str, who: Who) -> LinkSide:
        return await rdma.dial(address, self._endpoint(who), self._devices[0])

    def die_at_message(self, number: int) -> None:
        TcpHarness("asyncio").die_at_message(number)

    def _endpoint(self, who: Who) -> Endpoint:
        return Endpoint(identity=who.identity, cookie=COOKIE, limits=who.limits)
