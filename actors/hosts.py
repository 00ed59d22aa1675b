"""Supervised nodes: each child is a process that runs a node on some host, and goes to another if that fails.

    hosts = Places(PlacesMachine([Place(name="a"), Place(name="b")]), probe)
    command = ("ssh", "-tt", "-o", "ServerAliveInterval=1", "{host}", "zbmd-node", "up", "--join", door)
    await system.supervise([node_child("spare", hosts, command)], back_off=BackOff())

`{host}` is the name of the place. With `ssh -tt` the node's end follows that of the command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from zbmd.actors.process_actor import Places, ProcessActor
from zbmd.actors.supervision_events import Restart
from zbmd.actors.supervisor import ChildSpec

NODE_READY: Final = r"^\[zbmd\]: .* view \d+: "
"""What `zbmd-node up` says once it is a member."""
NODE_STOP_S: Final = 15.0
"""A node is let go by its cluster, and ends its jobs."""


class NodeProcess(ProcessActor):
    """A node that is started by a command, from being a member until its command ends."""

    stopping_s = NODE_STOP_S

    def __init__(
        self, places: Places, command: Sequence[str], ready: str, environment: Mapping[str, str]
    ) -> None:
        super().__init__(places)
        self._command = tuple(command)
        self._ready = re.compile(ready)
        self._environment = dict(environment)

    def command(self) -> Sequence[str]:
        """See `ProcessActor`."""
        return [word.replace("{host}", self.place) for word in self._command]

    def environment(self) -> Mapping[str, str]:
        """See `ProcessActor`."""
        return {name: value.replace("{host}", self.place) for name, value in self._environment.items()}

    async def ready(self) -> None:
        """It has said so."""
        await self.until_line(lambda line: self._ready.search(line) is not None)


def node_child(
    name: str,
    hosts: Places,
    command: Sequence[str],
    *,
    ready: str = NODE_READY,
    environment: Mapping[str, str] | None = None,
    restart: Restart = Restart.PERMANENT,
) -> ChildSpec:
    """A node, for a supervisor. ready: a pattern of the line by which the command says that it is up."""
    args = (hosts, tuple(command), ready, environment or {})
    return ChildSpec(name=name, actor=NodeProcess, args=args, restart=restart, shutdown_s=NODE_STOP_S)
