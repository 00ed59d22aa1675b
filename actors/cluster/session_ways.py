"""How a session, a process that is neither node nor rank, gets into a cluster: as a guest of one node."""

from __future__ import annotations

import os

from zbmd.actors.cluster.hosted_job import memory_domain
from zbmd.actors.cluster.node_contracts import ActorsDoorReply, ActorsDoorRequest
from zbmd.actors.cluster.node_line import ASK_S, desk_of
from zbmd.actors.guest_door import GuestDoor
from zbmd.actors.system import ActorSystem
from zbmd.actors.ways import AskedFinder, Ways
from zbmd.actors.ways_contracts import Way
from zbmd.transport.budget import derive
from zbmd.transport.cookie import load_or_create_cookie
from zbmd.transport.errors import UserError
from zbmd.transport.tcp_settings import tcp_settings


async def connect(system: ActorSystem, at: str | None) -> str:
    """Let a session's actors reach all of the cluster, and be answered; the process of the node asked.

    at: HOST:PORT of a node; None: that of this host. Raises `UserError` if there is none, or it is in no
    cluster, and as `tcp.dial`.
    """
    async with desk_of(at) as line:
        door = await line.desk.ask(ActorsDoorRequest(), reply=ActorsDoorReply, timeout=ASK_S)
    if not door.address:
        raise UserError("the node is in no cluster at the moment: wait until `zbmd-node members` shows it.")
    cookie = load_or_create_cookie()
    guest = GuestDoor(
        system.name, system.incarnation, 0, cookie, tcp_settings(os.environ), derive(), host=memory_domain()
    )
    link = await guest.dial(Way(door.process, door.incarnation, "", "", door.address))
    ways = Ways(system, AskedFinder(system, door.process), guest.dial)
    ways.dialed(door.process, link)
    return door.process
