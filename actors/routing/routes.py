"""Links to processes outside of the own views, made when something is sent there: the driver of `machine`.

A process of the cluster (a node, a rank of any job, a session) asks a node for the address of the other and
dials it: by shared memory within one memory domain, by TCP elsewhere. The address of a process that has an
owner, such as a session, is requested from its owner (`clients`). Both ends have proved the cluster's cookie.
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
from zbmd.actors.core.ref import (
    Down,
    Reason,
    ReasonKind,
    abroad,
    at_home,
    is_global,
    name_of_external,
    owner_of,
    scope_of_job,
)
from zbmd.actors.core.services import Service
from zbmd.actors.errors import ActorError, DeadActor, TooManyPending
from zbmd.actors.routing import machine as w
from zbmd.actors.routing.clients import ExternalClients
from zbmd.actors.routing.contracts import (
    ROUTES_ACTOR,
    Gone,
    NoRoute,
    ProcessesReply,
    ProcessesRequest,
    Route,
    RouteRequest,
    UntilGone,
)
from zbmd.transport.errors import DeadlineExceeded, PeerLost, UserError, ZbmdError

if TYPE_CHECKING:
    from zbmd.actors.core.cell import ActorCell
    from zbmd.actors.core.ref import Ref
    from zbmd.actors.core.system import CoreSystem
    from zbmd.transport.link.interface import Link
import contextlib

from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import Deferred, DeferredReply, sender_process
from zbmd.actors.routing.contracts import (
    Enrol,
    Enrolled,
)
from zbmd.transport.errors import LocalProtocolError

log: Final = structlog.stdlib.get_logger("zbmd.actors.routes")

FIND_S: Final = 5.0
"""Timeout of a request for an address, seconds."""
REACH_S: Final = 15.0
"""Timeout of a link for a message without a deadline, seconds: to locate the process and to dial it."""
WAIT_END_S: Final = 24 * 3600.0
"""Timeout of one request for the end of a process, seconds; then it is sent again."""

DialRoute = Callable[[Route], Awaitable["Link"]]
"""Raises as a link's dial does."""


class Listener(Protocol):
    """Accepts links until it is closed."""

    def close(self) -> None:
        """Accept no more links. Idempotent."""
        ...

    async def wait_closed(self) -> None:
        """Wait until its work is done."""
        ...


class Locator(Protocol):
    """Locates some processes."""

    async def find(self, process: str) -> Route | NoRoute:
        """Return where a process listens. Raises `ZbmdError` if nobody can be asked."""
        ...

    async def until_gone(self, process: str, incarnation: int) -> str:
        """Wait until the cluster goes on without this incarnation; why. Raises as `find`."""
        ...


class ClusterLocator(Locator, Protocol):
    """Locates all processes of the cluster."""

    async def processes(self) -> ProcessesReply:
        """Return all that can be found. Raises as `find`."""
        ...


class RemoteLocator:
    """Locates processes by requests to the `ways` actor of a node. process: a linked node."""

    def __init__(self, system: CoreSystem, process: str) -> None:
        self._routes = system.ref(f"{process}/{ROUTES_ACTOR}")

    async def find(self, process: str) -> Route | NoRoute:
        """See `ClusterLocator`."""
        try:
            found = await self._routes.ask(RouteRequest(process), timeout=FIND_S)
        except DeadActor:
            return NoRoute("this process is in no cluster: it reaches the processes of its view only")
        assert isinstance(found, (Route, NoRoute)), "the contract of `ways`"
        return found

    async def processes(self) -> ProcessesReply:
        """See `ClusterLocator`."""
        return await self._routes.ask(ProcessesRequest(), reply=ProcessesReply, timeout=FIND_S)

    async def until_gone(self, process: str, incarnation: int) -> str:
        """See `ClusterLocator`."""
        while True:
            try:
                return (
                    await self._routes.ask(UntilGone(process, incarnation), reply=Gone, timeout=WAIT_END_S)
                ).reason
            except DeadlineExceeded:
                continue


class Routes(Service):
    """Links of one system to processes outside of its views; closed with the system.

    leads_to: whether links to a process are made here (default: to all with a global name).
    """

    def __init__(
        self,
        system: CoreSystem,
        finder: ClusterLocator,
        dial: DialRoute,
        *,
        leads_to: Callable[[str], bool] = is_global,
    ) -> None:
        self.leads_to = leads_to
        self._system = system
        self._finder = finder
        self._dial = dial
        self._machine = w.RouteMachine()
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._found: dict[str, Route] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._notices: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Not in the context of a sender: an actor's tasks are recognised by it.
        self._context = contextvars.copy_context()
        self._closed = False
        self._listeners: list[Listener] = []
        self.clients = ExternalClients()
        """The processes that joined the cluster by way of this one."""
        system.routes = self
        system.add_service(self)

    async def reach(self, process: str, incarnation: int, timeout_s: float = REACH_S) -> None:
        """Wait until a link to this incarnation of a process (0: any) stands.

        Raises `PeerLost`, `DeadActor`, `TooManyPending` or `DeadlineExceeded`.
        """
        ticket = next(self._tickets)
        future = self._waiting[ticket] = self._system.loop.create_future()
        self._feed(w.Wanted(process=process, incarnation=incarnation, ticket=ticket))
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
        """See `ClusterLocator`."""
        return await self._finder.processes()

    async def until_gone(self, process: str, incarnation: int) -> str:
        """See `ClusterLocator`."""
        return await self._finder_of(process).until_gone(process, incarnation)

    def accepted(self, link: Link) -> None:
        """Take a link dialed by an external client, or close it."""
        name = name_of_external(link.peer.name)
        own = name is None or at_home(name, self._system.scope) == self._system.name
        if name is None or own or self._closed or not self._machine.has_room(name):
            log.warning("external link refused", name=link.peer.name)
            link.close()
            return
        self._take(name, link)

    @property
    def closed(self) -> bool:
        """Return whether `end` was called."""
        return self._closed

    def end(self) -> None:
        """Locate and dial no more; waiting senders fail. Idempotent."""
        self._closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerLost("any", "the actor system stops"))
        for listener in self._listeners:
            listener.close()
        for task in self._tasks:
            task.cancel()

    def stopping(self) -> None:
        """The system stops."""
        self.end()

    async def stopped(self) -> None:
        """The system has stopped."""
        await self.close()

    def listens(self, listener: Listener) -> None:
        """Add a listener whose links come here; it is closed with the routes."""
        self._listeners.append(listener)

    def owns(self, process: str) -> bool:
        """Return whether a process joined the cluster by way of this one."""
        return owner_of(process) == abroad(self._system.name, self._system.scope)

    def dialed(self, process: str, link: Link) -> None:
        """Take a link that was dialed elsewhere."""
        self._take(process, link)

    async def close(self) -> None:
        """End, and wait until all work is done."""
        self.end()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for listener in self._listeners:
            await listener.wait_closed()

    # Requests that wait for a link in the background.

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
        """Link `cell`, which has noted it, with an actor of another process."""

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
                log.info("cannot stop an actor: no link to it", actor=ref.address, reason=str(error))
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
            case w.RefuseLink():
                if not self._waiting[action.ticket].done():
                    self._waiting[action.ticket].set_exception(_error(action))
            case w.AwaitEnd(process=process, incarnation=incarnation):
                if (process, incarnation) not in self._notices and not self._closed:
                    task = self.task(self._await_end(process, incarnation), f"await the end of {process}")
                    self._notices[process, incarnation] = task
                    task.add_done_callback(lambda _: self._notices.pop((process, incarnation), None))
            case w.Detach(process=process, incarnation=incarnation, reason=reason):
                self._system.dismiss(process, incarnation, reason)
            case _:
                assert_never(action)

    def _finder_of(self, process: str) -> Locator:
        """Return the locator of a process: this process, its owner, or the cluster's nodes."""
        owner = owner_of(process)
        if not owner:
            return self._finder
        if self.owns(process):
            return self.clients
        return RemoteLocator(self._system, at_home(owner, self._system.scope))

    def _works(self, process: str, work: Coroutine[Any, Any, None]) -> None:
        """Start work for a process; results of earlier work are ignored."""
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
            found = NoRoute(f"{whom} could not be asked for its address: {error}")
        if not self._counts(process):
            return
        if isinstance(found, NoRoute):
            self._feed(w.NotFound(process=process, reason=found.reason))
        else:
            self._found[process] = found
            self._feed(w.ProcessFound(process=process, incarnation=found.incarnation))
            self._found.pop(process, None)

    async def _reach_at(self, route: Route) -> None:
        process = route.process
        try:
            link = await self._dial(route)
        except (ZbmdError, UserError, OSError) as error:
            if self._counts(process):
                self._feed(w.NotFound(process=process, reason=str(error)))
            return
        if self._closed:
            link.close()
            return
        hello = link.peer.name
        found = name_of_external(hello) or abroad(hello, scope_of_job(link.peer.job))
        if (found, link.peer.incarnation) != (process, route.incarnation):
            link.close()
            if self._counts(process):
                other = f"{found}#{link.peer.incarnation} listens at its address"
                self._feed(w.NotFound(process=process, reason=other))
            return
        if not self._take(process, link) and self._counts(process):
            self._feed(w.NotFound(process=process, reason="its link was refused"))

    def _take(self, process: str, link: Link) -> bool:
        incarnation = link.peer.incarnation
        try:
            carries = self._system.admit(link, process, on_closed=partial(self._ended, process, incarnation))
        except (ActorError, ZbmdError) as error:
            log.warning("external link not taken", name=process, reason=str(error))
            link.close()
            return False
        if carries:
            if self.owns(process):
                self.clients.linked(process, incarnation)
            self._feed(w.ProcessLinked(process=process, incarnation=incarnation))
        return True

    def _ended(self, process: str, incarnation: int, _: ZbmdError | None) -> None:
        if self._system.peer(process) is None:
            notice = self._notices.get((process, incarnation))
            if notice is not None:
                notice.cancel()
            self.clients.left(process, incarnation)
            self._feed(w.LinkEnded(process=process, incarnation=incarnation))

    async def _await_end(self, process: str, incarnation: int) -> None:
        try:
            reason = await self._finder_of(process).until_gone(process, incarnation)
        except ZbmdError as error:
            log.info("the end of a process is not reported", process=process, reason=str(error))
            return
        self._feed(w.Gone(process=process, incarnation=incarnation, reason=reason))

    def task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a task until it ends or the routes are closed."""
        task = self._system.loop.create_task(work, name=name, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def deadline_left_s(deadline_ns: int) -> float:
    """Return how long a message may wait for a link, seconds. deadline_ns: monotonic, 0 for none."""
    if not deadline_ns:
        return REACH_S
    return min(REACH_S, max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9))


def _error(refused: w.RefuseLink) -> ZbmdError:
    match refused.kind:
        case w.RefusalKind.LOST:
            return PeerLost(refused.process, refused.reason)
        case w.RefusalKind.DEAD:
            return DeadActor(refused.reason)
        case w.RefusalKind.TOO_MANY:
            return TooManyPending(refused.reason)
        case _:
            assert_never(refused.kind)


def _reason(error: ZbmdError) -> Reason:
    kind = ReasonKind.NO_ACTOR if isinstance(error, DeadActor) else ReasonKind.LOST
    return Reason(kind, str(error)[: wire.TEXT_CHARS_MAX])


# --- the actor that answers where processes listen --------------------------------------------------------


class RouteTable(ClusterLocator, Protocol):
    """Knows the routes to all processes of a cluster, and when one of them is gone."""

    def notify_end(self, process: str, incarnation: int, tell: Callable[[str], None]) -> Callable[[], None]:
        """Call `tell` once when that incarnation is gone; return what undoes it. Raises `TooManyPending`."""
        ...


class RoutesActor(Actor):
    """Answers every linked process where others listen, at `ROUTES_ACTOR`."""

    captured = False

    def __init__(self, finder: RouteTable) -> None:
        self._finder = finder
        self._waits: dict[tuple[str, str, int], tuple[Deferred, Callable[[], None]]] = {}
        self._finding: set[asyncio.Task[None]] = set()
        """At most as many as deferred answers may be owed."""

    @on(RouteRequest)
    async def find(self, message: RouteRequest) -> Route | NoRoute | DeferredReply:
        """See `RouteTable.find`. Another node may answer slowly, which delays no other request."""
        deferred = self.defer()
        task = asyncio.get_running_loop().create_task(self._find(message.process, deferred))
        self._finding.add(task)
        task.add_done_callback(self._finding.discard)
        return deferred

    async def _find(self, process: str, deferred: Deferred) -> None:
        routes = self._owner_of(process)
        found = await (self._finder if routes is None else routes.clients).find(process)
        with contextlib.suppress(LocalProtocolError):  # the asker has withdrawn
            deferred.reply(found)

    @on(ProcessesRequest)
    async def processes(self, _: ProcessesRequest) -> ProcessesReply:
        """See `RouteTable.processes`."""
        return await self._finder.processes()

    @on(Enrol)
    async def enrol(self, message: Enrol) -> Enrolled | NoRoute:
        """See `Enrol`: a linked process enrols only itself."""
        process = sender_process()
        routes, peer = self._owner_of(process), self.system.peer(process)
        if routes is None or peer is None:
            return NoRoute(f"{process} is not in the cluster through {self.system.name}")
        route = Route(process, peer.incarnation, message.host, message.near, message.far)
        return (
            Enrolled()
            if routes.clients.enrol(route)
            else NoRoute(f"another incarnation of {process} is linked")
        )

    @on(UntilGone)
    async def until_gone(self, message: UntilGone) -> Gone | DeferredReply:
        """See `RouteTable.notify_end`. Each asker is owed one answer for each process it asks about."""
        self._forget_askers_that_are_gone()
        key = (sender_process(), message.process, message.incarnation)
        before = self._waits.pop(key, None)
        if before is not None:
            before[1]()
        deferred, reasons = self.defer(), list[str]()

        def tell(reason: str) -> None:
            reasons.append(reason)
            self._waits.pop(key, None)
            with contextlib.suppress(LocalProtocolError):  # the asker has withdrawn
                deferred.reply(Gone(reason))

        routes = self._owner_of(message.process)
        knows = self._finder if routes is None else routes.clients
        undo = knows.notify_end(message.process, message.incarnation, tell)
        if not reasons:
            self._waits[key] = (deferred, undo)
        return deferred

    def _owner_of(self, process: str) -> Routes | None:
        """Return our routes, if that process is in the cluster through this one."""
        routes = self.system.service(Routes)
        return routes if routes is not None and routes.owns(process) else None

    async def stopping(self, reason: object) -> None:
        """Cancel all waits."""
        for _, undo in self._waits.values():
            undo()
        self._waits.clear()
        for task in self._finding:
            task.cancel()

    def _forget_askers_that_are_gone(self) -> None:
        for key in [key for key in self._waits if self.system.peer(key[0]) is None]:
            if key[0]:  # else it is of this process
                self._waits.pop(key)[1]()
