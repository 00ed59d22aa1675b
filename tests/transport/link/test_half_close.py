"""A peer whose one direction is shut: what it said before arrives, and the link ends on both sides."""

from __future__ import annotations

import socket

import pytest
from support.links.link_harness import Ear, LinkHarness, Net, RealHarness
from support.links.link_harnesses import HARNESSES

from zbmd.transport.errors import LinkClosed, PeerLost, ZbmdError
from zbmd.transport.link.base import LinkSide
from zbmd.transport.shm.link import ShmLink
from zbmd.transport.tcp.link import TcpLink

pytestmark = pytest.mark.parametrize(
    "harness", [each for each in HARNESSES if isinstance(each, RealHarness)], ids=lambda each: each.name
)


def shut(link: LinkSide, how: int) -> None:
    """Shut one direction of what is below a link; of TLS, below that."""
    assert isinstance(link, ShmLink | TcpLink)
    sock = link._sock if isinstance(link, ShmLink) else link._socket.sock
    socket.socket.shutdown(sock, how)


@pytest.mark.parametrize("how", [socket.SHUT_WR, socket.SHUT_RDWR], ids=["sending", "both"])
def test_half_of_a_link_is_no_link(harness: LinkHarness, how: int) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        theirs = Ear(b)
        a.send(b"last")
        await a.flush()
        shut(a, how)
        assert isinstance(await theirs.end(), PeerLost)
        assert theirs.payloads == [b"last"]
        # The other end has closed all of it; under TLS it says first that this was no end of a stream.
        assert isinstance(await Ear(a).end(), ZbmdError)
        for link in (a, b):
            with pytest.raises(LinkClosed):
                link.send(b"too late")

    harness.run(scenario)
