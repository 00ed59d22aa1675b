"""What the directory machine is told and tells; its messages go between processes as they are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, TypeAlias

import msgspec

from zbmd.actors.contracts import Contract
from zbmd.actors.core.wire import ACTOR_NAME_CHARS_MAX

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


class Outcome(Enum):
    """The outcome of a request."""

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
    outcome: Outcome
    key: Key | None


class NameRevoked(Contract, id="zbmd.directory.revoked"):
    """Two actors held the name when the view began, and the other keeps it."""

    epoch: Epoch
    name: Name
    key: Key


Message: TypeAlias = Here | GroupDelta | NameAsk | NameAnswer | NameRevoked


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterView:
    """A view begins; `members` includes this process."""

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
class Join:
    """An actor of this process joins a group. Idempotent."""

    group: str
    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """An actor leaves a group."""

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
class Said:
    """A message from another member, over the current link."""

    source: Process
    message: Message


Event: TypeAlias = EnterView | LinkUp | LinkDown | Join | Leave | Ended | Asked | GivenUp | Said


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
    outcome: Outcome
    key: Key | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NameLost:
    """An actor of this process loses the name to another holder."""

    name: str
    key: Key


Action: TypeAlias = Send | GroupChanged | Answered | NameLost
