"""From what a launcher says to a node of a cluster that is made for one job: whom it asks, or that it founds.

A node's id has its number in the upper bits, where that is known: so the nodes of a view are in the order of
their numbers, slots are given in that order, and of two halves the one with the lowest number goes on.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
from dataclasses import replace
from typing import Final

from zbmd.actors.bootstrap.merge import Bootstrap, Role
from zbmd.actors.cluster.node.incarnations import NodeConfig
from zbmd.actors.cluster.node.join import own_addresses
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.native._native import now_ns
from zbmd.transport.tcp.address import TcpAddress
from zbmd.transport.tcp.sockets import PortInUse, listen_on, resolve

NAME_CHARACTERS_MAX: Final = 64
RANDOM_BITS: Final = 32
LAST_NUMBER: Final = (1 << 16) - 1
"""Of nodes that have none: they come after those that do."""


def node_id_of(number: int | None, *, founds: bool) -> int:
    """A fresh id for a node of that number. founds: whether a node without one founds the cluster."""
    if number is None:
        number = 0 if founds else LAST_NUMBER
    return number << RANDOM_BITS | secrets.randbelow((1 << RANDOM_BITS) - 1) + 1


def node_name(given: str, number: int | None) -> str:
    """Return a node's name for people: what is given or the host's, with the node's number at the end."""
    given = given or socket.gethostname().partition(".")[0]
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in given).strip("_.-")
    # Two nodes of one host are two, whether they have numbers or not.
    end = f"-{secrets.token_hex(2) if number is None else number}"
    if number is not None and kept.endswith(end):
        end = ""
    return f"{kept[: NAME_CHARACTERS_MAX - len(end)] or 'node'}{end}"


def job_id_of(name: str) -> int:
    """Return the id of a job that all of its nodes know by this name."""
    return (int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 2) + 1


async def configured(bootstrap: Bootstrap, config: NodeConfig) -> NodeConfig:
    """The configuration with what the launcher says: where to listen, whom to ask, whether to found.

    For every role that has join addresses or a store. Raises `UserError` where an address cannot be.
    """
    listen = TcpAddress(host=bootstrap.local, port=bootstrap.port)
    config = replace(
        config, listen=listen, joins=bootstrap.join_addresses, founds=bootstrap.role is Role.FOUND
    )
    if bootstrap.role is Role.STORE:
        port = bootstrap.port or await _free_port(listen)
        return replace(config, listen=TcpAddress(host=bootstrap.local, port=port), joins=())
    if bootstrap.role is not Role.HOLDER:
        return config
    join_address = bootstrap.join_addresses[0]
    listen_there = TcpAddress(host=bootstrap.local, port=join_address.port)
    if await _is_here(join_address, listen_there) and await _is_free(listen_there):
        return replace(config, listen=listen_there, founds=True)
    return joining(bootstrap, config)


def joining(bootstrap: Bootstrap, config: NodeConfig) -> NodeConfig:
    """The configuration of one who holds no join address: it listens elsewhere, and asks there."""
    ports = {join_address.port for join_address in bootstrap.join_addresses}
    port = 0 if bootstrap.port in ports else bootstrap.port
    return replace(config, listen=TcpAddress(host=bootstrap.local, port=port), founds=False)


async def _is_here(join_address: TcpAddress, listen: TcpAddress) -> bool:
    """Whether a join address is on this host; by its name too, which may mean an address before a gateway."""
    if not listen.host and join_address.host in (socket.gethostname(), socket.getfqdn()):
        return True
    return bool(await own_addresses((join_address,), listen, derive().dial_ns))


async def _is_free(listen: TcpAddress) -> bool:
    try:
        await _free_port(listen)
    except PortInUse:
        return False
    return True


async def _free_port(listen: TcpAddress) -> int:
    """The port of `listen`, or any, if it is free there. Raises `PortInUse` and other `UserError`s."""
    found = await resolve(listen, now_ns() + derive().dial_ns, passive=True)
    sockets = listen_on(found, asked=str(listen))
    try:
        port: int = sockets[0].getsockname()[1]
        return port
    finally:
        for each in sockets:
            each.close()
