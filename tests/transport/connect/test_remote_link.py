"""Links between hosts of which one or both have no RDMA: TCP, and both sides say why. With it: tests/rdma."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.links.link_harness import COOKIE, SMALL, Ear, Who

from zbmd.transport.identity import PeerInfo
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.rdma import connect as remote_link
from zbmd.transport.rdma.connect import NoRdma, RemoteLink
from zbmd.transport.rdma.setup import (
    MemoryAt,
    QueuePairAt,
    RdmaOffer,
    RdmaReady,
    RdmaRefused,
    decode_setup,
    encode_setup,
)
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.link import TcpLink

PATIENCE_NS = 60_000_000_000
SILENT_NS = 1_000_000_000
"""A peer that says nothing is closed by then, and one on a busy machine has said all."""
AT = QueuePairAt(gid=bytes(16), lid=0, number=17, first_psn=1, mtu=3)
OFFER = RdmaOffer(AT, MemoryAt(at=AT, base=0, nbytes=0, arena_offset=0, inbox_key=0, arena_key=0))
HERE = NoRdma(why="here has no RDMA device")


def endpoint(name: str) -> Endpoint:
    return Endpoint(identity=Who(name=name, limits=SMALL).identity, cookie=COOKIE)


class Door:
    """A listener without RDMA, and the links that it has made."""

    def __init__(self) -> None:
        self.links: asyncio.Queue[tuple[RemoteLink, str]] = asyncio.Queue()
        self.listener: remote_link.RemoteListener | None = None

    async def open(self, timeout_ns: int) -> None:
        self.listener = await remote_link.listen(
            "127.0.0.1:0",
            lambda *made: self.links.put_nowait(made),
            endpoint("there"),
            NoRdma(why="there has no RDMA device"),
            timeout_ns=timeout_ns,
            plain=is_guest,
        )

    @property
    def address(self) -> str:
        assert self.listener is not None
        return str(self.listener.address)


def is_guest(peer: PeerInfo) -> bool:
    return peer.name == "guest"


@pytest.fixture
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    made = Door()
    await made.open(getattr(request, "param", PATIENCE_NS))
    yield made
    assert made.listener is not None
    made.listener.close()
    await made.listener.wait_closed()
    while not made.links.empty():
        made.links.get_nowait()[0].close()


async def frames_go_over(link: RemoteLink, other: RemoteLink) -> None:
    ear = Ear(other)
    link.send(b"a frame")
    assert await ear.frames(1) == [b"a frame"]
    link.close()
    assert await ear.end() is None


async def test_without_rdma_it_is_tcp_and_both_sides_say_why(door: Door) -> None:
    link, why = await remote_link.dial(door.address, endpoint("here"), HERE)
    other, why_there = await door.links.get()
    assert isinstance(link, TcpLink) and isinstance(other, TcpLink)
    assert why == "here has no RDMA device"
    assert why_there == "here refuses an RDMA link: here has no RDMA device"
    await frames_go_over(link, other)


async def test_an_offer_is_refused_with_the_reason_and_the_link_is_used_as_it_is(door: Door) -> None:
    link = await tcp.dial(door.address, endpoint("here"))
    ear = Ear(link)
    link.send(encode_setup(OFFER))
    (answer,) = await ear.frames(1)
    with pytest.raises(RdmaRefused, match="there refuses an RDMA link: there has no RDMA device"):
        decode_setup(answer, RdmaReady, "there")
    other, why = await door.links.get()
    assert why == "there has no RDMA device"
    await frames_go_over(link, other)


async def test_guests_say_nothing_first(door: Door) -> None:
    link = await tcp.dial(door.address, endpoint("guest"))
    other, _ = await door.links.get()
    await frames_go_over(link, other)


@pytest.mark.parametrize(
    ("door", "first"),
    [(PATIENCE_NS, said) for said in (b"", b"\x00" * 100, encode_setup(RdmaReady()))] + [(SILENT_NS, None)],
    indirect=["door"],
)
async def test_who_says_something_else_or_nothing_is_closed_alone(door: Door, first: bytes | None) -> None:
    link = await tcp.dial(door.address, endpoint("here"))
    ear = Ear(link)
    if first is not None:
        link.send(first)
    await ear.end()
    good, _ = await remote_link.dial(door.address, endpoint("here"), HERE)
    other, _ = await door.links.get()
    await frames_go_over(good, other)
