"""Find the hosts of this user that run here, ask them how they stand, and show it."""

from __future__ import annotations

import asyncio
import os

import msgspec
import rich.console
import rich.table

from zbmd.actors.contracts import fingerprints
from zbmd.actors.host.links import find_hosts
from zbmd.actors.rank.host_contracts import HOST_ACTOR, NODE_NAME, NodeStatus, RankStatus, StatusRequest
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import ZbmdError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.identity import Identity
from zbmd.transport.shm.connect import Endpoint, dial

ASK_S = 2.0
ACTORS_SHOWN_MAX = 6


def find_nodes() -> list[str]:
    """The addresses of this user's hosts, those of a cluster's jobs as well. Raises `CookieError`."""
    return find_hosts(load_or_create_cookie())


async def ask_node(address: str, index: int) -> NodeStatus | None:
    """One host's status; None if it ended meanwhile or does not answer within `ASK_S`."""
    identity = Identity(
        name=f"tool-{os.getpid()}-{index}",
        pid=os.getpid(),
        uid=os.getuid(),
        incarnation=1,
        contracts=fingerprints(),
    )
    system = ActorSystem(identity.name)
    try:
        async with asyncio.timeout(ASK_S):
            system.attach(await dial(address, Endpoint(identity=identity, cookie=load_or_create_cookie())))
        host = system.ref(f"{NODE_NAME}/{HOST_ACTOR}")
        return await host.ask(StatusRequest(), reply=NodeStatus, timeout=ASK_S)
    except (ZbmdError, TimeoutError):
        return None
    finally:
        await system.stop()


async def collect() -> tuple[list[NodeStatus], list[str]]:
    """All hosts that answer, and the addresses of those that do not."""
    addresses = find_nodes()
    answers = await asyncio.gather(*(ask_node(address, i) for i, address in enumerate(addresses)))
    silent = [address for address, answer in zip(addresses, answers, strict=True) if answer is None]
    return [answer for answer in answers if answer is not None], silent


def as_json(nodes: list[NodeStatus], silent: list[str]) -> str:
    """One JSON object, by the fields' names (on the wire they are arrays)."""
    found = [
        {**msgspec.structs.asdict(node), "ranks": [msgspec.structs.asdict(rank) for rank in node.ranks]}
        for node in nodes
    ]
    return msgspec.json.encode({"nodes": found, "silent": silent}).decode()


def show(nodes: list[NodeStatus], silent: list[str], screen: rich.console.Console) -> None:
    """Print one table a host."""
    for node in nodes:
        table = rich.table.Table(title=_title(node), title_justify="left")
        for column in ("rank", "pid", "incarnation", "state", "restarts", "memory", "actors"):
            table.add_column(column, justify="left" if column in ("state", "actors") else "right")
        for rank in node.ranks:
            table.add_row(*_row(rank))
        screen.print(table)
        for words in node.hangs:
            screen.print(f"no progress: {words}", soft_wrap=True, markup=False, highlight=False)
    for address in silent:
        screen.print(f"{address}: does not answer", soft_wrap=True)
    if not nodes and not silent:
        screen.print("no node of this user runs here; start one with: zbmd-node run SCRIPT")


def _title(node: NodeStatus) -> str:
    return (
        f"{node.target}  epoch {node.epoch}  on-loss {node.on_loss}  restarts {node.restarts}  "
        f"up {node.uptime_s:.0f} s  node pid {node.pid}  template pid {node.template_pid}"
    )


def _row(rank: RankStatus) -> tuple[str, ...]:
    names = rank.actors
    if names is None:
        actors = "busy" if rank.state == "joined" else "-"
    else:
        more = len(names) - ACTORS_SHOWN_MAX
        actors = ", ".join(names[:ACTORS_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
    memory = f"{rank.memory_bytes / (1 << 20):,.0f} MiB"
    return (
        str(rank.rank),
        str(rank.pid),
        str(rank.incarnation),
        rank.state,
        str(rank.restarts),
        memory,
        actors,
    )
