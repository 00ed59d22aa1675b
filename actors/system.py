"""The actor system of a process with all its services: names and groups, supervisors, changes of code.

The core (`zbmd.actors.core`) knows none of them; this is where they are put together.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Final

from zbmd.actors.core import actor
from zbmd.actors.core.actor_base import MAILBOX_BYTES, ActorBase
from zbmd.actors.core.ref import Ref
from zbmd.actors.core.system import CoreSystem
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
from zbmd.actors.hangs.loop_watch import watch_loop
from zbmd.actors.routing.routes import Routes
from zbmd.actors.supervision.events import AutoShutdown, BackOff, Strategy
from zbmd.actors.supervision.supervisor import ChildSpec, Supervisor
from zbmd.actors.upgrade.driver import ANSWER_S, PROBATION_S, Upgraded, upgrade
from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.errors import LocalProtocolError, ZbmdError

if TYPE_CHECKING:
    from zbmd.actors.contracts import Contract


# --- names and groups of actors: requests to the directory ----------------------------------------------


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


class ActorSystem(CoreSystem):
    """The actors of one process incarnation, and links to the systems of other processes.

    name: this process's name ("rank0"); incarnation: u64, greater in every replacement; recorder: takes down
    what its supervisors decide (frames are its links' to record); mailbox_bytes_max: bound of what waits in
    all its mailboxes together; scope: see `zbmd.actors.core.ref`. To be made and used in one running loop.
    Call `stop()` at the end.
    """

    def __init__(
        self,
        name: str,
        incarnation: int = 1,
        *,
        recorder: Recorder | None = None,
        mailbox_bytes_max: int = MAILBOX_BYTES,
        scope: str = "",
    ) -> None:
        super().__init__(
            name, incarnation, recorder=recorder, mailbox_bytes_max=mailbox_bytes_max, scope=scope
        )
        self.loop_watch = watch_loop(self)
        """Counts and keeps the notices of handlers that held the event loop."""
        self.add_service(self.loop_watch)

    async def supervise(
        self,
        children: Sequence[ChildSpec],
        *,
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        intensity: int = 3,
        period_s: float = 5.0,
        back_off: BackOff | None = None,
        template: ChildSpec | None = None,
        auto_shutdown: AutoShutdown = AutoShutdown.NEVER,
        name: str | None = None,
    ) -> Ref:
        """Start a supervisor and its children, in order; see `Supervisor`."""
        arguments = (children, strategy, intensity, period_s, back_off, template, auto_shutdown)
        return await self.spawn(Supervisor, *arguments, name=name)

    async def upgrade(
        self,
        old: type[ActorBase],
        new: type[ActorBase],
        *,
        processes: Sequence[str] | None = None,
        canaries: int = 1,
        probation_s: float = PROBATION_S,
        answer_s: float = ANSWER_S,
        lasting: bool = False,
    ) -> Upgraded:
        """Turn all actors of `old` into actors of `new` while they live; see `upgrade.driver.upgrade`.

        processes: by name, linked with this one and with each other; None for this one alone.
        """
        names = (self.name,) if processes is None else tuple(processes)
        return await upgrade(
            self,
            old,
            new,
            names,
            canaries=canaries,
            probation_s=probation_s,
            answer_s=answer_s,
            lasting=lasting,
        )

    # Names and groups.

    def open_directory(self, *, alone: bool) -> Directory:
        """Return the directory of this process; it is made if there is none. See `directory.driver`.

        alone: this process is a view of its own until another begins; else names wait for the first view.
        """
        directory = self.service(Directory)
        if directory is None:
            directory = Directory(self, alone=alone)
            self.add_service(directory)
        return directory

    async def register(self, name: str, ref: Ref, *, timeout: float = CALL_S) -> None:
        """Register an actor under a name, unique in the view, until the actor ends.

        Raises `NameInUse`, `DeadActor` if the actor does not live, and as `Ref.ask`. timeout: seconds; a
        name granted later is given back.
        """
        self.open_directory(alone=True)
        await register(self, name, ref, timeout)

    async def whereis(self, name: str, *, timeout: float = CALL_S) -> Ref | None:
        """Return the actor that has the name, wherever it lives, or None. Raises as `Ref.ask`."""
        self.open_directory(alone=True)
        return await whereis(self, name, timeout)

    async def unregister(self, name: str, *, timeout: float = CALL_S) -> bool:
        """Take the name from its holder; return False if there is none. Raises as `Ref.ask`."""
        self.open_directory(alone=True)
        return await unregister(self, name, timeout)

    async def group(self, name: str, *, timeout: float = CALL_S) -> ActorGroup:
        """Return the group of that name, once every process of the view has reported its members."""
        self._unrecorded("system.group()")
        group = ActorGroup(self, self.open_directory(alone=True), checked(name))
        await group.settled(timeout=timeout)
        return group

    # The cluster.

    async def processes(self) -> tuple[tuple[str, int, str], ...]:
        """Return the nodes of the cluster and the ranks that are up: process, incarnation, and its node.

        At most `PROCESSES_MAX`. Empty if this process is in no cluster. Raises as `Ref.ask`.
        """
        ways = self.service(Routes)
        return () if ways is None else (await ways.processes()).processes


if TYPE_CHECKING:

    class Actor(actor.Actor):
        """The base of every actor, as authors import it: `zbmd.actors.core.actor.Actor` itself.

        The core knows no services; to a type checker, `system` of this one has them.
        """

        @property
        def system(self) -> ActorSystem:
            """The system this actor runs in."""
            ...

else:
    Actor = actor.Actor
