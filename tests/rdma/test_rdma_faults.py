"""Faults of the cable between two software devices, in the machine of `tests/tools/lab/test_rdma_vm.py`."""

from __future__ import annotations

import asyncio
import errno
import subprocess
from collections.abc import Iterator

import pytest
import uvloop
from support.links.link_harness import COOKIE, Ear, Net, Who
from support.rdma.rdma_harness import RdmaHarness, rdma_link_pair, rdma_offers
from support.rdma.rdma_world import given_devices, interface_of

from zbmd.transport.errors import LinkClosed, PeerLost
from zbmd.transport.link.interface import Endpoint, LinkLimits
from zbmd.transport.rdma import connect as remote_link
from zbmd.transport.rdma import message_device as rdma_device
from zbmd.transport.rdma.connect import RemoteLink
from zbmd.transport.rdma.link import RdmaLink
from zbmd.transport.rdma.message_device import LookUp, looks_up
from zbmd.transport.rdma.setup import QueuePairAt
from zbmd.transport.tcp.link import TcpLink

FRAMES = 200
LARGE = LinkLimits()
PATIENCE_NS = 100 * 10**9
"""A question takes a second until it is lost, and it is not asked again when half the time is gone."""


@pytest.fixture
def interface() -> Iterator[str]:
    """The one of the listener's device; as it was before, afterwards."""
    found = interface_of(given_devices()[-1].device)
    yield found
    subprocess.run(["tc", "qdisc", "delete", "dev", found, "root"], check=False, capture_output=True)
    subprocess.run(["ip", "link", "set", found, "up"], check=True)


def impair(interface: str, impairment: str) -> None:
    """Impair all that leaves there from now on; impairment: netem's arguments."""
    subprocess.run(
        ["tc", "qdisc", "replace", "dev", interface, "root", "netem", *impairment.split()], check=True
    )


def test_a_peer_is_asked_for_again_when_the_question_was_lost(
    interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def healed_after_one(name: str, address: str) -> LookUp:
        look_up = looks_up(name, address)
        assert look_up is not None

        def ask(peer: QueuePairAt) -> int:
            asked.append(look_up(peer))
            if asked == [errno.ETIMEDOUT]:
                impair(interface, "loss 0%")
            return asked[-1]

        return ask

    monkeypatch.setattr(rdma_device, "looks_up", healed_after_one)

    async def scenario() -> None:
        ends = [Endpoint(identity=Who(name=name, limits=LARGE).identity, cookie=COOKIE) for name in "ab"]
        async with rdma_link_pair(*ends, timeout_ns=PATIENCE_NS) as (a, b):
            ear = Ear(b)
            a.send(b"found")
            assert await ear.frames(1) == [b"found"]
            a.close()
            assert await ear.end() is None

    subprocess.run(["ip", "link", "set", interface, "down"], check=True)  # forgets who has which address
    subprocess.run(["ip", "link", "set", interface, "up"], check=True)
    impair(interface, "loss 100%")
    uvloop.run(scenario())
    assert asked[0] == errno.ETIMEDOUT and asked[-1] == 0


def test_packet_loss_loses_and_reorders_nothing(interface: str) -> None:
    impair(interface, "loss 2% reorder 10% delay 1ms")

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


def test_while_a_port_is_down_links_are_tcp_and_say_why_then_rdma_again(interface: str) -> None:
    async def set_port(state: str) -> None:
        process = await asyncio.create_subprocess_exec("ip", "link", "set", interface, state)
        assert await process.wait() == 0

    async def scenario() -> None:
        async with rdma_offers() as ((near, ours), (far, theirs)):
            accepted: asyncio.Queue[tuple[RemoteLink, str]] = asyncio.Queue()
            listener = await remote_link.listen(
                "127.0.0.1:0", lambda *made: accepted.put_nowait(made), far, theirs
            )

            async def link() -> tuple[RemoteLink, RemoteLink, str]:
                dialed, why = await remote_link.dial(listener.address, near, ours)
                other, _ = await accepted.get()
                ear = Ear(other)
                dialed.send(b"over what there is")
                assert await ear.frames(1) == [b"over what there is"]
                return dialed, other, why

            a, b, why = await link()
            assert isinstance(a, RdmaLink) and isinstance(b, RdmaLink) and "both sides have RDMA" in why
            ears = Ear(a), Ear(b)
            await set_port("down")
            a.send(b"into the void")
            assert [type(await ear.end()) for ear in ears] == [PeerLost, PeerLost]
            a, b, why = await link()
            assert isinstance(a, TcpLink) and isinstance(b, TcpLink), why
            assert "rxe" in why or "nothing comes through" in why
            a.close()
            b.close()
            await set_port("up")
            a, b, why = await link()
            assert isinstance(a, RdmaLink) and isinstance(b, RdmaLink), why
            a.close()
            assert await Ear(b).end() is None
            listener.close()
            await listener.wait_closed()

    uvloop.run(scenario())
