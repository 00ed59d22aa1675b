"""Faults of the cable between two devices in software: `tests/tools/test_rdma_vm.py` has such a machine."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator

import pytest
from link_harness import Ear, Net
from rdma_harness import RdmaHarness
from rdma_world import given_devices

from zbmd.transport.errors import LinkClosed, PeerLost
from zbmd.transport.link import LinkLimits
from zbmd.transport.topology.rdma import read_rdma_devices

FRAMES = 200
LARGE = LinkLimits()


@pytest.fixture
def interface() -> Iterator[str]:
    """The one of the listener's device; as it was before, afterwards."""
    name = given_devices()[-1].device
    found = next(device for device in read_rdma_devices() if device.name == name).interfaces[0]
    yield found
    subprocess.run(["tc", "qdisc", "delete", "dev", found, "root"], check=False, capture_output=True)
    subprocess.run(["ip", "link", "set", found, "up"], check=True)


def test_packet_loss_loses_and_reorders_nothing(interface: str) -> None:
    subprocess.run(
        [
            "tc",
            "qdisc",
            "add",
            "dev",
            interface,
            "root",
            "netem",
            "loss",
            "2%",
            "reorder",
            "10%",
            "delay",
            "1ms",
        ],
        check=True,
    )

    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ears = Ear(a), Ear(b)
        sent = [number.to_bytes(4) + bytes(number * 29 % 6000) for number in range(FRAMES)]
        for frame in sent:
            a.send(frame)
            b.send(frame)
        for ear in ears:
            assert await ear.frames(FRAMES) == sent

    RdmaHarness("uvloop").run(scenario, ours=LARGE, theirs=LARGE)


def test_a_cable_that_is_pulled_ends_the_link(interface: str) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ears = Ear(a), Ear(b)
        a.send(b"before")
        await ears[1].frames(1)
        pulled = await asyncio.create_subprocess_exec("ip", "link", "set", interface, "down")
        assert await pulled.wait() == 0
        a.send(b"after")
        error = await ears[0].end()
        assert isinstance(error, PeerLost) and "RDMA" in str(error)
        with pytest.raises(LinkClosed):
            a.send(b"too late")
        assert isinstance(await ears[1].end(), PeerLost)

    RdmaHarness("uvloop").run(scenario)
