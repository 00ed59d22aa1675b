"""Sending: tell, ask and tell_all, their envelopes and deadlines, and rings of asks, which no answer ends.

In a ring each actor waits for the next one's answer, and the last for the first one's. An actor handles one
message at a time, so none of them would ever answer. The stack of a waiting handler says whom it asks, so no
ask pays for being found: an ask of an actor that waits itself is looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from zbmd.actors.contracts import Contract, contract_tag
from zbmd.actors.core import wire
from zbmd.actors.core.cell import ActorCell
from zbmd.actors.core.context import current_cell, current_delivery
from zbmd.actors.core.native._asking import Asked, Asker, Asking, ask, deadline, envelope
from zbmd.actors.core.native._mailbox import Delivery, MailboxMemory
from zbmd.actors.core.native._serving import CellCore
from zbmd.actors.core.peer import Peer
from zbmd.actors.core.pools import Pools
from zbmd.actors.core.ref import Ref, at_home
from zbmd.actors.core.services import RouteService
from zbmd.actors.core.timers import DeadlineWheel, Expired
from zbmd.actors.errors import (
    ActorError,
    AskRing,
    DeadActor,
    MailboxFull,
    MailboxMemoryFull,
    SystemStopped,
)
from zbmd.transport.errors import DeadlineExceeded, PeerLost, ZbmdError

if TYPE_CHECKING:
    from zbmd.actors.core.native._serving import CellCore

AWAITS_MAX: Final = 256
"""Awaitables of a stack that are looked at."""
RING_MAX: Final = 64
"""Actors that are followed."""


def awaited_by(awaitable: Any) -> Iterator[Any]:
    """Yield a waiting awaitable and everything that it awaits in turn."""
    for _ in range(AWAITS_MAX):
        if awaitable is None:
            return
        yield awaitable
        # Of a future that is a task, say behind a shield, the task's coroutine is what goes on.
        inner = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
        awaitable = inner.get_coro() if isinstance(inner, asyncio.Task) else inner


def asks_of(task: asyncio.Task[Any]) -> Asking | None:
    """Return the ask whose answer a task waits for; None if it waits for no answer."""
    asking = [each for each in awaited_by(task.get_coro()) if isinstance(each, Asking) and each.cr_await]
    return asking[-1] if asking else None


def ring_closed_by(system: Messaging, asker: CellCore, asked: CellCore) -> list[str]:
    """Return the addresses of the ring that an ask would close, from the asker to itself; empty if none.

    asker: the actor whose handler asks, and waits for the answer.
    """
    path, cell = [str(asker.ref.address)], asked
    for _ in range(RING_MAX):
        path.append(cell.ref.address)
        if cell is asker:
            return path
        task = cell.task
        if task is None or getattr(task, "_fut_waiter", None) is None:
            return []  # it is idle, or goes on
        asking = asks_of(task)
        if asking is None or asking.ref.process != system.name:
            return []
        following = system.find(asking.ref.actor, asking.ref.incarnation)
        delivery = asking.delivery
        # What its receiver has put off may be answered while it is busy.
        if following is None or delivery is None or not (delivery.waits or following.current is delivery):
            return []
        cell = following
    return []


def described(path: list[str]) -> str:
    """Return what a ring is, and what to do."""
    do = "Send by tell what needs no answer, or put an answer off (`defer`)"
    if len(path) == 2:
        return f"{path[0]} asks itself, and would answer only after it has its own answer. {do}"
    links = ", which asks ".join(path[1:])
    return f"{path[0]} asks {links}: each would wait for the next one's answer for ever. {do}"


class Messaging(Asker):
    """The sending half of an actor system: its actors, its links, and the bound of waiting messages."""

    def __init__(self, name: str, incarnation: int, mailbox_bytes_max: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.loop = asyncio.get_running_loop()
        self.memory = MailboxMemory(mailbox_bytes_max, self._no_memory)
        self._peers: dict[str, Peer] = {}
        self.deadlines = DeadlineWheel(self.loop)
        self._stopped = False
        self.codec = wire.Codec(self._bind)
        self.pools = Pools(self.codec)
        """Runs the handlers that are declared with `pool=`."""
        self.scope = ""
        """The scope behind our name and those of our siblings elsewhere; see `zbmd.actors.core.ref`."""
        self.routes: RouteService | None = None
        """Makes links to processes beyond our views, if we are in a cluster."""
        self._spare: set[Peer] = set()
        """Further links to processes that there is one to already."""

    def serving(self, task: asyncio.Task[object]) -> ActorCell | None:
        """Return the actor that this task serves, if it does; may be called by any thread."""
        cell = self._cells.get(task.get_name())
        return cell if cell is not None and cell.is_served_by(task) else None

    def find(self, actor: str, incarnation: int) -> ActorCell | None:
        """Return the actor of that name, if it has that incarnation (0: any); it may be about to stop."""
        cell = self._cells.get(actor)
        if cell is None or (incarnation and incarnation != cell.ref.incarnation):
            return None
        return cell

    def _find_ref(self, ref: Ref) -> ActorCell | None:
        if ref.process_incarnation and ref.process_incarnation != self.incarnation:
            return None
        return self.find(ref.actor, ref.incarnation)

    async def tell_at_length(self, ref: Ref, message: Contract) -> None:
        """Send a message to another process, or one that cannot take the fast path."""
        trace_id, sender = self._envelope(message)
        if ref.process == self.name:
            cell = self._living(ref)
            delivery = Delivery(message, 0, trace_id, sender, None, None)
            if not cell.mailbox.offer(delivery):
                await self._tell_when_room(cell, delivery)
            elif cell.task is None:
                cell.wake()
            if self.has_told(cell):
                await asyncio.sleep(0)
        else:
            try:
                peer = self._peer(ref.process, ref.process_incarnation)
            except PeerLost:
                running = current_delivery.get()
                deadline_ns = 0 if running is None else running.deadline_ns
                peer = await self.reached(ref.process, ref.process_incarnation, deadline_ns)
            payload = wire.encode_tell(ref.actor, ref.incarnation, sender, message)
            if not peer.try_send(payload, trace_id):
                await peer.send(payload, trace_id)

    async def _ask_from_afar(self, ref: Ref, message: Contract, timeout: float | None) -> Any:
        """Ask an actor of a process to which there is no link yet."""
        deadline_ns, _ = self._deadline(timeout, ref)
        await self.reached(ref.process, ref.process_incarnation, deadline_ns)
        left_s = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        return await self._ask_when_taken(ask(self, ref, message, left_s), ref, message)

    async def _ask_when_taken(self, asked: Asked, ref: Ref, message: Contract) -> Any:
        """Return the answer to an ask that may have to wait for room."""
        try:
            if asked.waits:
                await self._until_taken(asked)
            return await asked.future
        except BaseException as error:
            told = self._ask_failed(asked, ref, message, error)
            if told is not None:
                raise told from None
            raise
        finally:
            asked.over()

    def _ask_failed(
        self, asked: Asked, ref: Ref, message: Contract, error: BaseException
    ) -> DeadlineExceeded | None:
        """Give an ask up; return the error for its asker, if it is another one."""
        self._forget_ask(asked)
        if isinstance(error, asyncio.CancelledError):
            if asked.peer is not None:
                asked.peer.withdraw(ref, asked.call)
            elif asked.cell is not None:
                asked.cell.withdraw(asked.delivery.reply_to)
        if isinstance(error, Expired):
            what = f"{ref!r} did not answer {contract_tag(message)} within {asked.timeout_ns / 1e9:g} s"
            return DeadlineExceeded(what)
        return None

    @staticmethod
    def _forget_ask(asked: Asked) -> None:
        """Drop the ask's future: neither a result nor an error of it may surface later."""
        asked.over()
        if not asked.future.done():
            asked.future.cancel()
        elif not asked.future.cancelled():
            asked.future.exception()

    async def _until_taken(self, asked: Asked) -> None:
        """Wait for room in the mailbox, or on the link."""
        if asked.peer is not None:
            await asked.peer.send_before(asked.payload, asked.delivery.trace_id, asked.future)
        elif asked.cell is not None:
            await self._wait_for_room(asked.cell, asked.delivery, asked.deadline_ns, asked.timeout_ns)

    async def tell_all(self, refs: Sequence[Ref], message: Contract) -> dict[Ref, ZbmdError]:
        """Tell many the same message; returns those to whom it could not be sent, and why.

        It is encoded once, and a process gets it once for all its actors. Order is kept as by `tell`, with
        which it may be mixed. Waits while a local mailbox or a link is full, for the others first.
        """
        if self.tracer is not None:
            return await self.tracer.tell_all(refs, message, lambda: self._tell_all(refs, message))
        return await self._tell_all(refs, message)

    async def _tell_all(self, refs: Sequence[Ref], message: Contract) -> dict[Ref, ZbmdError]:
        trace_id, sender = self._envelope(message)
        failed: dict[Ref, ZbmdError] = {}
        full: list[tuple[Ref, ActorCell, Delivery]] = []
        remote: dict[tuple[str, int], list[Ref]] = {}
        for ref in refs:
            if ref.process != self.name:
                remote.setdefault((ref.process, ref.process_incarnation), []).append(ref)
                continue
            delivery = Delivery(message, 0, trace_id, sender, None, None)
            try:
                cell = self._living(ref)
                if cell.mailbox.offer(delivery):
                    cell.wake()
                else:
                    full.append((ref, cell, delivery))
            except (ActorError, SystemStopped) as error:
                failed[ref] = error
        if remote:
            await self._tell_all_remote(remote, sender, message, trace_id, failed)
        for ref, cell, delivery in full:
            try:
                await self._tell_when_room(cell, delivery)
            except (ActorError, DeadlineExceeded) as error:
                failed[ref] = error
        return failed

    async def _tell_all_remote(
        self,
        remote: dict[tuple[str, int], list[Ref]],
        sender: str,
        message: Contract,
        trace_id: int,
        failed: dict[Ref, ZbmdError],
    ) -> None:
        body = wire.encode_body(message)
        for (process, incarnation), refs in remote.items():
            for first in range(0, len(refs), wire.TELL_ALL_ADDRESSEES_MAX):
                some = refs[first : first + wire.TELL_ALL_ADDRESSEES_MAX]
                try:
                    try:
                        peer = self._peer(process, incarnation)
                    except PeerLost:
                        peer = await self.reached(process, incarnation, 0)
                    payload = wire.encode_tell_all(
                        [(r.actor, r.incarnation) for r in some], sender, message, body
                    )
                    await peer.send(payload, trace_id)
                except (ActorError, PeerLost) as error:
                    failed.update(dict.fromkeys(some, error))

    async def _tell_when_room(self, cell: ActorCell, delivery: Delivery) -> None:
        running = current_delivery.get()
        deadline_ns = 0 if running is None else running.deadline_ns
        try:
            await self._wait_for_room(cell, delivery, deadline_ns, max(0, deadline_ns - time.monotonic_ns()))
        except Expired:
            raise DeadlineExceeded(f"{cell.ref!r} had no room for {contract_tag(delivery.message)}") from None

    async def _wait_for_room(
        self, cell: ActorCell, delivery: Delivery, deadline_ns: int, timeout_ns: int
    ) -> None:
        if current_cell.get() is cell:
            raise MailboxFull(f"{cell.ref!r} cannot wait for room in its own mailbox")
        room: asyncio.Future[None] = self.loop.create_future()
        cell.mailbox.wait(delivery, room)
        if not deadline_ns:
            await room
            return
        bucket = self.deadlines.add(room, deadline_ns, timeout_ns)
        try:
            await room
        finally:
            self.deadlines.remove(room, bucket)

    # Processes beyond our views.

    async def reached(self, process: str, incarnation: int, deadline_ns: int) -> Peer:
        """Return the link to a process outside of our views, made if needed. Raises as `reach_by`."""
        routes = self.routes_to(process)
        if routes is not None:
            await routes.reach_by(process, incarnation, deadline_ns)
        return self._peer(process, incarnation)

    def routes_to(self, process: str) -> RouteService | None:
        """Return the service that makes links to that process, if there is one."""
        return self.routes if self.routes is not None and self.routes.leads_to(process) else None

    def _bind(self, data: wire.RefData) -> Ref:
        process = at_home(data.process, self.scope) if self.scope else data.process
        return Ref(self, process, data.process_incarnation, data.actor, data.incarnation)

    def _envelope(self, message: object) -> tuple[int, str]:
        """Return trace id and sender's name of a message sent here and now."""
        return envelope(self, message)

    def _deadline(self, timeout: float | None, whom: object) -> tuple[int, int]:
        """Return (deadline, time left), ns: the earlier of the given timeout and the inherited deadline."""
        running = current_delivery.get()
        return deadline(timeout, 0 if running is None else running.deadline_ns, whom)

    def _check_ring(self, asked: CellCore) -> None:
        """Raise `AskRing` if an ask, made here and now, closes a ring. asked: is busy."""
        asker = current_cell.get()
        # What a handler asks in a task of its own may be answered after it has ended.
        if asker is not None and asker.task is not None and asker.task is asyncio.current_task():
            ring = ring_closed_by(self, asker, asked)
            if ring:
                raise AskRing(described(ring))

    def _no_memory(self, nbytes: int) -> ActorError:
        """Return the refusal of a message of that size."""
        cells = self._cells.values()
        biggest = max(cells, key=lambda cell: cell.mailbox.nbytes, default=None)
        most = "" if biggest is None else f"; {biggest.ref.address} holds {biggest.mailbox.nbytes:,} of them"
        memory = self.memory
        return MailboxMemoryFull(
            f"{memory.used:,} bytes wait in the mailboxes of {self.name}, {nbytes:,} more would pass "
            f"the bound of {memory.bound:,}{most}"
        )

    def _living(self, ref: Ref) -> ActorCell:
        cell = self._cells.get(ref.actor)
        if (
            cell is None
            or not cell.accepts
            or (ref.incarnation and ref.incarnation != cell.incarnation)
            or (ref.process_incarnation and ref.process_incarnation != self.incarnation)
        ):
            if self._stopped:
                raise SystemStopped(f"the actor system of {self.name} has been stopped")
            raise DeadActor(f"{ref!r} does not live")
        return cell

    def _peer_or_none(self, ref: Ref) -> Peer | None:
        peer = self._peers.get(ref.process)
        if peer is None or (ref.process_incarnation and ref.process_incarnation != peer.incarnation):
            return None
        return peer

    def _peer(self, process: str, incarnation: int) -> Peer:
        peer = self._peers.get(process)
        if peer is None:
            if self._stopped:
                raise SystemStopped(f"the actor system of {self.name} has been stopped")
            raise PeerLost(process, f"{self.name} has no link to it")
        if incarnation and incarnation != peer.incarnation:
            if incarnation < peer.incarnation:
                raise DeadActor(f"{process} is now incarnation {peer.incarnation}, not {incarnation}")
            raise PeerLost(process, f"{self.name} has no link to its incarnation {incarnation} yet")
        return peer
