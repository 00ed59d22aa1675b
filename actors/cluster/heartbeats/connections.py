"""Heartbeat connections: opened beside links that we dialed, accepted beside links that peers dialed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from zbmd.actors.cluster.heartbeats.driver import Heartbeats
from zbmd.actors.cluster.heartbeats.rdma import RdmaHeartbeats
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.transport.bulk.stripe_io import Stripe
from zbmd.transport.errors import ZbmdError
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.secure.protection import STRIPES_MAX
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.link import TcpLink

log: Final = structlog.stdlib.get_logger("zbmd.cluster")


@dataclass(slots=True)
class _Dialed:
    """A link that we dialed. lanes: side connections opened so far; each has its own number."""

    link: TcpLink
    lanes: int = 0
    opening: asyncio.Task[None] | None = None


class HeartbeatConnections:
    """Keeps one heartbeat connection to every peer that this node watches, or that watches it."""

    def __init__(self, beats: Heartbeats, ways: RdmaHeartbeats, endpoint: Endpoint) -> None:
        self._beats = beats
        self._ways = ways
        self._endpoint = endpoint
        self._dialed: dict[NodeKey, _Dialed] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False

    def linked(self, key: NodeKey, link: TcpLink) -> None:
        """A link to this incarnation is up."""
        link.on_stripe = partial(self._accept, key, link)
        if link.dialed is not None:
            self._dialed[key] = _Dialed(link)
            self.open_missing()

    def unlinked(self, key: NodeKey) -> None:
        """The last link to this incarnation ended: drop its connection as well."""
        self._dialed.pop(key, None)
        self._beats.drop_lane(key)

    def open_missing(self) -> None:
        """Open the missing connections; call it periodically.

        A link has a bounded number of side connections. Once they are used up, the link is closed and
        redialed.
        """
        for key in self._beats.lacking() if not self._closed else ():
            dialed = self._dialed.get(key)
            if dialed is None or dialed.opening is not None or dialed.link.closed:
                continue
            if dialed.lanes == STRIPES_MAX:
                log.warning(
                    "heartbeat connections keep failing; closing the link to redial it", peer=str(key)
                )
                dialed.link.close()
                continue
            task = asyncio.get_running_loop().create_task(self._open(key, dialed), name=f"lane to {key}")
            dialed.opening = task
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def close(self) -> None:
        """Stop opening connections. Idempotent."""
        self._closed = True
        for task in self._opening:
            task.cancel()
        if self._opening:
            await asyncio.wait(self._opening)

    async def _open(self, key: NodeKey, dialed: _Dialed) -> None:
        number, dialed.lanes = dialed.lanes, dialed.lanes + 1
        try:
            lane = await tcp.open_stripe(dialed.link, number, self._endpoint)
        except (ZbmdError, OSError) as error:
            log.debug("heartbeat connection failed", peer=str(key), reason=str(error))
            return
        finally:
            dialed.opening = None
        self._adopt(key, dialed.link, lane)

    def _accept(self, key: NodeKey, link: TcpLink, lane: Stripe) -> None:
        self._adopt(key, link, lane)

    def _adopt(self, key: NodeKey, link: TcpLink, lane: Stripe) -> None:
        if self._closed or link.closed:
            lane.sock.close()
        elif self._beats.adopt(key, lane, link.session):
            self._ways.lane_stands(key, lane.session, link.session)
