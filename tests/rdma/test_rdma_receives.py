"""A peer that has no receive buffers: credit rules it out, so they are taken away here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.links.link_harness import Ear, Net
from support.links.region_harness import FAR, Ends, RdmaEnds
from support.links.region_harness import RdmaHarness as RegionsOverRdma
from support.rdma.rdma_harness import RdmaHarness
from support.rdma.rdma_world import given_devices

from zbmd.transport.bulk.events import BulkPeerInfo
from zbmd.transport.errors import LinkClosed, PeerLost
from zbmd.transport.link.interface import LinkLimits
from zbmd.transport.rdma.credit import CREDITS, MESSAGE_BYTES
from zbmd.transport.rdma.message_device import MessageDevice
from zbmd.transport.rdma.native._rdma_beat import BeatEnd
from zbmd.transport.rdma.native._rdma_device import Device
from zbmd.transport.rdma.peer import RdmaPeer
from zbmd.transport.rdma.setup import MemoryAt

FRAMES = 2 * CREDITS
LARGE = LinkLimits()
NO_BUFFER = "had no buffer for us in 7 tries"
REFUSALS = Path(f"/sys/class/infiniband/{given_devices()[0].device}/ports/1/hw_counters/rcvd_rnr_err")
"""The times that a peer's device reported that it had no buffer (RNR NAK)."""


def refusals() -> int:
    return int(REFUSALS.read_text())


class Withheld:
    """Buffers that a device has used are not posted again, until they are given back."""

    def __init__(self, device: MessageDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self._post = device._post
        self._monkeypatch = monkeypatch
        self._device = device
        self._held: list[tuple[int, int]] = []
        monkeypatch.setattr(device, "_post", lambda *buffer: self._held.append(buffer))

    def give_back(self) -> None:
        self._monkeypatch.setattr(self._device, "_post", self._post)
        for slab, buffer in self._held:
            self._post(slab, buffer)


def numbered() -> list[bytes]:
    """Of one message or two, so that there are far more than buffers."""
    return [number.to_bytes(4) + bytes(number % 2 * MESSAGE_BYTES) for number in range(FRAMES)]


def test_a_peer_without_buffers_for_a_while_gets_all_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = RdmaHarness("uvloop")

    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ears = Ear(a), Ear(b)
        before, sent = refusals(), numbered()
        withheld = Withheld(harness._devices[-1], monkeypatch)
        for frame in sent:
            a.send(frame)
        while refusals() == before:  # noqa: ASYNC110 - nobody but the device tells
            await asyncio.sleep(0)
        withheld.give_back()
        assert await ears[1].frames(FRAMES) == sent
        b.send(b"and back")
        assert await ears[0].frames(1) == [b"and back"]

    harness.run(scenario, ours=LARGE, theirs=LARGE)


def test_a_peer_without_buffers_for_good_is_lost_and_has_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = RdmaHarness("uvloop")

    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ears = Ear(a), Ear(b)
        Withheld(harness._devices[-1], monkeypatch)
        sent = numbered()
        for frame in sent:
            a.send(frame)
        error = await ears[0].end()
        assert isinstance(error, PeerLost) and NO_BUFFER in str(error)
        with pytest.raises(LinkClosed):
            a.send(b"too late")
        assert isinstance(await ears[1].end(), PeerLost)
        come = ears[1].payloads
        assert CREDITS // 2 <= len(come) < FRAMES and come == sent[: len(come)]

    harness.run(scenario, ours=LARGE, theirs=LARGE)


def test_memory_of_a_peer_without_receives_is_lost_and_takes_no_notification() -> None:
    """Its queue pair is one for heartbeats, which posts none."""

    async def scenario(ends: Ends) -> None:
        assert isinstance(ends, RdmaEnds)
        _, region = ends.far.inbox(ends.near, 8)
        plane, name = ends.planes[0], "far"
        bare = BeatEnd(Device(given_devices()[-1].device))
        peer = RdmaPeer(plane, BulkPeerInfo(name=name, slot=FAR, incarnation=region.handle.incarnation))
        ours, theirs = peer.at, ends.planes[1]
        at = msgspec.structs.replace(ours.at, gid=theirs.port.gid, number=bare.number)
        handle = msgspec.structs.replace(region.handle, key=bare.key)
        peer.connect(
            MemoryAt(
                at=at,
                base=bare.address - handle.offset,
                nbytes=ours.nbytes,
                arena_offset=ours.arena_offset,
                inbox_key=bare.key,
                arena_key=bare.key,
            )
        )
        bare.connect(theirs.port.path_to(ours.at, at.first_psn), address=0, key=0)
        before = refusals()
        there = peer.open_region(handle)
        there.put(np.ones(8, np.uint8), channel=0, value=1)
        with pytest.raises(PeerLost, match=NO_BUFFER):
            await peer.ended
        assert refusals() > before
        with pytest.raises(PeerLost):
            there.put(np.ones(8, np.uint8), channel=0, value=2)
        bare.close()

    RegionsOverRdma().run(scenario)
