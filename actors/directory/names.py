"""Names and groups of actors, as programs use them: requests to the directory."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

from zbmd.actors.core.ref import Ref
from zbmd.actors.core.wire import ACTOR_NAME_CHARS_MAX
from zbmd.actors.directory.driver import Directory, GroupChange
from zbmd.actors.directory.events import (
    DIRECTORY,
    Found,
    InGroup,
    JoinGroup,
    LeaveGroup,
    ListGroup,
    RegisterName,
    UnregisterName,
    UnwatchGroup,
    WatchGroup,
    WhereIs,
)
from zbmd.transport.errors import LocalProtocolError, ZbmdError

if TYPE_CHECKING:
    from zbmd.actors.contracts import Contract
    from zbmd.actors.core.system import CoreSystem

CALL_S: Final = 5.0
"""Default timeout of requests to a directory, seconds."""


def directory_of(system: CoreSystem, ref: Ref | None = None) -> Ref:
    """Return the directory of this process, or of the process where `ref` lives."""
    if ref is None:
        return Ref(system, system.name, system.incarnation, DIRECTORY, 0)
    return Ref(system, ref.process, ref.process_incarnation, DIRECTORY, 0)


def checked(name: str) -> str:
    """Return the name of an actor or group, checked. Raises `LocalProtocolError`."""
    if not 1 <= len(name) <= ACTOR_NAME_CHARS_MAX:
        raise LocalProtocolError(f"the name {name[:200]!r}: give 1 to {ACTOR_NAME_CHARS_MAX} characters")
    return name


async def register(system: CoreSystem, name: str, ref: Ref, timeout: float) -> None:
    """See `ActorSystem.register`."""
    message = RegisterName(checked(name), ref.actor, ref.incarnation)
    await directory_of(system, ref).ask(message, timeout=timeout)


async def whereis(system: CoreSystem, name: str, timeout: float) -> Ref | None:
    """See `ActorSystem.whereis`."""
    found = await directory_of(system).ask(WhereIs(checked(name)), reply=Found, timeout=timeout)
    return found.ref


async def unregister(system: CoreSystem, name: str, timeout: float) -> bool:
    """See `ActorSystem.unregister`."""
    holder = await whereis(system, name, timeout)
    if holder is None:
        return False
    message = UnregisterName(name, holder.actor, holder.incarnation)
    await directory_of(system, holder).ask(message, timeout=timeout)
    return True


class ActorGroup:
    """A group of actors of the view that this process is in, as Erlang's `pg` has it.

    Every process knows all members. A member that ends, or whose process leaves the view, is removed. Made by
    `ActorSystem.group`.
    """

    def __init__(self, system: CoreSystem, directory: Directory, name: str) -> None:
        self._system = system
        self._directory = directory
        self.name = name

    def __repr__(self) -> str:
        return f"<Group {self.name!r} of {len(self.members)}>"

    @property
    def members(self) -> tuple[Ref, ...]:
        """Return the members known here, by process, and by order of joining within a process."""
        return self._directory.group(self.name)

    @property
    def local_members(self) -> tuple[Ref, ...]:
        """Return the members of this process."""
        return tuple(ref for ref in self.members if ref.process == self._system.name)

    async def join(self, ref: Ref, *, timeout: float = CALL_S) -> None:
        """Add an actor, wherever it lives. Idempotent. Raises as `Ref.ask`, and `DeadActor`."""
        message = JoinGroup(self.name, ref.actor, ref.incarnation)
        await directory_of(self._system, ref).ask(message, timeout=timeout)

    async def leave(self, ref: Ref, *, timeout: float = CALL_S) -> None:
        """Remove it. Raises as `Ref.ask`, and `DeadActor`."""
        message = LeaveGroup(self.name, ref.actor, ref.incarnation)
        await directory_of(self._system, ref).ask(message, timeout=timeout)

    async def broadcast(self, message: Contract) -> dict[Ref, ZbmdError]:
        """Send a message to all members; return the failed ones and their errors, as
        `ActorSystem.tell_all`."""
        return await self._system.tell_all(self.members, message)

    def changes(self) -> AsyncGenerator[GroupChange]:
        """Yield changes of the membership from now on; the first has all present members.

        More than `CHANGES_WAITING_MAX` waiting changes are merged into one.
        """
        return self._directory.changes(self.name)

    async def watch(self, ref: Ref, *, timeout: float = CALL_S) -> None:
        """Send `GroupNews` to an actor at each change, and at once with all present members."""
        message = WatchGroup(self.name, ref.actor, ref.incarnation)
        await directory_of(self._system, ref).ask(message, timeout=timeout)

    async def unwatch(self, ref: Ref, *, timeout: float = CALL_S) -> None:
        """Stop sending `GroupNews` to it."""
        message = UnwatchGroup(self.name, ref.actor, ref.incarnation)
        await directory_of(self._system, ref).ask(message, timeout=timeout)

    async def settled(self, *, timeout: float = CALL_S) -> tuple[Ref, ...]:
        """Return its members once every process of the view has reported its own."""
        found = await directory_of(self._system).ask(ListGroup(self.name), reply=InGroup, timeout=timeout)
        return tuple(found.members)
