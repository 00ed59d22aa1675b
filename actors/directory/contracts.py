"""What actors ask of the directory of a process, and what it tells those that watch a group."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from zbmd.actors.contracts import Contract
from zbmd.actors.core.ref import Ref
from zbmd.actors.core.wire import ActorName, Natural
from zbmd.actors.directory.events import MEMBERS_MAX, Name

DIRECTORY: Final = "directory"
"""The actor of that name in each process; see `zbmd.actors.directory.driver`."""

Refs = Annotated[list[Ref], msgspec.Meta(max_length=MEMBERS_MAX)]


class RegisterName(Contract, id="zbmd.directory.register"):
    """Register an actor of this process under the name; incarnation 0: its current incarnation."""

    name: Name
    actor: ActorName
    incarnation: Natural


class UnregisterName(Contract, id="zbmd.directory.unregister"):
    """Take the name from an actor of this process, if it holds it."""

    name: Name
    actor: ActorName
    incarnation: Natural


class WhereIs(Contract, id="zbmd.directory.where_is"):
    """Request the holder of a name."""

    name: Name


class Found(Contract, id="zbmd.directory.found"):
    """The holder of a name, or None."""

    ref: Ref | None


class JoinGroup(Contract, id="zbmd.directory.join"):
    """Add an actor of this process to the group."""

    group: Name
    actor: ActorName
    incarnation: Natural


class LeaveGroup(Contract, id="zbmd.directory.leave"):
    """Remove an actor from the group."""

    group: Name
    actor: ActorName
    incarnation: Natural


class WatchGroup(Contract, id="zbmd.directory.watch"):
    """Send `GroupNews` to an actor of this process at every change of the group, first with all members."""

    group: Name
    actor: ActorName
    incarnation: Natural


class UnwatchGroup(Contract, id="zbmd.directory.unwatch"):
    """Stop sending changes to it."""

    group: Name
    actor: ActorName
    incarnation: Natural


class ListGroup(Contract, id="zbmd.directory.list"):
    """Request the members of a group; answered once all processes of the view have reported theirs."""

    group: Name


class InGroup(Contract, id="zbmd.directory.in_group"):
    """The members of a group, by process, and by order of joining within a process."""

    members: Refs


class GroupNews(Contract, id="zbmd.directory.news"):
    """News to an actor that watches a group: members joined and left."""

    group: Name
    joined: Refs
    left: Refs
