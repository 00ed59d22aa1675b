"""The runtime of one actor: its mailbox, the task that serves it, and its end."""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from zbmd.actors.contracts import Contract, contract_tag
from zbmd.actors.core.actor_base import ActorBase, Handler, MailboxSpec, handler_table
from zbmd.actors.core.context import DeferredBook, DeferredReply, ReplyTo, current_cell, current_delivery
from zbmd.actors.core.native._mailbox import SIGNALS_MAX, Delivery, Mailbox
from zbmd.actors.core.native._serving import CellCore, Serving
from zbmd.actors.core.ref import Down, Exited, Messenger, Reason, ReasonKind, Ref, Signal
from zbmd.actors.core.timers import TimerBook
from zbmd.actors.errors import ActorError, ActorFailed, ActorStartFailed, NotUnderstood, StashFull
from zbmd.transport.errors import LocalProtocolError

if TYPE_CHECKING:
    from random import Random

    from zbmd.actors.core.native._mailbox import MailboxMemory

LINKS_MAX = 65_536
WATCHERS_MAX = 65_536
TAGS_NAMED_MAX = 8

_log = structlog.get_logger("zbmd.actors")


class Boundary:
    """Something to be done between two messages of an actor; waits among its signals."""

    __slots__ = ("work",)

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work


class CellState(Enum):
    """The state of one incarnation of an actor."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DEAD = "dead"


class CellSystem(Messenger, Protocol):
    """The part of an actor system that its cells use."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def memory(self) -> MailboxMemory: ...
    def forget(self, cell: ActorCell) -> None: ...
    def linger(self, task: asyncio.Task[None]) -> None: ...
    def send_exit(self, source: Ref, other: Ref, reason: Reason) -> None: ...
    def bounced(self, ref: Ref, sender: str, contract: str, error: ActorError) -> None: ...


class ActorCell(CellCore):
    """One incarnation of one actor. `task` is set while it starts, has messages to handle, or stops."""

    __slots__ = (
        "_context",
        "_deferred",
        "_end",
        "_next_watch",
        "_timers",
        "_watchers",
        "links",
        "parent",
        "random",
        "ready",
        "state",
    )

    def __init__(
        self, system: CellSystem, actor: ActorBase, ref: Ref, spec: MailboxSpec, parent: Ref | None
    ) -> None:
        self.system: CellSystem = system
        self.actor = actor
        self.ref = ref
        self.name = ref.actor
        self.incarnation = ref.incarnation
        self.mailbox = Mailbox(spec.capacity, system.memory)
        self.handlers = handler_table(type(actor))
        self.parent = parent
        self.state = CellState.STARTING
        self.random: Random | None = None
        self.links: dict[Ref, None] = {} if parent is None else {parent: None}
        """In the order in which they were made, which is that of exit signals."""
        self.ready: asyncio.Future[None] | None = system.loop.create_future()
        """The future that its spawner awaits. None once it runs, to keep an idle actor small."""
        self._end: asyncio.Future[Reason] | None = None
        self._watchers: dict[int, Callable[[Down], None]] | None = None
        self._next_watch = 0
        self._deferred: DeferredBook | None = None
        self._timers: TimerBook | None = None
        # One context for all tasks of this incarnation: the sender that wakes it lends it nothing of its own.
        self._context = copy_context()
        self._context.run(current_cell.set, self)
        self._context.run(current_delivery.set, None)
        self.task = self._new_task()

    def _new_task(self) -> asyncio.Task[None]:
        return self.system.loop.create_task(self._run(), name=self.name, context=self._context)

    @property
    def is_alive(self) -> bool:
        """Return whether this incarnation has not ended."""
        return self.state is not CellState.DEAD

    def is_served_by(self, task: asyncio.Task[object]) -> bool:
        """Return whether the task is the one that serves the mailbox."""
        return self.task is task

    def words(self) -> str:
        """Return its state and counts as text."""
        return f"{self.state.value}, {len(self.mailbox)} waiting, {self.handled} handled"

    def at_boundary(self, work: Callable[[], None]) -> None:
        """Do `work` when no message is being handled: now, or before the next. Not if it ends first."""
        if not self.accepts:
            return
        if self.task is None:
            work()
        elif not self.mailbox.post(Boundary(work)):
            self.kill(Reason(ReasonKind.KILLED, f"{SIGNALS_MAX} signals wait for it; is a handler stuck?"))

    # Signals and ends.

    def post(self, signal: Signal) -> None:
        """Put a signal before all messages, if the actor has a handler for it."""
        if not self.accepts or type(signal) not in self.handlers:
            return
        if self.mailbox.post(signal):
            self.wake()
        else:
            self.kill(Reason(ReasonKind.KILLED, f"{SIGNALS_MAX} signals wait for it; is a handler stuck?"))

    def exit_signal(self, source: Ref, reason: Reason) -> None:
        """Handle the end of a linked actor."""
        if source not in self.links:
            return
        del self.links[source]
        if source == self.parent:
            self.kill(Reason(ReasonKind.KILLED, f"its supervisor {source.address} ended: {reason}"))
        elif self.actor.trap_exit:
            self.post(Exited(source, reason))
        elif reason.kind is not ReasonKind.NORMAL:
            self.request_stop(Reason(reason.kind, f"linked {source.address} ended: {reason}"))

    def request_stop(self, reason: Reason) -> None:
        """End after the current message; what waits in the mailbox is rejected. The first reason holds."""
        if reason.kind is ReasonKind.KILLED:
            self.kill(reason)
        elif self._stop is None and self.accepts:
            self._stop = reason
            self.wake()

    def kill(self, reason: Reason) -> None:
        """End now: no `stopping()`, the current handler is cancelled."""
        if self.state is CellState.DEAD:
            return
        task = self.task or self._resting
        if self.traced is not None:
            self.traced.killed(reason)
        self._finish(reason)
        if task is not None:
            task.cancel()
            self.system.linger(task)

    def watch(self, callback: Callable[[Down], None]) -> int:
        """Call back once at the end; returns a number for `unwatch`, or -1 if too many watch."""
        if self._watchers is None:
            self._watchers = {}
        elif len(self._watchers) >= WATCHERS_MAX:
            return -1
        self._next_watch += 1
        self._watchers[self._next_watch] = callback
        return self._next_watch

    def unwatch(self, number: int) -> None:
        """Undo `watch`."""
        if self._watchers is not None:
            self._watchers.pop(number, None)

    def end(self) -> asyncio.Future[Reason]:
        """Return a future, done when the actor has ended. Shield it: to cancel it ends all waits."""
        if self._end is None:
            self._end = self.system.loop.create_future()
            if self.state is CellState.DEAD:
                self._end.set_result(Reason(ReasonKind.NO_ACTOR, "it had ended"))
        return self._end

    # What the actor does with its messages.

    def handling(self, what: str) -> Delivery:
        """Return the message that is handled here and now. Raises `LocalProtocolError` if there is none."""
        delivery = current_delivery.get()
        if delivery is None or delivery is not self.current or current_cell.get() is not self:
            raise LocalProtocolError(f"{what} outside of a running handler of {self.ref.address}")
        return delivery

    @property
    def deferred(self) -> DeferredBook:
        """Return the answers it owes."""
        if self._deferred is None:
            self._deferred = DeferredBook(self)
        return self._deferred

    @property
    def timers(self) -> TimerBook:
        """Return its timers."""
        if self._timers is None:
            self._timers = TimerBook(self)
        return self._timers

    def stash(self) -> None:
        """Stash the current message. Raises `StashFull`."""
        delivery = self.handling("stash()")
        if not self.mailbox.stash(delivery):
            raise StashFull(f"{self.ref.address} has put {self.mailbox.stashed} messages aside")
        if self.traced is not None:
            self.traced.stashes()
        self.current = None

    def unstash(self) -> None:
        """Unstash: handle all stashed messages before those that wait."""
        traced = self.traced
        if traced is not None:
            traced.unstashes()
        if traced is not None and traced.replays:
            self.mailbox.forget_stash()
        elif self.mailbox.unstash():
            self.wake()

    # Askers that give up.

    def withdraw(self, reply_to: ReplyTo | None) -> None:
        """Withdraw an ask that was given up: its message is not handled, or its handler is cancelled."""
        current = self.current
        if reply_to is None:
            return
        if current is None or current.reply_to is None or current.reply_to != reply_to:
            self.mailbox.withdraw(reply_to)
        elif self._withdrawn is None:
            if self.traced is not None:
                self.traced.withdrawn()
            self.withdraw_current()

    def withdraw_current(self) -> None:
        """Cancel the handler of the current message; the actor lives on."""
        if self.task is not None and self.current is not None:
            self._withdrawn = self.current
            self.task.cancel()

    def is_withdrawn(self) -> bool:
        """Return whether the current handler was cancelled for want of an asker, and reset that."""
        withdrawn, self._withdrawn = self._withdrawn, None
        if withdrawn is None or self.state is CellState.DEAD:
            return False
        self.current = None
        if self.task is not None:
            self.task.uncancel()
        if self.traced is not None:
            self.traced.settle()
        return True

    # The task.

    async def _run(self) -> None:
        try:
            if self.state is CellState.STARTING:
                starting = self.actor.started()
                await (starting if self.traced is None else self.traced.started(starting))
                self.state = CellState.RUNNING
                ready, self.ready = self.ready, None
                if ready is not None and not ready.done():
                    ready.set_result(None)
            await self._serve()
            reason = self._stop
        except asyncio.CancelledError:
            if self.state is CellState.DEAD or self.task is not asyncio.current_task():
                raise  # killed, or cancelled by the loop's end while it rested
            reason = Reason(ReasonKind.FAILED, "its handler was cancelled")
        except Exception as error:  # noqa: BLE001 (let it crash: the reason goes to all who are tied to it)
            reason = Reason(ReasonKind.FAILED, f"{type(error).__name__}: {error}")
            self._log_error("actor failed", error)
        except SystemExit as error:  # it is the actor that exits, not the process of all others
            reason = _exit_reason(error)
            if reason.is_normal:
                _log.info("actor exited", actor=self.ref.address, reason=reason.text)
            else:
                self._log_error("actor exited", error, reason=reason.text)
        except BaseException as error:
            self._finish(Reason(ReasonKind.FAILED, f"{type(error).__name__}: {error}"))
            raise
        if reason is None:
            self.task = None
            self.mailbox.rest()
        else:
            if self.traced is not None and self._stop is not reason:
                self.traced.failed(reason)
            await self._stop_and_finish(reason)

    async def _serve(self) -> None:
        """Handle signals and messages until there are none, or a stop is requested."""
        serving = Serving(self)
        while self._stop is None:
            try:
                room = await serving
            except asyncio.CancelledError:
                if self.is_withdrawn():
                    continue
                raise
            if room is None:
                return
            if room is not False:
                await room
            elif serving.is_over():
                await asyncio.sleep(0)
            elif self._stop is None:
                await self._serve_one()

    async def _serve_one(self) -> None:
        """Handle the next signal or message, whatever is special about it."""
        traced, signals = self.traced, self.mailbox.signals
        if signals:
            signal = signals.popleft()
            current_delivery.set(None)
            if type(signal) is Boundary:
                signal.work()
            else:
                handling = self.handlers[type(signal)].function(self.actor, signal)
                await (handling if traced is None else traced.signalled(signal, handling))
            return
        delivery = self.mailbox.take()
        if delivery is None:
            return
        expired = delivery.deadline_ns and delivery.deadline_ns <= time.monotonic_ns()
        if expired and not (traced is not None and traced.replays):
            return  # its asker has its error already
        handler = self.handlers.get(type(delivery.message))
        if handler is None:
            self._not_understood(delivery)
            return
        current_delivery.set(delivery)
        self.current = delivery
        handling = handler.function(self.actor, delivery.message)
        try:
            reply = await (handling if traced is None else traced.received(delivery, handling))
        except asyncio.CancelledError:
            if self.is_withdrawn():
                return
            raise
        if type(reply) not in handler.replies:
            self.answers_later(delivery, handler, reply)
            return
        if traced is not None:
            traced.replied(delivery, reply)
        room = None if delivery.reply_to is None else delivery.reply_to.reply(reply)
        self.current = None
        self.handled += 1
        if self._withdrawn is not None:
            self.is_withdrawn()
        if room is not None:
            await room

    @staticmethod
    async def awaiting(handling: Awaitable[Any]) -> Any:
        """Await a handler's awaitable that is no coroutine."""
        return await handling

    def answers_later(self, delivery: Delivery, handler: Handler, reply: object) -> None:
        """Check a reply that is none of the declared contracts: the handler defers it, or is wrong."""
        if not isinstance(reply, DeferredReply) or not handler.puts_off:
            raise TypeError(f"the handler of {contract_tag(delivery.message)} returned {reply!r:.200}")
        self.current = None
        self.handled += 1
        if self._withdrawn is not None:
            self.is_withdrawn()
        if self.traced is not None:
            self.traced.settle()

    def _not_understood(self, delivery: Delivery) -> None:
        tag = contract_tag(delivery.message)
        kind = type(self.actor).__name__
        tags = sorted(contract_tag(m) for m in self.handlers if issubclass(m, Contract))
        known = ", ".join(tags[:TAGS_NAMED_MAX]) or "no message"
        self.reject(delivery, NotUnderstood(f"{self.ref.address}, a {kind}, handles {known}, not {tag}"))

    def reject(self, delivery: Delivery, error: ActorError) -> None:
        """Report to the sender that its message is not handled, and why."""
        tag = contract_tag(delivery.message)
        if delivery.reply_to is not None:
            delivery.reply_to.fail(error)
        elif delivery.peer is not None:
            delivery.peer.bounce(self.name, self.ref.incarnation, delivery.sender, tag, error)
        else:
            self.system.bounced(self.ref, delivery.sender, tag, error)

    async def _stop_and_finish(self, reason: Reason) -> None:
        started = self.state is CellState.RUNNING
        self.state = CellState.STOPPING
        self.accepts = False
        self._fail_current(reason)
        current_delivery.set(None)
        try:
            if started:
                stopping = self.actor.stopping(reason)
                limit_s = self.actor.stopping_s
                async with asyncio.timeout(None if math.isinf(limit_s) else limit_s):
                    await (stopping if self.traced is None else self.traced.stopping(reason, stopping))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (it ends either way, for the reason it had)
            self._log_error("stopping() failed", error, reason=str(reason))
        finally:
            self._finish(reason)

    def _fail_current(self, reason: Reason) -> None:
        delivery, self.current = self.current, None
        if delivery is not None and delivery.reply_to is not None:
            delivery.reply_to.fail(ActorFailed(f"{self.ref.address} {reason}"))

    def _log_error(self, what: str, error: BaseException, **more: str) -> None:
        if self.traced is None or not self.traced.replays:
            _log.error(what, actor=self.ref.address, exception=_traceback(error), **more)

    def _finish(self, reason: Reason) -> None:
        """End this incarnation: notify all that wait for it or are linked with it."""
        if self.state is CellState.DEAD:
            return
        if self.traced is not None:
            self.traced.ended(reason)
        self.state = CellState.DEAD
        self.accepts = False
        self.task = None
        self.system.forget(self)
        self._fail_current(reason)
        ended = f"{self.ref!r} {reason}"
        if self._timers is not None:
            self._timers.close()
        if self._deferred is not None:
            self._deferred.close(ended)
        self.mailbox.drain(ended)
        if self.ready is not None and not self.ready.done():
            self.ready.set_exception(ActorStartFailed(f"{self.ref.address} {reason}"))
        if self._end is not None and not self._end.done():
            self._end.set_result(reason)
        down = Down(self.ref, reason)
        watchers, self._watchers = self._watchers or {}, None
        for callback in watchers.values():
            callback(down)
        links, self.links = self.links, {}
        for other in links:
            self.system.send_exit(self.ref, other, reason)


def _exit_reason(error: SystemExit) -> Reason:
    """Return how an actor ends whose handler calls `sys.exit`: as a script would."""
    failed = error.code not in (None, 0)
    kind = ReasonKind.FAILED if failed else ReasonKind.NORMAL
    return Reason(kind, f"sys.exit({'' if error.code is None else repr(error.code)})")


def _traceback(error: BaseException) -> str:
    """Return the traceback as plain text: a console renderer takes a third of a second for `exc_info`."""
    return "".join(traceback.format_exception(error))
