"""`--store`: a node that finds its cluster in etcd, publishes its address there, and uses it as witness."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from zbmd.actors.bootstrap.etcd_client import REQUEST_S_MAX, EtcdClient, EtcdUrl, parse_etcd_url
from zbmd.actors.bootstrap.etcd_store import EtcdMembers, EtcdWitness
from zbmd.actors.cluster.membership.witness import TieBreakerNamed
from zbmd.actors.cluster.node.incarnations import NodeConfig
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.transport.errors import UserError
from zbmd.transport.tcp.address import TcpAddress


@asynccontextmanager
async def with_store(
    config: NodeConfig, store: str
) -> AsyncGenerator[tuple[NodeConfig, asyncio.Future[str]]]:
    """The node's configuration as the store has it, which lists its join address while in this context.

    The future is done, with the reason, if another cluster was founded while no member of this one reached
    the store. Raises `UserError`, and `EtcdError` if the store cannot be reached.
    """
    if config.joins or config.new:
        raise UserError("--store says whom to join: leave out --join, --token's addresses and --new.")
    if config.listen.port == 0:
        raise UserError("--store lists where this node listens: give --listen a port other than 0.")
    url = parse_etcd_url(store)
    client = EtcdClient(url)
    superseded: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    address = await _own_address(url, config.listen)
    join_addresses = EtcdMembers(
        client, name=config.name, address=address, on_superseded=superseded.set_result
    )
    standing = await join_addresses.enter()

    def witness(me: NodeKey, retry_ns: int, on_given: Callable[[TieBreakerNamed], None]) -> EtcdWitness:
        return EtcdWitness(
            EtcdClient(url), me, generation=standing.generation, retry_ns=retry_ns, on_given=on_given
        )

    async with join_addresses.kept(standing):
        found = replace(config, joins=standing.join_addresses, new=standing.founds, witness=witness)
        yield found, superseded


async def _own_address(url: EtcdUrl, listen: TcpAddress) -> TcpAddress:
    """Return the address at which others reach us: where we listen, or where we reach the store from."""
    if listen.host:
        return listen
    loop = asyncio.get_running_loop()
    reasons: list[str] = []
    for endpoint in url.endpoints:
        try:
            async with asyncio.timeout(REQUEST_S_MAX):
                found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)
        except (OSError, TimeoutError) as error:
            reasons.append(f"{endpoint}: {error or 'no answer'}")
            continue
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.connect(where)  # sends nothing: the kernel only chooses the way
                except OSError as error:
                    reasons.append(f"{endpoint}: {error}")
                else:
                    return TcpAddress(host=str(probe.getsockname()[0]), port=listen.port)
    raise UserError(f"no way to the store {url}: {'; '.join(reasons)}. Is its address right?")
