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
    """What a process asks of a name's home."""

    REGISTER = "register"
    UNREGISTER = "unregister"
    LOOK_UP = "look_up"


class Outcome(Enum):
    """What came of it."""

    DONE = "done"  # it is the asker's, or nobody's any more
    TAKEN = "taken"  # another actor has the name
    FOUND = "found"
    FREE = "free"  # nobody has it
    FULL = "full"  # the home keeps as many names as it may


class Here(Contract, id="zbmd.directory.here"):
    """First word on a link in a view: who is in which group here, and the names for its receiver to keep.

    last: no more of it follows.
    """

    epoch: Epoch
    groups: Annotated[dict[Name, Keys], msgspec.Meta(max_length=GROUPS_MAX)]
    names: Annotated[dict[Name, Key], msgspec.Meta(max_length=NAMES_MAX)]
    last: bool = True


class GroupDelta(Contract, id="zbmd.directory.group"):
    """Who joined a group here, and who left it."""

    epoch: Epoch
    group: Name
    joined: Keys
    left: Keys


class NameAsk(Contract, id="zbmd.directory.ask"):
    """A question to the home of a name; answered under its number."""

    epoch: Epoch
    call: Epoch
    what: What
    name: Name
    key: Key | None


class NameAnswer(Contract, id="zbmd.directory.answer"):
    """The answer to `NameAsk`."""

    epoch: Epoch
    call: Epoch
    outcome: Outcome
    key: Key | None


class NameRevoked(Contract, id="zbmd.directory.revoked"):
    """Two had the name when the view began, and the other keeps it."""

    epoch: Epoch
    name: Name
    key: Key


Message: TypeAlias = Here | GroupDelta | NameAsk | NameAnswer | NameRevoked


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterView:
    """A view begins here; `members` includes this process."""

    epoch: int
    members: tuple[Process, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUp:
    """A link to another process stands, be it a member or not: what is sent from now on arrives, in order."""

    process: Process


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown:
    """It has ended: what was under way is lost, and nothing comes of it any more."""

    process: Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """An actor of this process joins a group. Twice is once."""

    group: str
    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """It leaves the group."""

    group: str
    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An actor of this process has ended: it leaves its groups, and its names are free."""

    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Somebody here asks for a name; `call` is new, and is answered by `Answered`, or given up."""

    call: int
    what: What
    name: str
    key: Key | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """The answer is not waited for any more."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message of another member, over the link that stands."""

    source: Process
    message: Message


Event: TypeAlias = EnterView | LinkUp | LinkDown | Join | Leave | Ended | Asked | GivenUp | Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """A message to another member, to which a link stands, behind those before."""

    to: Process
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChanged:
    """Who came and who went, as it is seen here."""

    group: str
    joined: tuple[Key, ...]
    left: tuple[Key, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer to `Asked`."""

    call: int
    outcome: Outcome
    key: Key | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NameLost:
    """An actor of this process does not have the name any more, which another has."""

    name: str
    key: Key


Action: TypeAlias = Send | GroupChanged | Answered | NameLost
