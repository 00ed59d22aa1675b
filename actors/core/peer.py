"""One attached link: what we wait for from that process, and what it asks of ours."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, assert_never

from zbmd.actors.contracts import Contract, contract_tag
from zbmd.actors.core import wire
from zbmd.actors.core.actor_base import (
    ActorBase,
    find_remote_class,
    import_remote_class,
    may_import_for_peers,
)
from zbmd.actors.core.cell import LINKS_MAX, ActorCell, CellSystem
from zbmd.actors.core.native._asking import TIMEOUT_NS_MAX as TIMEOUT_NS_MAX
from zbmd.actors.core.native._asking import PeerCore
from zbmd.actors.core.native._asking import RemoteReply as RemoteReply
from zbmd.actors.core.native._mailbox import Delivery
from zbmd.actors.core.ref import Down, Reason, ReasonKind, Ref, abroad, at_home, scope_of
from zbmd.actors.errors import (
    ActorError,
    ActorStartFailed,
    TooManyPending,
    UnknownActorClass,
    error_from_wire,
)
from zbmd.transport.errors import (
    LinkClosed,
    LinkFull,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    ZbmdError,
)
from zbmd.transport.link.base import LinkSide
from zbmd.transport.link.interface import Link

OUTBOX_FRAMES_MAX = 65_536
"""Replies and signals that wait for room on the link; past it the link is closed: its peer does not read."""
WATCHES_MAX = 65_536
SPAWNS_PENDING_MAX = 1024


class PeerSystem(CellSystem, Protocol):
    """The part of an actor system that its peers use."""

    @property
    def name(self) -> str: ...
    @property
    def scope(self) -> str: ...
    @property
    def codec(self) -> wire.Codec: ...
    def find(self, actor: str, incarnation: int) -> ActorCell | None: ...
    def create_child(
        self, cls: type[ActorBase], args: Sequence[Any], *, name: str | None, parent: Ref | None
    ) -> ActorCell: ...
    async def until_started(self, cell: ActorCell) -> Ref: ...
    def exit(self, ref: Ref, reason: Reason) -> None: ...
    def exit_links_to(self, peer: Peer, reason: Reason) -> None: ...
    def peer_closed(self, peer: Peer) -> None: ...


class Peer(PeerCore):
    """The other end of a link."""

    def __init__(
        self,
        system: PeerSystem,
        link: Link,
        on_closed: Callable[[ZbmdError | None], None] | None,
        *,
        external: str | None = None,
    ) -> None:
        self.name = link.peer.name if external is None else external
        self.is_external = external is not None
        """Of no view of ours: its references are put into our words."""
        self.incarnation = link.peer.incarnation
        self.link = link
        self.lost: PeerLost | None = None
        self._system: PeerSystem = system
        self._codec = system.codec if external is None else wire.Codec(self._bind)
        self._on_closed = on_closed
        self._watches: dict[int, tuple[Ref, Callable[[Down], None]]] = {}
        self._next_watch = 0
        self._watched: dict[int, tuple[ActorCell, int]] = {}
        self._spawns: dict[int, asyncio.Task[None]] = {}
        self._spawned: dict[int, ActorCell] = {}
        """Living actors that the peer spawned here, by call; as many as there can be actors."""
        self._outbox: deque[tuple[wire.Payload, int, asyncio.Future[None] | None]] = deque()
        self._flush: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to receive."""
        self.link.on_closed = self._link_closed
        if isinstance(self.link, LinkSide):
            self.link.give_pieces()
            self.link.deliver_to(self)
        else:
            self.link.on_frame = self._on_frame

    def ref(self, actor: str, incarnation: int) -> Ref:
        """Return a reference to one of the peer's actors."""
        return Ref(self._system, self.name, self.incarnation, actor, incarnation)

    def _bind(self, data: wire.RefData) -> Ref:
        there = abroad(data.process, scope_of(self.name))
        process = at_home(there, self._system.scope)
        return Ref(self._system, process, data.process_incarnation, data.actor, data.incarnation)

    # Sending.

    async def send(self, payload: wire.Payload, trace_id: int = 0) -> None:
        """Send, waiting for room in turn. Raises `PeerLost`, or `TooManyPending` if too many wait."""
        if not self.try_send(payload, trace_id):
            await self._enqueue(payload, trace_id)

    async def send_before(self, payload: wire.Payload, trace_id: int, gives_up: asyncio.Future[Any]) -> None:
        """As `send`, but wait no longer than until `gives_up` is done."""
        if self.try_send(payload, trace_id):
            return
        sent = self._enqueue(payload, trace_id)
        try:
            await asyncio.wait((sent, gives_up), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not sent.cancel() and not sent.cancelled():
                sent.result()

    def _enqueue(self, payload: wire.Payload, trace_id: int) -> asyncio.Future[None]:
        if self.lost is not None:
            raise self.lost
        if len(self._outbox) >= OUTBOX_FRAMES_MAX:
            raise TooManyPending(f"{OUTBOX_FRAMES_MAX} frames wait for room on the link to {self.name}")
        sent: asyncio.Future[None] = self._system.loop.create_future()
        self._outbox.append((payload, trace_id, sent))
        self._start_flush()
        return sent

    def post(self, envelope: wire.Envelope) -> None:
        """Send without waiting: in order, from a bounded outbox if need be."""
        self.post_payload(wire.encode(envelope))

    async def _answer_later(self, payload: wire.Payload) -> None:
        try:
            await self.send(payload)
        except PeerLost:
            return  # there is nobody left to tell

    def fail_call(self, call: int, error: ActorError) -> None:
        """Answer an ask with an error."""
        self.post(wire.Fail(call, error.code, str(error)[: wire.TEXT_CHARS_MAX]))

    def bounce(self, to: str, incarnation: int, sender: str, contract: str, error: ActorError) -> None:
        """Tell the peer that a message it told was rejected."""
        text = str(error)[: wire.TEXT_CHARS_MAX]
        self.post(wire.Bounce(to, incarnation, sender, contract[:256], error.code, text))

    def post_payload(self, payload: wire.Payload) -> None:
        """As `post`, of what is encoded already."""
        if self.lost is not None:
            return
        try:
            if self.try_send(payload):
                return
        except PeerLost:
            return
        if len(self._outbox) >= OUTBOX_FRAMES_MAX:
            self.close(RemoteProtocolError(f"{self.name} leaves {OUTBOX_FRAMES_MAX} frames unread"))
            return
        self._outbox.append((payload, 0, None))
        self._start_flush()

    def _start_flush(self) -> None:
        if self._flush is None:
            self._flush = self._system.loop.create_task(self._flush_outbox(), name=f"flush to {self.name}")

    async def _flush_outbox(self) -> None:
        """Send what waits, in order; `_link_closed` clears what is left when the link ends."""
        try:
            while self._outbox:
                payload, trace_id, sent = self._outbox[0]
                if sent is None or not sent.done():  # else its sender has given up
                    try:
                        self.link.send(payload, trace_id=trace_id)
                    except LinkFull:
                        await self.link.writable()
                        continue
                    except LocalProtocolError as error:
                        if sent is None:
                            raise
                        sent.set_exception(error)
                        sent = None
                    if sent is not None:
                        sent.set_result(None)
                self._outbox.popleft()
        except LinkClosed as error:
            self._link_closed(error)
        finally:
            self._flush = None

    # What we wait for.

    def withdraw(self, ref: Ref, call: int) -> None:
        """The ask of that number, to `ref`, has been given up."""
        if self.lost is None:
            self.post(wire.Withdraw(call, ref.actor, ref.incarnation))

    def unspawn(self, call: int, future: asyncio.Future[Any]) -> None:
        """Give up a spawn: what came or will come of it ends, so that nobody is left who knows no parent."""
        self._calls.pop(call, None)
        if not future.done():
            future.cancel()
        if not future.cancelled() and future.exception() is None:
            self._system.exit(future.result(), Reason(ReasonKind.KILLED, "its spawner has given up"))
        elif self.lost is None:
            # Also when the call is closed: the answer may have come when nobody took it any more. A spawn
            # that has failed there is not known there, and nothing follows.
            self.post(wire.Unspawn(call))

    def watch(self, ref: Ref, callback: Callable[[Down], None]) -> Callable[[], None]:
        """Monitor an actor of the peer; returns what undoes it. Raises `TooManyPending`."""
        if len(self._watches) >= WATCHES_MAX:
            raise TooManyPending(f"{WATCHES_MAX} monitors on actors of {self.name}")
        self._next_watch += 1
        number = self._next_watch
        self._watches[number] = (ref, callback)
        self.post(wire.Watch(number, ref.actor, ref.incarnation))

        def cancel() -> None:
            if self._watches.pop(number, None) is not None:
                self.post(wire.Unwatch(number))

        return cancel

    # The end.

    def close(self, error: ZbmdError | None) -> None:
        """End the link from this side; everything that waits for the peer fails with `PeerLost`."""
        self._link_closed(error)
        self.link.close()

    def _link_closed(self, error: ZbmdError | None) -> None:
        if self.lost is not None:
            return
        reason = error.reason if isinstance(error, PeerLost) else str(error or "the link was closed")
        lost = self.lost = PeerLost(self.name, reason)
        self._system.peer_closed(self)
        if self._flush is not None:
            self._flush.cancel()
        outbox, self._outbox = self._outbox, deque()
        for _, _, sent in outbox:
            if sent is not None and not sent.done():
                sent.set_exception(PeerLost(self.name, reason))
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            if not future.done():
                future.set_exception(PeerLost(self.name, reason))
        for cell, number in self._watched.values():
            cell.unwatch(number)
        self._watched.clear()
        for task in self._spawns.values():
            task.cancel()
        self._spawned.clear()
        watches, self._watches = self._watches, {}
        ended = Reason(ReasonKind.LOST, str(lost))
        for ref, callback in watches.values():
            callback(Down(ref, ended))
        self._system.exit_links_to(self, ended)
        if self._on_closed is not None:
            self._on_closed(error)

    # Receiving. Errors raised here end the link.

    def _on_rarer(self, envelope: wire.Envelope, trace_id: int) -> None:
        match envelope:
            case wire.Fail():
                self._on_fail(envelope)
            case wire.Bounce():
                error = error_from_wire(envelope.code, envelope.text)
                ref = self.ref(envelope.to, envelope.incarnation)
                self._system.bounced(ref, envelope.sender, envelope.contract, error)
            case wire.Watch():
                self._on_watch(envelope)
            case wire.Unwatch():
                watched = self._watched.pop(envelope.watch, None)
                if watched is not None:
                    watched[0].unwatch(watched[1])
            case wire.ActorEnded():
                self._on_ended(envelope)
            case wire.LinkActors():
                self._on_link(envelope)
            case wire.UnlinkActors() | wire.Exit() | wire.Stop():
                self._on_life(envelope)
            case wire.Spawn():
                self._on_spawn(envelope)
            case wire.Unspawn():
                self._on_unspawn(envelope)
            case wire.Withdraw():
                cell = self._find(envelope.to, envelope.incarnation)
                if cell is not None:
                    cell.withdraw(RemoteReply(self, envelope.call))
            case wire.TellAll():
                self._on_tell_all(envelope, trace_id)
            case wire.Ask() | wire.Reply() | wire.Tell():
                raise LocalProtocolError(f"{type(envelope).__name__} is none of the rarer envelopes")
            case _:
                assert_never(envelope)

    def _on_tell_all(self, m: wire.TellAll, trace_id: int) -> None:
        message: Contract | None = None
        for to, incarnation in m.to:
            tag = "unknown"
            try:
                if message is None:
                    message = self._codec.decode_contract(m.body)
                tag = contract_tag(message)
                self._deliver(to, incarnation, Delivery(message, 0, trace_id, m.sender, self, None))
            except ActorError as error:
                self.bounce(to, incarnation, m.sender, tag, error)

    def _on_fail(self, m: wire.Fail) -> None:
        call = self._calls.pop(m.call, None)
        if call is not None and not call[0].done():
            call[0].set_exception(error_from_wire(m.code, m.text))

    def _on_watch(self, m: wire.Watch) -> None:
        if m.watch in self._watched:
            raise RemoteProtocolError(f"{self.name} used the monitor number {m.watch} twice")
        cell = self._find(m.to, m.incarnation)
        number = -1

        def ended(down: Down) -> None:
            self._watched.pop(m.watch, None)
            self.post(wire.ActorEnded(m.watch, down.ref.incarnation, wire.reason_data(down.reason)))

        if cell is not None and len(self._watched) < WATCHES_MAX:
            number = cell.watch(ended)
        if cell is None or number < 0:
            what = "there is no such actor" if cell is None else "too many monitors"
            reason = wire.ReasonData(ReasonKind.NO_ACTOR, what)
            self.post(wire.ActorEnded(m.watch, m.incarnation, reason))
        else:
            self._watched[m.watch] = (cell, number)

    def _on_ended(self, m: wire.ActorEnded) -> None:
        watch = self._watches.pop(m.watch, None)
        if watch is not None:
            ref, callback = watch
            callback(Down(self.ref(ref.actor, m.incarnation), Reason(m.reason.kind, m.reason.text)))

    def _on_link(self, m: wire.LinkActors) -> None:
        cell = self._find(m.to, m.incarnation)
        if cell is None or len(cell.links) >= LINKS_MAX:
            reason = wire.ReasonData(ReasonKind.NO_ACTOR, "there is no such actor, or it has too many links")
            self.post(wire.Exit(m.to, m.incarnation, m.source, m.source_incarnation, reason))
        else:
            cell.links[self.ref(m.source, m.source_incarnation)] = None

    def _on_life(self, m: wire.UnlinkActors | wire.Exit | wire.Stop) -> None:
        cell = self._find(m.to, m.incarnation)
        if cell is None:
            return
        match m:
            case wire.UnlinkActors():
                cell.links.pop(self.ref(m.source, m.source_incarnation), None)
            case wire.Exit():
                source = self.ref(m.source, m.source_incarnation)
                cell.exit_signal(source, Reason(m.reason.kind, m.reason.text))
            case wire.Stop():
                cell.request_stop(Reason(m.reason.kind, m.reason.text))
            case _:
                assert_never(m)

    def _on_spawn(self, m: wire.Spawn) -> None:
        if m.call in self._spawns or m.call in self._spawned:
            raise RemoteProtocolError(f"{self.name} used the call number {m.call} of a spawn twice")
        cls = find_remote_class(m.class_id)
        if cls is None and not may_import_for_peers(m.class_id):
            known = f"{self._system.name} has no actor class {m.class_id} with remote=True"
            self.fail_call(m.call, UnknownActorClass(f"{known}; is its module imported there?"))
        elif len(self._spawns) >= SPAWNS_PENDING_MAX:
            self.fail_call(m.call, TooManyPending(f"{SPAWNS_PENDING_MAX} spawns are under way"))
        else:
            task = self._system.loop.create_task(self._spawn(cls, m))
            self._spawns[m.call] = task
            task.add_done_callback(lambda _: self._spawns.pop(m.call, None))

    def _on_unspawn(self, m: wire.Unspawn) -> None:
        spawned, task = self._spawned.get(m.call), self._spawns.get(m.call)
        if spawned is not None:
            spawned.kill(Reason(ReasonKind.KILLED, "its spawner has given up"))
        elif task is not None:
            task.cancel()

    async def _spawn(self, cls: type[Any] | None, m: wire.Spawn) -> None:
        parent = None if m.parent is None else self.ref(m.parent.actor, m.parent.incarnation)
        try:
            async with asyncio.timeout(min(m.timeout_ns, TIMEOUT_NS_MAX) / 1e9):
                if cls is None:
                    found = await asyncio.to_thread(import_remote_class, m.class_id)
                else:
                    found = cls
                cell = self._system.create_child(found, m.arguments, name=m.name or None, parent=parent)
                self._spawned[m.call] = cell
                cell.watch(partial(self._spawned_ended, m.call))
                ref = await self._system.until_started(cell)
        except (Exception, asyncio.CancelledError) as error:
            text = f"{m.class_id}: {type(error).__name__}: {error}"
            self.fail_call(m.call, error if isinstance(error, ActorError) else ActorStartFailed(text))
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        await self._answer_later(wire.encode_reply(m.call, ref))

    def _spawned_ended(self, call: int, _: Down) -> None:
        self._spawned.pop(call, None)

    def _find(self, actor: str, incarnation: int) -> ActorCell | None:
        return self._system.find(actor, incarnation)
