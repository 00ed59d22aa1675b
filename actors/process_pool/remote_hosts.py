"""Supervised nodes: each child is a process that runs a node on some host, and goes to another if that fails.

    hosts = Places(PlacesMachine([Place(name="a"), Place(name="b")]), probe)
    command = ("ssh", "-tt", "-o", "ServerAliveInterval=1", "{host}", "zbmd-node", "up", "--join", door)
    await system.supervise([node_child("spare", hosts, command)], back_off=BackOff())

`{host}` is the name of the place. With `ssh -tt` the node's end follows that of the command. Where the
supervisor's process is in the cluster itself (a node's actors, or a `Session.connect()`), a node is lost as
well when the cluster goes on without it: its host may be gone, or stand still, while the command runs on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Final

import structlog

from zbmd.actors.process_pool.process_actor import Placements, ProcessActor
from zbmd.actors.routing.routes import Routes
from zbmd.actors.supervision.events import Restart
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.transport.errors import ZbmdError

NODE_READY: Final = r"^\[zbmd\]: .* view \d+: "
"""What `zbmd-node up` says once it is a member."""
ASK_AGAIN_S: Final = 5.0
"""Whether a node is lost, after nobody could be asked."""
_LIFE: Final = re.compile(r"\b(node[1-9]\d{0,18})#(\d{1,18})\b")
log: Final = structlog.stdlib.get_logger("zbmd.process")
NODE_STOP_S: Final = 15.0
"""A node is let go by its cluster, and ends its jobs."""


class NodeProcess(ProcessActor):
    """A node that is started by a command, from being a member until its command ends or it is lost."""

    stopping_s = NODE_STOP_S

    def __init__(
        self, places: Placements, command: Sequence[str], ready: str, environment: Mapping[str, str]
    ) -> None:
        super().__init__(places)
        self._command = tuple(command)
        self._ready = re.compile(ready)
        self._environment = dict(environment)
        self._life: tuple[str, int] | None = None
        """The process and the life that it became a member as, if it has said so."""

    def command(self) -> Sequence[str]:
        """See `ProcessActor`."""
        return [word.replace("{host}", self.place) for word in self._command]

    def environment(self) -> Mapping[str, str]:
        """See `ProcessActor`."""
        return {name: value.replace("{host}", self.place) for name, value in self._environment.items()}

    async def ready(self) -> None:
        """Wait for the line of its output that says so."""
        line = await self.until_line(lambda line: self._ready.search(line) is not None)
        found = _LIFE.search(line)
        self._life = None if found is None else (found[1], int(found[2]))

    async def until_lost(self) -> str:
        """See `ProcessActor`: the cluster goes on without it."""
        routes = self.system.service(Routes)
        if self._life is None or routes is None:
            return await super().until_lost()
        while True:
            try:
                reason = await routes.until_gone(*self._life)
            except ZbmdError as error:
                log.info("nobody tells whether a node is lost", node=self._life[0], reason=str(error))
                await asyncio.sleep(ASK_AGAIN_S)
                continue
            process, life = self._life
            return f"the cluster goes on without {process}#{life}: {reason}"


def node_child(
    name: str,
    hosts: Placements,
    command: Sequence[str],
    *,
    ready: str = NODE_READY,
    environment: Mapping[str, str] | None = None,
    restart: Restart = Restart.PERMANENT,
) -> ChildSpec:
    """A node, for a supervisor. ready: a pattern of the line by which the command says that it is up."""
    args = (hosts, tuple(command), ready, environment or {})
    return ChildSpec(name=name, actor=NodeProcess, args=args, restart=restart, shutdown_s=NODE_STOP_S)
