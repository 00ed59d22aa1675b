"""Commands that ask a running node: finding the one of this host, or the one at an address, and its desk."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from zbmd.actors.cluster.node.contracts import DESK
from zbmd.actors.cluster.node.join import visitor
from zbmd.actors.cluster.node.persistent_state import read_running, state_path
from zbmd.actors.core.ref import Ref
from zbmd.actors.system import ActorSystem
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.errors import PeerLost, UserError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.link.endpoint import Endpoint
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpAddress, parse_address, tcp_settings
from zbmd.transport.tcp.link import TcpLink

ASK_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line to a node's desk. Ask with `timeout=ASK_S`."""

    system: ActorSystem
    link: TcpLink
    desk: Ref


def node_address(at: str | None) -> TcpAddress:
    """The address given, or that of the node of this host. Raises `UserError`."""
    if at is not None:
        return parse_address(at)
    directory = state_path()
    running = read_running(directory)
    if running is None:
        raise UserError(
            f"no node runs here (nothing in {directory}). Start one with `zbmd-node up`, or give "
            "--at HOST:PORT of a node that runs elsewhere."
        )
    return parse_address(running.address)


@asynccontextmanager
async def desk_of(at: str | None) -> AsyncGenerator[Line]:
    """A line to the node at `at`, or to that of this host. Raises `UserError`, and as `tcp.dial`."""
    address, endpoint = node_address(at), visitor(load_or_create_cookie(), derive())
    try:
        link = await tcp.dial(address, endpoint, settings=tcp_settings())
    except PeerLost as error:
        raise UserError(
            f"no node at {address}: {error.reason}. Start one with `zbmd-node up`, or give --at HOST:PORT "
            "of one that runs."
        ) from None
    async with line_over(link, endpoint) as line:
        yield line


@asynccontextmanager
async def line_over(link: TcpLink, endpoint: Endpoint) -> AsyncGenerator[Line]:
    """A line to the desk of the node at the other end of `link`, which ends with it."""
    system = ActorSystem(endpoint.identity.name)
    try:
        system.attach(link)
        yield Line(system=system, link=link, desk=system.ref(f"{link.peer.name}/{DESK}"))
    finally:
        await system.stop()
