"""Links to processes beyond our own views, made when something is sent there: the driver of `machine`.

Whoever is in the cluster, a node, a rank of any job, or a session, asks a node where the other listens and
dials it: shared memory within one memory domain, TCP elsewhere. Of a process that has an owner, as a session
has, that one is asked (`guests`). Both ends have proved the cluster's cookie.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, assert_never

import structlog

from zbmd.actors.core import wire
from zbmd.actors.core.scopes import abroad, at_home, is_global, of_guest, owner_of, scope_of_job
from zbmd.actors.core.services import Service
from zbmd.actors.core.signals import Down, Reason, ReasonKind
from zbmd.actors.errors import ActorError, DeadActor, TooManyPending
from zbmd.actors.routing import machine as w
from zbmd.actors.routing.contracts import (
    WAYS_ACTOR,
    Gone,
    NoWay,
    ProcessesReply,
    ProcessesRequest,
    UntilGone,
    Way,
    WayRequest,
)
from zbmd.actors.routing.guests import Guests
from zbmd.transport.errors import DeadlineExceeded, PeerLost, UserError, ZbmdError

if TYPE_CHECKING:
    from zbmd.actors.core.cell import ActorCell
    from zbmd.actors.core.ref import Ref
    from zbmd.actors.core.system import CoreSystem
    from zbmd.transport.link.interface import Link

log: Final = structlog.stdlib.get_logger("zbmd.actors.ways")

FIND_S: Final = 5.0
"""How long a node may take to say where a process listens."""
REACH_S: Final = 15.0
"""For how long who has no deadline waits for a link: to find the process, and to dial it."""
HEED_S: Final = 24 * 3600.0
"""How long a node is asked to wait for the end of a process; then it is asked again."""

DialWay = Callable[[Way], Awaitable["Link"]]
"""Raises as a link's dial does."""


class Door(Protocol):
    """Takes links until it is closed."""

    def close(self) -> None:
        """Take no more. Idempotent."""
        ...

    async def wait_closed(self) -> None:
        """Wait until nothing of it is under way."""
        ...


class Asked(Protocol):
    """Who knows of some processes."""

    async def find(self, process: str) -> Way | NoWay:
        """Return where a process listens. Raises `ZbmdError` if nobody can be asked."""
        ...

    async def until_gone(self, process: str, life: int) -> str:
        """Wait until the cluster goes on without this life; why. Raises as `find`."""
        ...


class Finder(Asked, Protocol):
    """Who knows the cluster."""

    async def processes(self) -> ProcessesReply:
        """Return all that can be found. Raises as `find`."""
        ...


class AskedFinder:
    """By asking the `ways` of a node. process: the one that it is in, linked with ours."""

    def __init__(self, system: CoreSystem, process: str) -> None:
        self._ways = system.ref(f"{process}/{WAYS_ACTOR}")

    async def find(self, process: str) -> Way | NoWay:
        """See `Finder`."""
        try:
            found = await self._ways.ask(WayRequest(process), timeout=FIND_S)
        except DeadActor:
            return NoWay("this process is in no cluster with nodes: its view is all that it reaches")
        assert isinstance(found, (Way, NoWay)), "the contract of `ways`"
        return found

    async def processes(self) -> ProcessesReply:
        """See `Finder`."""
        return await self._ways.ask(ProcessesRequest(), reply=ProcessesReply, timeout=FIND_S)

    async def until_gone(self, process: str, life: int) -> str:
        """See `Finder`."""
        while True:
            try:
                return (await self._ways.ask(UntilGone(process, life), reply=Gone, timeout=HEED_S)).reason
            except DeadlineExceeded:
                continue


class Ways(Service):
    """The links of one system to processes beyond its views, which closes it when it stops.

    leads_to: which processes are ours to reach (default: all with a name that others have, too).
    """

    def __init__(
        self,
        system: CoreSystem,
        finder: Finder,
        dial: DialWay,
        *,
        leads_to: Callable[[str], bool] = is_global,
    ) -> None:
        self.leads_to = leads_to
        self._system = system
        self._finder = finder
        self._dial = dial
        self._machine = w.WaysMachine()
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._found: dict[str, Way] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._heeding: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Not in the context of whoever sends: an actor's task is told by it.
        self._context = contextvars.copy_context()
        self._closed = False
        self._doors: list[Door] = []
        self.guests = Guests()
        """Who is in the cluster by way of this process."""
        system.routes = self
        system.add_service(self)

    async def reach(self, process: str, life: int, timeout_s: float = REACH_S) -> None:
        """Wait until a link to this life of a process (0: any) stands.

        Raises `PeerLost`, `DeadActor`, `TooManyPending` or `DeadlineExceeded`.
        """
        ticket = next(self._tickets)
        future = self._waiting[ticket] = self._system.loop.create_future()
        self._feed(w.Wanted(process=process, life=life, ticket=ticket))
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            raise DeadlineExceeded(f"no link to {process} within {timeout_s:g} s") from None
        finally:
            del self._waiting[ticket]
            self._feed(w.GivenUp(ticket=ticket))

    async def reach_by(self, process: str, incarnation: int, deadline_ns: int) -> None:
        """As `reach`, until a monotonic deadline, 0 for none."""
        await self.reach(process, incarnation, deadline_left_s(deadline_ns))

    async def processes(self) -> ProcessesReply:
        """See `Finder`."""
        return await self._finder.processes()

    async def until_gone(self, process: str, life: int) -> str:
        """See `Finder`."""
        return await self._finder_of(process).until_gone(process, life)

    def accepted(self, link: Link) -> None:
        """Take a link that a guest has dialed, or close it."""
        name = of_guest(link.peer.name)
        own = name is None or at_home(name, self._system.scope) == self._system.name
        if name is None or own or self._closed or not self._machine.has_room(name):
            log.warning("link of a guest closed", name=link.peer.name)
            link.close()
            return
        self._take(name, link)

    @property
    def closed(self) -> bool:
        """Return whether `end` was called."""
        return self._closed

    def end(self) -> None:
        """Seek and dial no more; who waits is told. Idempotent."""
        self._closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerLost("any", "the actor system stops"))
        for door in self._doors:
            door.close()
        for task in self._tasks:
            task.cancel()

    def stopping(self) -> None:
        """The system stops."""
        self.end()

    async def stopped(self) -> None:
        """The system has stopped."""
        await self.close()

    def listens(self, door: Door) -> None:
        """Links are taken there for us; it is closed with us."""
        self._doors.append(door)

    def owns(self, process: str) -> bool:
        """Return whether it is in the cluster by way of this process."""
        return owner_of(process) == abroad(self._system.name, self._system.scope)

    def dialed(self, process: str, link: Link) -> None:
        """Take a link that was dialed to begin with."""
        self._take(process, link)

    async def close(self) -> None:
        """The same, and wait until nothing is under way any more."""
        self.end()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for door in self._doors:
            await door.wait_closed()

    # What does not wait, once there is a link.

    def watch(self, ref: Ref, callback: Callable[[Down], None]) -> Callable[[], None]:
        """As `ActorSystem.watch`."""
        undo: list[Callable[[], None]] = []

        async def begin() -> None:
            try:
                await self.reach(ref.process, ref.process_incarnation)
                undo.append(self._system.watch(ref, callback))
            except ZbmdError as error:
                callback(Down(ref, _reason(error)))

        task = self.task(begin(), "watch from afar")

        def cancel() -> None:
            task.cancel()
            for each in undo:
                each()

        return cancel

    def link(self, cell: ActorCell, other: Ref) -> None:
        """Tell the other end of a link between actors; `cell` has been told."""

        async def begin() -> None:
            ours = cell.ref
            try:
                await self.reach(other.process, other.process_incarnation)
            except ZbmdError as error:
                if other in cell.links:
                    cell.exit_signal(other, _reason(error))
                return
            if other in cell.links and self._system.find(ours.actor, ours.incarnation) is cell:
                self._post(
                    other, wire.LinkActors(ours.actor, ours.incarnation, other.actor, other.incarnation)
                )

        self.task(begin(), "link from afar")

    def exit(self, ref: Ref, reason: Reason) -> None:
        """As `ActorSystem.exit`."""

        async def begin() -> None:
            try:
                await self.reach(ref.process, ref.process_incarnation)
            except ZbmdError as error:
                log.info("nobody there to be stopped", actor=ref.address, reason=str(error))
                return
            self._post(ref, wire.Stop(ref.actor, ref.incarnation, wire.reason_data(reason)))

        self.task(begin(), "stop from afar")

    def _post(self, ref: Ref, envelope: wire.Envelope) -> None:
        peer = self._system.peer(ref.process)
        if peer is not None:
            peer.post(envelope)

    # The machine.

    def _feed(self, event: w.Event) -> None:
        actions = self._machine.handle(event)
        self._machine.check_invariants()
        for action in actions:
            self._perform(action)

    def _perform(self, action: w.Action) -> None:
        match action:
            case w.Seek(process=process):
                self._works(process, self._seek(process))
            case w.Dial(process=process):
                self._works(process, self._reach_at(self._found.pop(process)))
            case w.Arrive(ticket=ticket):
                if not self._waiting[ticket].done():
                    self._waiting[ticket].set_result(None)
            case w.Refuse():
                if not self._waiting[action.ticket].done():
                    self._waiting[action.ticket].set_exception(_error(action))
            case w.Heed(process=process, life=life):
                if (process, life) not in self._heeding and not self._closed:
                    task = self.task(self._heed(process, life), f"heed {process}")
                    self._heeding[process, life] = task
                    task.add_done_callback(lambda _: self._heeding.pop((process, life), None))
            case w.Detach(process=process, life=life, reason=reason):
                self._system.dismiss(process, life, reason)
            case _:
                assert_never(action)

    def _finder_of(self, process: str) -> Asked:
        """Return the locator of a process: this process, its owner, or the cluster's nodes."""
        owner = owner_of(process)
        if not owner:
            return self._finder
        if self.owns(process):
            return self.guests
        return AskedFinder(self._system, at_home(owner, self._system.scope))

    def _works(self, process: str, work: Coroutine[Any, Any, None]) -> None:
        """What is under way for a process; what was before counts no more."""
        task = self._work[process] = self.task(work, f"way to {process}")

        def over(_: object) -> None:
            if self._work.get(process) is task:
                del self._work[process]

        task.add_done_callback(over)

    def _counts(self, process: str) -> bool:
        return self._work.get(process) is asyncio.current_task() and not self._closed

    async def _seek(self, process: str) -> None:
        try:
            found = await self._finder_of(process).find(process)
        except ZbmdError as error:
            whom = owner_of(process) or "any node of the cluster"
            found = NoWay(f"{whom} could not be asked where it is: {error}")
        if not self._counts(process):
            return
        if isinstance(found, NoWay):
            self._feed(w.NotFound(process=process, reason=found.reason))
        else:
            self._found[process] = found
            self._feed(w.Found(process=process, life=found.life))
            self._found.pop(process, None)

    async def _reach_at(self, way: Way) -> None:
        process = way.process
        try:
            link = await self._dial(way)
        except (ZbmdError, UserError, OSError) as error:
            if self._counts(process):
                self._feed(w.NotFound(process=process, reason=str(error)))
            return
        if self._closed:
            link.close()
            return
        hello = link.peer.name
        found = of_guest(hello) or abroad(hello, scope_of_job(link.peer.job))
        if (found, link.peer.incarnation) != (process, way.life):
            link.close()
            if self._counts(process):
                other = f"{found}#{link.peer.incarnation} listens where it was"
                self._feed(w.NotFound(process=process, reason=other))
            return
        if not self._take(process, link) and self._counts(process):
            self._feed(w.NotFound(process=process, reason="its link was not taken"))

    def _take(self, process: str, link: Link) -> bool:
        life = link.peer.incarnation
        try:
            carries = self._system.admit(link, process, on_closed=partial(self._ended, process, life))
        except (ActorError, ZbmdError) as error:
            log.warning("link of a guest not taken", name=process, reason=str(error))
            link.close()
            return False
        if carries:
            if self.owns(process):
                self.guests.linked(process, life)
            self._feed(w.Linked(process=process, life=life))
        return True

    def _ended(self, process: str, life: int, _: ZbmdError | None) -> None:
        if self._system.peer(process) is None:
            heeding = self._heeding.get((process, life))
            if heeding is not None:
                heeding.cancel()
            self.guests.left(process, life)
            self._feed(w.Ended(process=process, life=life))

    async def _heed(self, process: str, life: int) -> None:
        try:
            reason = await self._finder_of(process).until_gone(process, life)
        except ZbmdError as error:
            log.info("nobody tells of the end of a process", process=process, reason=str(error))
            return
        self._feed(w.Gone(process=process, life=life, reason=reason))

    def task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Do it, not for longer than until we are closed."""
        task = self._system.loop.create_task(work, name=name, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def deadline_left_s(deadline_ns: int) -> float:
    """Return how long a message with that deadline may wait for a link; 0: it has none."""
    if not deadline_ns:
        return REACH_S
    return min(REACH_S, max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9))


def _error(refused: w.Refuse) -> ZbmdError:
    match refused.kind:
        case w.Kind.LOST:
            return PeerLost(refused.process, refused.reason)
        case w.Kind.DEAD:
            return DeadActor(refused.reason)
        case w.Kind.TOO_MANY:
            return TooManyPending(refused.reason)
        case _:
            assert_never(refused.kind)


def _reason(error: ZbmdError) -> Reason:
    kind = ReasonKind.NO_ACTOR if isinstance(error, DeadActor) else ReasonKind.LOST
    return Reason(kind, str(error)[: wire.TEXT_CHARS_MAX])
