"""The desk of a node: one actor that answers commands, and nodes that are about to join."""

from __future__ import annotations

from typing import Protocol

from zbmd.actors.actor import Actor, on
from zbmd.actors.cluster.node_contracts import (
    DoorReply,
    DoorRequest,
    LeaveRequest,
    Leaving,
    MembersReply,
    MembersRequest,
    TokenReply,
    TokenRequest,
)


class NodeDesk(Protocol):
    """What the desk hands on. Called on the cluster's loop."""

    def door(self, request: DoorRequest) -> DoorReply:
        """What stands against a node that would join."""
        ...

    def members(self) -> MembersReply:
        """How we see the cluster."""
        ...

    def leave_asked(self) -> Leaving:
        """Leave in order, and end."""
        ...

    def token(self) -> TokenReply:
        """What another host must know to join."""
        ...


class DeskActor(Actor):
    """Answers at `DESK`."""

    def __init__(self, desk: NodeDesk) -> None:
        self._desk = desk

    @on(DoorRequest)
    async def door(self, request: DoorRequest) -> DoorReply:
        """See `NodeDesk.door`."""
        return self._desk.door(request)

    @on(MembersRequest)
    async def members(self, _: MembersRequest) -> MembersReply:
        """See `NodeDesk.members`."""
        return self._desk.members()

    @on(LeaveRequest)
    async def leave(self, _: LeaveRequest) -> Leaving:
        """See `NodeDesk.leave_asked`."""
        return self._desk.leave_asked()

    @on(TokenRequest)
    async def token(self, _: TokenRequest) -> TokenReply:
        """See `NodeDesk.token`."""
        return self._desk.token()
