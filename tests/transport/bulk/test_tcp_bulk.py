"""Regions over TCP links: the stripes join by themselves, and bulk and link end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
from support.bulk.bulk_host import BulkHost
from support.tcp.tcp_certificates import job_tls

from zbmd.transport.bulk.peer import BulkPeer
from zbmd.transport.bulk.stripe_io import STRIPES_DEFAULT_MAX, buffer_bytes_max, stripes_for
from zbmd.transport.errors import LinkClosed, LocalProtocolError, PeerLost, ZbmdError
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.native import _native
from zbmd.transport.secure.protection import Protection
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpSettings
from zbmd.transport.tcp.connect import join_bulk
from zbmd.transport.tcp.link import TcpLink

NBYTES = 3 << 20


def endpoint_of(host: BulkHost) -> Endpoint:
    identity = Identity(name=f"rank{host.slot}", pid=1, uid=0, incarnation=host.slot + 1, job=7)
    return Endpoint(identity=identity, cookie=b"a cookie of the tests, 32 bytes ", segment=host.segment)


class Both:
    """Two hosts and the two ends of a link between them."""

    def __init__(self, hosts: tuple[BulkHost, BulkHost], links: tuple[TcpLink, TcpLink]) -> None:
        self.hosts = hosts
        self.links = links

    async def join(self, *, stripes: int | None = None) -> tuple[BulkPeer, BulkPeer]:
        a, b = self.hosts
        first, second = await asyncio.gather(
            join_bulk(self.links[0], endpoint_of(a), a.plane, slot=1, stripes=stripes),
            join_bulk(self.links[1], endpoint_of(b), b.plane, slot=0),
        )
        return first, second


@asynccontextmanager
async def linked(protection: Protection = Protection.MAC) -> AsyncGenerator[Both]:
    settings = TcpSettings(protection=protection, tls=job_tls() if protection is Protection.TLS else None)
    async with AsyncExitStack() as stack:
        a, b = (stack.enter_context(BulkHost(slot, nbytes=2 * NBYTES)) for slot in (0, 1))
        accepted: asyncio.Queue[TcpLink] = asyncio.Queue()
        listener = await tcp.listen("127.0.0.1:0", accepted.put_nowait, endpoint_of(b), settings=settings)
        stack.callback(listener.close)
        link = await tcp.dial(listener.address, endpoint_of(a), settings=settings)
        links = link, await accepted.get()
        for each in links:
            stack.callback(each.close)
        yield Both((a, b), links)


@pytest.mark.parametrize("protection", list(Protection))
async def test_put_and_get_both_ways(protection: Protection) -> None:
    async with linked(protection) as both:
        await both.join(stripes=2)
        for us, them, link in ((0, 1, both.links[0]), (1, 0, both.links[1])):
            host, peer = both.hosts[us], both.hosts[them]
            inbox = peer.segment.inbox.empty(NBYTES, np.uint8)
            region = link.open_region(peer.regions.register(inbox))
            data = np.random.default_rng(us).integers(0, 256, NBYTES, np.uint8)
            await region.put(data, channel=1, value=5)
            into = np.zeros(NBYTES, np.uint8)
            await region.get(into)
            assert peer.wait(us, 1, 5) == _native.WAIT_OK
            assert np.array_equal(inbox, data) and np.array_equal(into, data)
            assert host.segment.lost_mask() == 0


async def test_a_link_without_memory_opens_no_region() -> None:
    async with linked() as both:
        a, b = both.hosts
        handle = b.regions.register(b.segment.inbox.empty(8, np.uint8))
        with pytest.raises(LocalProtocolError, match="no memory"):
            both.links[0].open_region(handle)
        with pytest.raises(LocalProtocolError, match="17 stripes"):
            await join_bulk(both.links[0], endpoint_of(a), a.plane, slot=1, stripes=17)


async def test_closing_the_link_ends_the_bulk_connection_in_order() -> None:
    async with linked() as both:
        to_b, to_a = await both.join()
        b = both.hosts[1]
        inbox = b.segment.inbox.empty(NBYTES, np.uint8)
        region = both.links[0].open_region(b.regions.register(inbox))
        put = region.put(np.ones(NBYTES, np.uint8), channel=0, value=1)
        both.links[0].close()
        await put
        for bulk in (to_b, to_a):
            await bulk.ended
        assert _native.load_cell(b.segment.base, 0, 0) == 1 and (inbox == 1).all()
        assert b.segment.lost_mask() == 0
        with pytest.raises(LinkClosed):
            region.notify(0, 2)


async def test_a_bulk_connection_that_fails_ends_the_link() -> None:
    async with linked() as both:
        to_b, _ = await both.join()
        ends: asyncio.Queue[ZbmdError | None] = asyncio.Queue()
        for link in both.links:
            link.on_closed = ends.put_nowait
        to_b.abort(PeerLost("rank1", "given up"))
        for _ in both.links:
            assert isinstance(await ends.get(), PeerLost)


async def test_a_link_that_fails_ends_the_bulk_connection() -> None:
    async with linked() as both:
        to_b, _ = await both.join()
        both.links[1]._fail(PeerLost("rank0", "given up"))
        with pytest.raises(PeerLost):
            await to_b.ended
        assert both.hosts[0].wait(1, 0, 1) == _native.WAIT_LOST


async def test_a_bulk_connection_that_cannot_be_made_closes_the_link() -> None:
    async with linked() as both:
        a, b = both.hosts
        both.links[1].close()
        ended: asyncio.Future[ZbmdError | None] = asyncio.get_running_loop().create_future()
        both.links[0].on_closed = ended.set_result
        with pytest.raises(ZbmdError):
            await join_bulk(both.links[0], endpoint_of(a), a.plane, slot=1)
        await ended
        handle = b.regions.register(b.segment.inbox.empty(8, np.uint8))
        with pytest.raises(ZbmdError):
            both.links[0].open_region(handle).notify(0, 1)


def test_the_number_of_stripes_follows_the_path() -> None:
    buffer_bytes = 2 << 20
    assert stripes_for(50, buffer_bytes) == 1
    assert stripes_for(1_000, buffer_bytes) == 1
    assert stripes_for(5_000, buffer_bytes) == 3
    assert stripes_for(100_000, buffer_bytes) == STRIPES_DEFAULT_MAX
    assert stripes_for(0, 0) == 1
    assert buffer_bytes_max() > 0


@pytest.mark.parametrize("turns", [0, 1, 2, 4, 8, 16, 32])
async def test_a_join_that_is_cancelled_closes_its_link_and_leaves_nothing(turns: int) -> None:
    async with linked() as both:
        a, b = both.hosts
        await join_bulk(both.links[1], endpoint_of(b), b.plane, slot=0)
        joining = asyncio.ensure_future(
            join_bulk(both.links[0], endpoint_of(a), a.plane, slot=1, stripes=STRIPES_DEFAULT_MAX)
        )
        for _ in range(turns + 1):
            await asyncio.sleep(0)
        joining.cancel()
        await asyncio.wait([joining])
        assert joining.cancelled() or turns
        assert both.links[0].closed == joining.cancelled()
        # What remains of descriptors, threads and tasks is looked for after every test.
