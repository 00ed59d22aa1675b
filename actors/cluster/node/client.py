"""The client side of a node's admin interface: find the node of this host, or dial one at an address."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from zbmd.actors.cluster.node.contracts import ADMIN_ACTOR
from zbmd.actors.cluster.node.join import client_endpoint
from zbmd.actors.cluster.node.persistent_state import read_running, state_path
from zbmd.actors.core.ref import Ref
from zbmd.actors.system import ActorSystem
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.errors import PeerLost, UserError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpAddress, parse_address, tcp_settings
from zbmd.transport.tcp.link import TcpLink

ASK_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminConnection:
    """A connection to a node's admin actor. Ask `actor` with `timeout=ASK_S`."""

    system: ActorSystem
    link: TcpLink
    actor: Ref


def node_address(at: str | None) -> TcpAddress:
    """Return the address given, or that of the node of this host. Raises `UserError`."""
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
async def connect_admin(at: str | None) -> AsyncGenerator[AdminConnection]:
    """Connect to the node at `at`, by default that of this host. Raises `UserError`, and as `tcp.dial`."""
    address, endpoint = node_address(at), client_endpoint(load_or_create_cookie(), derive())
    try:
        link = await tcp.dial(address, endpoint, settings=tcp_settings())
    except PeerLost as error:
        raise UserError(
            f"no node at {address}: {error.reason}. Start one with `zbmd-node up`, or give --at HOST:PORT "
            "of one that runs."
        ) from None
    async with admin_over(link, endpoint) as admin:
        yield admin


@asynccontextmanager
async def admin_over(link: TcpLink, endpoint: Endpoint) -> AsyncGenerator[AdminConnection]:
    """Connect to the admin actor at the other end of `link`, which is closed at the end."""
    system = ActorSystem(endpoint.identity.name)
    try:
        system.attach(link)
        yield AdminConnection(system=system, link=link, actor=system.ref(f"{link.peer.name}/{ADMIN_ACTOR}"))
    finally:
        await system.stop()
