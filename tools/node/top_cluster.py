"""A look into all processes of a cluster, as a guest of one of its nodes."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec

from zbmd.actors.cluster.session_routes import open_session
from zbmd.actors.core.scopes import MARK, scope_of
from zbmd.actors.hangs.introspection import INSIDE_ACTOR, InsideReply, InsideRequest
from zbmd.actors.system import ActorSystem
from zbmd.tools.node.snapshots import ASK_S, Look
from zbmd.transport.errors import ZbmdError

ASKED_AT_ONCE: Final = 32
"""Processes; each has `ASK_S` to be reached and to answer."""


class ClusterLine:
    """A line to a cluster: a `Source`. Made by `open_cluster`."""

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._places = asyncio.Semaphore(ASKED_AT_ONCE)

    async def close(self) -> None:
        """See `Source`."""
        await self._system.stop()

    async def jobs(self) -> frozenset[str]:
        """The jobs that ranks are up of, as their scopes. Raises `ZbmdError`."""
        return frozenset(scope_of(process) for process, _, _ in await self._system.processes()) - {""}

    async def looks(self, *, busiest: bool) -> list[Look]:
        """See `Source`: a look at each node, and the ranks on it; who does not answer in time is named."""
        processes = await self._system.processes()
        replies = await asyncio.gather(*(self._ask(process, busiest) for process, _, _ in processes))
        nodes: dict[str, tuple[list[InsideReply], list[str]]] = {}
        for (process, _, node), reply in zip(processes, replies, strict=True):
            answers, silent = nodes.setdefault(node, ([], []))
            if reply is None:
                silent.append(process)
            else:
                answers.append(reply)
        return [
            Look(
                address=node,
                target=node,
                replies=tuple(answers),
                silent=tuple(silent),
                at_s=time.monotonic(),
            )
            for node, (answers, silent) in nodes.items()
        ]

    async def _ask(self, process: str, busiest: bool) -> InsideReply | None:
        name = process.partition(MARK)[0]
        async with self._places:
            try:
                inside = self._system.ref(f"{process}/{INSIDE_ACTOR}")
                reply = await inside.ask(InsideRequest(name, busiest), reply=InsideReply, timeout=ASK_S)
            except ZbmdError:
                return None
        return _abroad(reply, process)


def _abroad(reply: InsideReply, process: str) -> InsideReply:
    """With the process's name for all, which tells ranks of two jobs apart."""
    own = f"{reply.process}/"
    rows = tuple(
        msgspec.structs.replace(row, parent=f"{process}/{row.parent.removeprefix(own)}")
        if row.parent.startswith(own)
        else row
        for row in reply.rows
    )
    return msgspec.structs.replace(reply, process=process, rows=rows)


async def open_cluster(at: str | None) -> ClusterLine:
    """A line by the node at HOST:PORT, or that of this host. Raises `UserError`, and as `tcp.dial`."""
    async with asyncio.timeout(3 * ASK_S):
        return ClusterLine(await open_session(at))
