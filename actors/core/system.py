"""The actor system of one process: which actors it has, who can be reached, and how messages get there."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import structlog

from zbmd.actors.contracts import check_fingerprints, is_parting
from zbmd.actors.core import wire
from zbmd.actors.core.actor_base import (
    MAILBOX_BYTES,
    ActorBase,
    MailboxSpec,
    find_remote_class,
    handler_table,
    import_remote_class,
    remote_class_id,
)
from zbmd.actors.core.cell import LINKS_MAX, ActorCell
from zbmd.actors.core.messaging import Messaging
from zbmd.actors.core.peer import Peer
from zbmd.actors.core.ref import Down, Monitor, Reason, ReasonKind, Ref, Undelivered, at_home
from zbmd.actors.core.services import ClassBook, Service
from zbmd.actors.core.timers import Expired
from zbmd.actors.errors import ActorError, DeadActor, NameTaken, SystemStopped, TooManyPending
from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, PeerLost, ZbmdError
from zbmd.transport.link.interface import Link

ACTORS_MAX = 1_048_576
STOP_S = 5.0
_NAME = re.compile(rf"[A-Za-z0-9_.:<>-]{{1,{wire.ACTOR_NAME_CHARS_MAX}}}")
_log = structlog.get_logger("zbmd.actors")

ServiceT = TypeVar("ServiceT", bound=Service)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorInfo:
    """A snapshot of one actor, for status displays."""

    name: str
    kind: str
    incarnation: int
    state: str
    waiting: int
    handled: int
    dropped: int


class CoreSystem(Messaging):
    """The actors of one process incarnation, and links to the systems of other processes.

    `zbmd.actors.system.ActorSystem` is this with its services: names, groups, supervisors, changes of code.

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
        super().__init__(name, incarnation, mailbox_bytes_max)
        self.scope = scope
        self.recorder = recorder
        self.undelivered = 0
        self.class_book: ClassBook | None = None
        """The classes that have been replaced, if any was."""
        self._services: dict[type[Service], Service] = {}
        self._lingering: set[asyncio.Task[None]] = set()
        self._last_actor = 0
        digest = hashlib.blake2b(f"{name}#{incarnation}".encode(), digest_size=4).digest()
        self._last_trace = int.from_bytes(digest) << 32

    def add_service(self, service: Service) -> None:
        """Register a service and call its hooks from now on. Raises `LocalProtocolError`."""
        if type(service) in self._services:
            raise LocalProtocolError(f"{self.name} has a {type(service).__name__} already")
        self._services[type(service)] = service

    def service(self, kind: type[ServiceT]) -> ServiceT | None:
        """Return the service of that class, if it was added."""
        return cast("ServiceT | None", self._services.get(kind))

    # Start and end of actors.

    async def spawn(
        self,
        cls: type[ActorBase],
        *args: Any,
        name: str | None = None,
        mailbox: MailboxSpec | None = None,
        link_to: Ref | None = None,
        **kwargs: Any,
    ) -> Ref:
        """Make an actor of `cls(*args, **kwargs)` and wait until its `started()` has returned.

        name: unique in the process; None takes the class's name and a number. Raises `NameTaken`,
        `ActorStartFailed`, and whatever the constructor raises.
        """

        async def perform() -> Ref:
            cell = self._create(cls, args, kwargs, name, mailbox, None)
            if link_to is not None:
                self.link(cell.ref, link_to)
            return await self.until_started(cell)

        if self.tracer is None:
            return await perform()
        return await self.tracer.spawn(self.name, cls, (args, kwargs), name, perform)

    def create_child(
        self, cls: type[ActorBase], args: Sequence[Any], *, name: str | None, parent: Ref | None
    ) -> ActorCell:
        """Begin to spawn, for a supervisor: if `parent` ends while the child lives, the child is killed."""
        self._unrecorded("system.create_child()")
        cell = self._create(cls, args, {}, name, None, parent)
        if parent is not None and parent.process == self.name:
            parent_cell = self.find(parent.actor, parent.incarnation)
            if parent_cell is None:
                cell.kill(Reason(ReasonKind.KILLED, "its supervisor has ended"))
            else:
                parent_cell.links[cell.ref] = None
        return cell

    async def spawn_on(
        self,
        process: str,
        cls: type[ActorBase] | str,
        *args: wire.Plain,
        name: str | None = None,
        timeout: float | None = None,
        parent: Ref | None = None,
    ) -> Ref:
        """Spawn an actor in another process, of a class or of `"module:Class"`, which need not be here.

        It must be declared with `remote=True` and imported there, or be of a module that
        `allow_remote_modules` names there. timeout: seconds, as in `Ref.ask`. Raises `UnknownActorClass`,
        `ActorStartFailed`, `PeerLost`, `DeadlineExceeded`.
        """

        def perform() -> Coroutine[Any, Any, Ref]:
            return self._spawn_on(process, cls, args, name, timeout, parent)

        if self.tracer is None:
            return await perform()
        return await self.tracer.spawn(process, cls, (args, {}), name, perform)

    async def _spawn_on(
        self,
        process: str,
        cls: type[ActorBase] | str,
        args: Sequence[wire.Plain],
        name: str | None,
        timeout: float | None,
        parent: Ref | None,
    ) -> Ref:
        process = at_home(process, self.scope)
        if process == self.name:
            if isinstance(cls, str):
                cls = find_remote_class(cls) or import_remote_class(cls)
            return await self.until_started(self.create_child(cls, args, name=name, parent=parent))
        deadline_ns, timeout_ns = self._deadline(timeout, process)
        try:
            peer = self._peer(process, 0)
        except PeerLost:
            peer = await self.reached(process, 0, deadline_ns)
            timeout_ns = max(0, deadline_ns - time.monotonic_ns())
        parent_data = None if parent is None else wire.RefData(*parent.key())
        future: asyncio.Future[Any] = self.loop.create_future()
        call = peer.open_call(future, wants_ref=True)
        class_id = remote_class_id(cls)
        bucket = self.deadlines.add(future, deadline_ns, timeout_ns)
        try:
            request = wire.Spawn(call, timeout_ns, class_id, name or "", parent_data, list(args))
            await peer.send_before(wire.encode(request), 0, future)
            reply: Ref = await future
        except BaseException as error:
            peer.unspawn(call, future)
            if isinstance(error, Expired):
                raise DeadlineExceeded(f"{process} did not spawn {class_id} in time") from None
            raise
        finally:
            self.deadlines.remove(future, bucket)
            peer.close_call(call)
        parent_cell = None if parent is None else self.find(parent.actor, parent.incarnation)
        if parent_cell is not None:
            parent_cell.links[reply] = None
        elif parent is not None:
            self.exit(reply, Reason(ReasonKind.KILLED, "its supervisor has ended"))
        return reply

    async def terminate(self, ref: Ref, *, timeout: float = STOP_S, text: str = "asked to stop") -> Down:
        """Stop an actor wherever it is, kill it after `timeout` seconds, and return its end."""
        if self.tracer is None:
            return await self._terminate(ref, timeout, text)
        return await self.tracer.terminate(ref, timeout, text, lambda: self._terminate(ref, timeout, text))

    async def _terminate(self, ref: Ref, timeout: float, text: str) -> Down:
        monitor = self.monitor(ref)
        try:
            self.exit(ref, Reason(ReasonKind.SHUTDOWN, text))
            try:
                return await monitor.down(timeout=timeout)
            except DeadlineExceeded:
                self.exit(ref, Reason(ReasonKind.KILLED, f"{text}; still there after {timeout:g} s"))
                return await monitor.down(timeout=timeout)
        finally:
            monitor.cancel()

    def exit(self, ref: Ref, reason: Reason) -> None:
        """Ask an actor to end; with a reason of kind KILLED it is killed. No error if it is gone."""
        if self.tracer is None:
            self._exit(ref, reason)
        else:
            self.tracer.exit(ref, reason, lambda: self._exit(ref, reason))

    def _exit(self, ref: Ref, reason: Reason) -> None:
        if ref.process == self.name:
            cell = self._find_ref(ref)
            if cell is not None:
                cell.request_stop(reason)
        elif (peer := self._peer_or_none(ref)) is not None:
            peer.post(wire.Stop(ref.actor, ref.incarnation, wire.reason_data(reason)))
        elif (routes := self.routes_to(ref.process)) is not None:
            routes.exit(ref, reason)

    async def stop(self, *, timeout: float = STOP_S) -> None:
        """End all actors, the last spawned first; after `timeout` seconds kill the rest; close all links.

        With a timeout of 0 all are killed at once.
        """
        try:
            await self._stop(timeout)
        finally:
            if self.tracer is not None:
                self.tracer.stopped()

    async def _stop(self, timeout: float) -> None:
        shutdown = Reason(ReasonKind.SHUTDOWN, "the system stops")
        try:
            async with asyncio.timeout(timeout):
                # Actors may spawn while they stop; each pass ends those without a supervisor.
                while tops := [c for c in self._cells.values() if not self._has_supervisor_here(c)]:
                    for cell in reversed(tops):
                        cell.request_stop(shutdown)
                        await asyncio.shield(cell.end())
        except TimeoutError:
            if timeout > 0:
                _log.warning("actors killed: they did not stop in time", actors=list(self._cells)[:16])
        finally:
            self._stopped = True
            for cell in reversed(list(self._cells.values())):
                cell.kill(Reason(ReasonKind.KILLED, "the system stops"))
            for service in self._services.values():
                service.stopping()
            for peer in [*self._peers.values(), *self._spare]:
                peer.close(None)
            self.deadlines.close()
        for service in self._services.values():
            await service.stopped()
        await self.pools.close()
        if self._lingering:
            await asyncio.wait(self._lingering, timeout=timeout)

    def _unrecorded(self, what: str) -> None:
        if self.tracer is not None:
            self.tracer.unrecorded(what)

    def describe(self) -> list[ActorInfo]:
        """Return all actors of this process, in the order in which they were spawned."""
        self._unrecorded("system.describe()")
        return [
            ActorInfo(
                name=c.name,
                kind=type(c.actor).__name__,
                incarnation=c.ref.incarnation,
                state=c.state.value,
                waiting=len(c.mailbox),
                handled=c.handled,
                dropped=c.mailbox.dropped,
            )
            for c in self._cells.values()
        ]

    def _create(
        self,
        cls: type[ActorBase],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        name: str | None,
        mailbox: MailboxSpec | None,
        parent: Ref | None,
    ) -> ActorCell:
        if self._stopped:
            raise SystemStopped(f"the actor system of {self.name} has been stopped")
        wanted, cls = cls, cls if self.class_book is None else self.class_book.current(cls)
        if len(self._cells) >= ACTORS_MAX:
            raise TooManyPending(f"{ACTORS_MAX} actors live in {self.name}")
        incarnation = self._last_actor + 1
        actor_name = f"{cls.__name__}-{incarnation}" if name is None else name
        if not _NAME.fullmatch(actor_name):
            raise LocalProtocolError(
                f"actor name {actor_name!r}: 1 to {wire.ACTOR_NAME_CHARS_MAX} of A-Z a-z 0-9 _ . : < > -"
            )
        if actor_name in self._cells:
            raise NameTaken(f"{self.name}/{actor_name} is alive")
        handler_table(cls)
        # Before the constructor runs: it may change what it is given.
        before = None if self.tracer is None else self.tracer.creating(cls, args, kwargs)
        actor = cls(*args, **kwargs)
        self._last_actor = incarnation
        ref = Ref(self, self.name, self.incarnation, actor_name, incarnation)
        cell = ActorCell(self, actor, ref, mailbox or cls.mailbox, parent)
        actor._cell = cell
        self._cells[actor_name] = cell
        if cls is not wanted and self.class_book is not None:
            self.class_book.spawned(cell)
        if self.tracer is not None:
            self.tracer.created(cell, before)
        return cell

    async def until_started(self, cell: ActorCell) -> Ref:
        """Wait until `started()` has returned. Raises `ActorStartFailed`; if cancelled, kills the actor."""
        if cell.ready is not None:
            ready = cell.ready
            try:
                await asyncio.sleep(0)  # most have begun when the loop has had one turn
                if cell.ready is not None:
                    await asyncio.shield(ready)
            except asyncio.CancelledError:
                cell.kill(Reason(ReasonKind.KILLED, "its spawner was cancelled"))
                ready.exception()
                raise
        return cell.ref

    def _has_supervisor_here(self, cell: ActorCell) -> bool:
        return cell.parent is not None and cell.parent.process == self.name

    # References and links.

    def ref(self, address: str) -> Ref:
        """Return a reference by name: `"rank1/counter"`, or `"counter"` in this process."""
        process, slash, actor = address.rpartition("/")
        if not _NAME.fullmatch(actor) or (slash and not process):
            raise LocalProtocolError(f"{address!r} is not an address: write 'process/actor' or 'actor'")
        return Ref(self, at_home(process, self.scope) or self.name, 0, actor, 0)

    def attach(self, link: Link, *, on_closed: Callable[[ZbmdError | None], None] | None = None) -> None:
        """Reach the actors of `link.peer` over this link; the system owns the link from now on.

        A newer incarnation of a process replaces an older one. Raises `ContractMismatch` (and closes the
        link) if the peer's contracts contradict ours, `LocalProtocolError` if it is linked already.
        """
        self._unrecorded("system.attach()")
        name, incarnation = link.peer.name, link.peer.incarnation
        if self._stopped:
            raise SystemStopped(f"the actor system of {self.name} has been stopped")
        known = self._peers.get(name)
        if name == self.name or (known is not None and known.incarnation >= incarnation):
            raise LocalProtocolError(f"{self.name} has a link to {name} already, incarnation {incarnation}")
        try:
            check_fingerprints(name, link.peer.contracts)
        except ZbmdError:
            link.close()
            raise
        if known is not None:
            known.close(PeerLost(name, f"replaced by incarnation {incarnation}"))
        peer = self._peers[name] = Peer(self, link, on_closed)
        for service in self._services.values():
            service.link_opening(name, incarnation)
        peer.open()
        if peer.lost is None:
            for service in self._services.values():
                service.link_up(name, incarnation)

    def admit(self, link: Link, name: str, on_closed: Callable[[ZbmdError | None], None]) -> bool:
        """Reach a process of no view of ours, and be reached; the system owns the link from now on.

        name: what we call it. Whether messages to it go over this link from now on: another may carry them.
        Raises as `attach`.
        """
        incarnation, known = link.peer.incarnation, self._peers.get(name)
        if self._stopped:
            raise SystemStopped(f"the actor system of {self.name} has been stopped")
        if name == self.name or (known is not None and known.incarnation > incarnation):
            raise LocalProtocolError(
                f"{self.name} is linked with a later incarnation of {name}, or is {name}"
            )
        check_fingerprints(name, link.peer.contracts)
        carries = known is None or known.incarnation < incarnation
        if known is not None and carries:
            known.close(PeerLost(name, f"replaced by incarnation {incarnation}"))
        peer = Peer(self, link, on_closed, external=name)
        if carries:
            self._peers[name] = peer
        else:
            self._spare.add(peer)
        peer.open()
        return carries

    def dismiss(self, process: str, incarnation: int, reason: str) -> None:
        """Close all links to that incarnation of a process outside of our views."""
        for peer in [*self._peers.values(), *self._spare]:
            if peer.is_external and (peer.name, peer.incarnation) == (process, incarnation):
                peer.close(PeerLost(process, reason))

    def detach(self, process: str, reason: str = "detached") -> None:
        """Close the link to a process, if there is one; monitors and links see its actors as lost."""
        self._unrecorded("system.detach()")
        peer = self._peers.get(process)
        if peer is not None:
            peer.close(PeerLost(process, reason))

    def peer(self, process: str) -> Peer | None:
        """Return the other end of the link to a process, if there is one."""
        return self._peers.get(process)

    @property
    def peers(self) -> dict[str, int]:
        """Attached processes by name, with their incarnations, but for those of no view of ours."""
        self._unrecorded("system.peers")
        return {name: peer.incarnation for name, peer in self._peers.items() if not peer.is_external}

    def linked(self) -> list[Peer]:
        """Return the other ends of all links, also of those to processes of no view of ours."""
        self._unrecorded("system.linked()")
        return [*self._peers.values(), *self._spare]

    # Monitors and links between actors.

    def monitor(self, ref: Ref, *, to: Ref | None = None) -> Monitor:
        """Report the end of `ref`, once: by `Monitor.down()`, and as a `Down` signal to the actor `to`."""
        tracer = self.tracer
        if tracer is None:
            return self._monitor(Monitor(ref, self.loop), to)
        return tracer.monitor(
            ref, to is not None, lambda: self._monitor(tracer.new_monitor(ref, self.loop), to)
        )

    def _monitor(self, monitor: Monitor, to: Ref | None) -> Monitor:

        def deliver(down: Down) -> None:
            monitor.deliver(down)
            cell = None if to is None else self.find(to.actor, to.incarnation)
            if cell is not None:
                cell.post(down)

        monitor.armed(self.watch(monitor.ref, deliver))
        return monitor

    def watch(self, ref: Ref, callback: Callable[[Down], None]) -> Callable[[], None]:
        """Call back once, never before this returns, when `ref` ends; returns what undoes it."""
        self._unrecorded("system.watch()")
        if ref.process != self.name:
            peer = self._peer_or_none(ref)
            if peer is not None:
                return peer.watch(ref, callback)
            if (routes := self.routes_to(ref.process)) is not None:
                return routes.watch(ref, callback)
            missing = Reason(ReasonKind.LOST, f"{self.name} has no link to that incarnation of {ref.process}")
            return self.loop.call_soon(callback, Down(ref, missing)).cancel
        cell = self._find_ref(ref)
        if cell is None:
            gone = Reason(ReasonKind.NO_ACTOR, "there is no such actor")
            return self.loop.call_soon(callback, Down(ref, gone)).cancel
        number = cell.watch(callback)
        if number < 0:
            raise TooManyPending(f"too many monitors on {ref!r}")
        watched = cell
        return lambda: watched.unwatch(number)

    def link(self, actor: Ref, other: Ref) -> None:
        """Link `actor`, of this process, with `other` (as Erlang's link/1).

        If `other` does not live, `actor` gets the exit signal at once. `other` must name one incarnation, as
        the references that `spawn` returns and messages carry do.
        """
        if self.tracer is None:
            self._link(actor, other)
        else:
            self.tracer.link(other, lambda: self._link(actor, other))

    def _link(self, actor: Ref, other: Ref) -> None:
        cell = self._find_ref(actor)
        if cell is None:
            raise DeadActor(f"{actor!r} does not live here")
        if not other.incarnation:
            raise LocalProtocolError(f"{other!r} names no incarnation to link with")
        if len(cell.links) >= LINKS_MAX:
            raise TooManyPending(f"{actor!r} has {LINKS_MAX} links")
        cell.links[other] = None
        if other.process == self.name:
            target = self._find_ref(other)
            if target is None:
                cell.exit_signal(other, Reason(ReasonKind.NO_ACTOR, "there is no such actor"))
            else:
                target.links[cell.ref] = None
        elif (peer := self._peer_or_none(other)) is None and (routes := self.routes_to(other.process)):
            routes.link(cell, other)
        elif peer is None:
            cell.exit_signal(other, Reason(ReasonKind.LOST, f"no link to {other.process}"))
        else:
            ours = cell.ref
            peer.post(wire.LinkActors(ours.actor, ours.incarnation, other.actor, other.incarnation))

    def unlink(self, actor: Ref, other: Ref) -> None:
        """Undo `link`."""
        if self.tracer is None:
            self._unlink(actor, other)
        else:
            self.tracer.unlink(other, lambda: self._unlink(actor, other))

    def _unlink(self, actor: Ref, other: Ref) -> None:
        cell = self._find_ref(actor)
        if cell is None or other not in cell.links:
            return
        del cell.links[other]
        if other.process == self.name:
            target = self._find_ref(other)
            if target is not None:
                target.links.pop(cell.ref, None)
        elif (peer := self._peer_or_none(other)) is not None:
            ours = cell.ref
            peer.post(wire.UnlinkActors(ours.actor, ours.incarnation, other.actor, other.incarnation))

    # For cells and peers.

    def cells(self) -> list[ActorCell]:
        """Return the cells that live. Thread-safe: the list is made in one step, under the GIL."""
        return list(self._cells.values())

    def forget(self, cell: ActorCell) -> None:
        """Forget an actor that has ended: its name is free."""
        if self._cells.get(cell.name) is cell:
            del self._cells[cell.name]

    def linger(self, task: asyncio.Task[None]) -> None:
        """Let `stop()` wait for the task of a killed actor."""
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)

    def peer_closed(self, peer: Peer) -> None:
        """Forget a closed link."""
        self._spare.discard(peer)
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            if not peer.is_external:
                for service in self._services.values():
                    service.link_down(peer.name, peer.incarnation)

    def exit_links_to(self, peer: Peer, reason: Reason) -> None:
        """Send exit signals from all actors of a lost process."""
        for cell in list(self._cells.values()):
            for other in [r for r in cell.links if r.process == peer.name]:
                if other.process_incarnation == peer.incarnation:
                    cell.exit_signal(other, reason)

    def send_exit(self, source: Ref, other: Ref, reason: Reason) -> None:
        """Send `other`, linked with `source`, the end of `source`."""
        if other.process == self.name:
            cell = self._find_ref(other)
            if cell is not None:
                cell.exit_signal(source, reason)
        elif (peer := self._peer_or_none(other)) is not None:
            data = wire.reason_data(reason)
            peer.post(wire.Exit(source.actor, source.incarnation, other.actor, other.incarnation, data))

    def bounced(self, ref: Ref, sender: str, contract: str, error: ActorError) -> None:
        """Report a rejected message to its sender, if that has a handler for the signal, else to the log."""
        if is_parting(contract):
            return
        self.undelivered += 1
        cell = self._cells.get(sender)
        if cell is not None and Undelivered in cell.handlers:
            cell.post(Undelivered(ref, contract, error))
        elif self.undelivered & (self.undelivered - 1) == 0:  # the 1st, 2nd, 4th, 8th …
            what = {"to": ref.address, "sender": sender, "contract": contract, "count": self.undelivered}
            _log.warning("message rejected", error=f"{type(error).__name__}: {error}", **what)
