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
    """Give the name to an actor of this process; incarnation 0: to whichever life of it there is now."""

    name: Name
    actor: ActorName
    incarnation: Natural


class UnregisterName(Contract, id="zbmd.directory.unregister"):
    """Take the name from an actor of this process, if it has it."""

    name: Name
    actor: ActorName
    incarnation: Natural


class WhereIs(Contract, id="zbmd.directory.where_is"):
    """Who has the name?"""

    name: Name


class Found(Contract, id="zbmd.directory.found"):
    """Whoever has it; None if nobody does."""

    ref: Ref | None


class JoinGroup(Contract, id="zbmd.directory.join"):
    """Put an actor of this process into the group."""

    group: Name
    actor: ActorName
    incarnation: Natural


class LeaveGroup(Contract, id="zbmd.directory.leave"):
    """Take it out."""

    group: Name
    actor: ActorName
    incarnation: Natural


class WatchGroup(Contract, id="zbmd.directory.watch"):
    """Tell an actor of this process of every change of the group, first of all who is in it: `GroupNews`."""

    group: Name
    actor: ActorName
    incarnation: Natural


class UnwatchGroup(Contract, id="zbmd.directory.unwatch"):
    """Tell it no longer."""

    group: Name
    actor: ActorName
    incarnation: Natural


class ListGroup(Contract, id="zbmd.directory.list"):
    """Who is in the group? Answered once all members of the view have said."""

    group: Name


class InGroup(Contract, id="zbmd.directory.in_group"):
    """Its members, by process, each process's in the order in which they joined."""

    members: Refs


class GroupNews(Contract, id="zbmd.directory.news"):
    """To an actor that watches a group: who has come, and who has gone."""

    group: Name
    joined: Refs
    left: Refs
