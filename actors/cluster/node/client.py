"""Processes that are neither node nor rank: commands ask a node's admin actor, sessions join its cluster.

They find the node of this host, or dial one at an address; a session becomes an external client of that node.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from zbmd.actors.cluster.local_deaths import memory_domain
from zbmd.actors.cluster.node.contracts import ADMIN_ACTOR, ActorsAddressReply, ActorsAddressRequest
from zbmd.actors.cluster.node.join import client_endpoint
from zbmd.actors.cluster.node.persistent_state import read_running, state_path
from zbmd.actors.core.ref import Ref, owned_name, owner_of
from zbmd.actors.routing.contracts import Enrol, Route, external_address
from zbmd.actors.routing.dialer import ExternalDialer, Lease
from zbmd.actors.routing.routes import RemoteLocator, Routes
from zbmd.actors.system import ActorSystem
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.errors import PeerLost, UserError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.link.interface import Endpoint, Link
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


@asynccontextmanager
async def connect(at: str | None = None) -> AsyncGenerator[ActorSystem]:
    """Return an actor system for an asyncio script that reaches, and is reached by, all of a cluster.

    at: HOST:PORT of any node of it; None: the node of this host. Raises `UserError` if there is no such node,
    or it is in no cluster, and `ZbmdError`. For code that blocks there is `Session.connect`.
    """
    system = await open_session(at)
    try:
        yield system
    finally:
        await system.stop()


async def open_session(at: str | None) -> ActorSystem:
    """Connect until the system is stopped. `owner_of(system.name)` is the process of its node."""
    reply = await _ask_actors_address(at)
    system = ActorSystem(owned_name(f"session-{os.getpid()}-{os.urandom(4).hex()}", reply.process))
    try:
        await _SessionLinks(system, at).lease.enter()
    except BaseException:
        await system.stop(timeout=0.0)
        raise
    return system


async def _ask_actors_address(at: str | None) -> ActorsAddressReply:
    async with connect_admin(at) as admin:
        reply = await admin.actor.ask(ActorsAddressRequest(), reply=ActorsAddressReply, timeout=ASK_S)
    if not reply.address:
        raise UserError("the node is in no cluster at the moment: wait until `zbmd-node members` lists it.")
    return reply


class _SessionLinks:
    """Links a session with its node, and listens for others. at: the node's address, as the user gave it."""

    def __init__(self, system: ActorSystem, at: str | None) -> None:
        self._at = at
        self._host = memory_domain()
        cookie, settings = load_or_create_cookie(), tcp_settings(os.environ)
        incarnation = system.incarnation
        self._dialer = ExternalDialer(
            system.name, incarnation, 0, cookie, settings, derive(), host=self._host
        )
        self._routes = Routes(system, RemoteLocator(system, owner_of(system.name)), self._dialer.dial)
        self.lease = Lease(system, self._routes, self._link_up)
        self._near = external_address(f"zbmd-{system.name}")
        self._dialer.listen_near(self._near, self._routes)
        self._far = ""

    async def _link_up(self) -> tuple[Link, Enrol]:
        node = await _ask_actors_address(self._at)
        if node.process != self.lease.owner:
            raise UserError(f"{node.process} is there now, not {self.lease.owner}: make another session.")
        link = await self._dialer.dial(Route(node.process, node.incarnation, "", "", node.address))
        if not self._far and isinstance(link, TcpLink):
            try:  # where our node sees us, others of its network do
                self._far = await self._dialer.listen_far(link.local_address.host, self._routes)
            except BaseException:
                link.close()
                raise
        return link, Enrol(self._host, self._near, self._far)
