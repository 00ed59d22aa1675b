"""Nodes of a cluster on threads of this process, on loopback, so that a test can look inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from zbmd.actors.cluster.node.incarnation import wall_ns
from zbmd.actors.cluster.node.incarnations import NodeConfig, NodeEvent, ViewEntered
from zbmd.actors.cluster.node.node import ClusterNode
from zbmd.actors.cluster.node.persistent_state import NodeState
from zbmd.transport.tcp.address import TcpAddress, TcpSettings, parse_address

COOKIE = b"the cookie of the nodes of a test"
PATIENCE_S = 120.0
LOOPBACK = TcpAddress(host="127.0.0.1", port=0)


class Told:
    """A node's reports."""

    def __init__(self) -> None:
        self.events: list[NodeEvent] = []
        self._news = asyncio.Condition()

    def __call__(self, event: NodeEvent) -> None:
        self.events.append(event)
        asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def until(self, found: Callable[[NodeEvent], bool]) -> NodeEvent:
        async with asyncio.timeout(PATIENCE_S), self._news:
            while True:
                for event in self.events:
                    if found(event):
                        return event
                await self._news.wait()

    async def acts_on(self, members: int) -> ViewEntered:
        event = await self.until(lambda e: isinstance(e, ViewEntered) and len(e.view.nodes) == members)
        assert isinstance(event, ViewEntered)
        return event


@asynccontextmanager
async def node(
    directory: Path,
    name: str,
    *joins: str,
    budget_ns: int | None = None,
    cookie: bytes = COOKIE,
    settings: TcpSettings | None = None,
    wall_clock: Callable[[], int] = wall_ns,
) -> AsyncGenerator[tuple[ClusterNode, Told]]:
    """A node of this process, for as long as the body lasts."""
    told = Told()
    config = NodeConfig(
        name=name,
        listen=LOOPBACK,
        joins=tuple(parse_address(join) for join in joins),
        recovery_budget_ns=budget_ns,
        cookie=cookie,
        release="test",
        settings=settings or TcpSettings(),
        wall_clock=wall_clock,
    )
    made = ClusterNode(config, NodeState.open(directory / name), told)
    running = asyncio.get_running_loop().create_task(made.run())
    try:
        yield made, told
    finally:
        running.cancel()
        await asyncio.wait([running])
