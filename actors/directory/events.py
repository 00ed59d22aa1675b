"""Events, actions and messages of the directory machine, and the requests of actors to a directory.

Messages go between processes as they are.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, ClassVar, Final, TypeAlias

import msgspec

from zbmd.actors.contracts import Contract
from zbmd.actors.core.ref import Ref
from zbmd.actors.core.wire import ACTOR_NAME_CHARS_MAX, ActorName, Natural

NAMES_MAX = 65_536
"""That actors of one process hold, and that one home grants."""
GROUPS_MAX = 65_536
MEMBERS_MAX = 65_536
JOINED_MAX = 262_144
"""Memberships of all actors of one process together."""
HERE_KEYS_MAX = 2000
"""In one `Here`, which must fit into a frame."""

Key: TypeAlias = tuple[str, int, str, int]
"""An actor, as `Ref.key` gives it."""
Process: TypeAlias = tuple[str, int]
"""A member of a view: a process's name and incarnation."""
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=ACTOR_NAME_CHARS_MAX)]
Epoch: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Keys: TypeAlias = Annotated[list[Key], msgspec.Meta(max_length=MEMBERS_MAX)]


class What(Enum):
    """The kinds of requests to the home of a name."""

    REGISTER = "register"
    UNREGISTER = "unregister"
    LOOK_UP = "look_up"


class NameOutcome(Enum):
    """The outcome of a request."""

    captured_as = enum.nonmember("Outcome")
    DONE = "done"  # it is the asker's, or nobody's any more
    TAKEN = "taken"  # another actor has the name
    FOUND = "found"
    FREE = "free"  # nobody has it
    FULL = "full"  # the home keeps as many names as it may


class Here(Contract, id="zbmd.directory.here"):
    """The first message on a link in a view: the sender's groups, and names whose home the receiver is.

    last: no more of it follows.
    """

    epoch: Epoch
    groups: Annotated[dict[Name, Keys], msgspec.Meta(max_length=GROUPS_MAX)]
    names: Annotated[dict[Name, Key], msgspec.Meta(max_length=NAMES_MAX)]
    last: bool = True


class GroupDelta(Contract, id="zbmd.directory.group"):
    """Actors of the sender that joined or left a group."""

    epoch: Epoch
    group: Name
    joined: Keys
    left: Keys


class NameAsk(Contract, id="zbmd.directory.ask"):
    """A request to the home of a name; the reply has its number."""

    epoch: Epoch
    call: Epoch
    what: What
    name: Name
    key: Key | None


class NameAnswer(Contract, id="zbmd.directory.answer"):
    """The reply to `NameAsk`."""

    epoch: Epoch
    call: Epoch
    outcome: NameOutcome
    key: Key | None


class NameRevoked(Contract, id="zbmd.directory.revoked"):
    """Two actors held the name when the view began, and the other keeps it."""

    epoch: Epoch
    name: Name
    key: Key


Message: TypeAlias = Here | GroupDelta | NameAsk | NameAnswer | NameRevoked


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewBegun:
    """A view begins; `members` includes this process."""

    captured_as: ClassVar[str] = "EnterView"
    epoch: int
    members: tuple[Process, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUp:
    """A link to another process is up, member or not: messages sent from now on arrive, in order."""

    process: Process


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown:
    """The link is down: messages under way are lost, and none arrives any more."""

    process: Process


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJoined:
    """An actor of this process joins a group. Idempotent."""

    captured_as: ClassVar[str] = "Join"
    group: str
    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLeft:
    """An actor leaves a group."""

    captured_as: ClassVar[str] = "Leave"
    group: str
    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An actor of this process has ended: it leaves its groups, and its names become free."""

    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A caller in this process requests a name; `call` is new; it ends with `Answered` or is given up."""

    call: int
    what: What
    name: str
    key: Key | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """The caller gave up."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """A message from another member, over the current link."""

    captured_as: ClassVar[str] = "Said"
    source: Process
    message: Message


Event: TypeAlias = (
    ViewBegun | LinkUp | LinkDown | GroupJoined | GroupLeft | Ended | Asked | GivenUp | MessageReceived
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """A message to a linked member, in order after the earlier ones."""

    to: Process
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChanged:
    """Members joined or left, as seen by this process."""

    group: str
    joined: tuple[Key, ...]
    left: tuple[Key, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The reply to `Asked`."""

    call: int
    outcome: NameOutcome
    key: Key | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NameLost:
    """An actor of this process loses the name to another holder."""

    name: str
    key: Key


Action: TypeAlias = Send | GroupChanged | Answered | NameLost


# Requests of actors to the directory of a process, and the news for actors that watch a group.

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
