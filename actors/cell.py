"""The runtime of one actor: its mailbox, the task that serves it, and how its life ends."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from contextvars import copy_context
from enum import Enum
from typing import TYPE_CHECKING

import structlog

from zbmd.actors.actor import Actor, Down, Exited, Reason, ReasonKind, Signal, handler_table
from zbmd.actors.context import current_cell, current_delivery
from zbmd.actors.contracts import contract_tag
from zbmd.actors.errors import ActorFailed, ActorStartFailed, NotUnderstood
from zbmd.actors.mailbox import SIGNALS_MAX, Delivery, Mailbox, MailboxSpec
from zbmd.actors.ref import Ref

if TYPE_CHECKING:
    from random import Random

    from zbmd.actors.actor_life import ActorLife
    from zbmd.actors.system import ActorSystem

MESSAGES_PER_TURN = 64
"""How many messages an actor handles before the loop gets its turn."""
LINKS_MAX = 65_536
WATCHERS_MAX = 65_536

_log = structlog.get_logger("zbmd.actors")


class CellState(Enum):
    """Where one actor's life stands."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DEAD = "dead"


class ActorCell:
    """One life of one actor. A task exists only while it starts, has messages to handle, or stops."""

    __slots__ = (
        "_context",
        "_current",
        "_next_watch",
        "_stop",
        "_task",
        "_watchers",
        "accepts",
        "actor",
        "ended",
        "handled",
        "handlers",
        "life",
        "links",
        "mailbox",
        "name",
        "parent",
        "random",
        "ready",
        "ref",
        "state",
        "system",
    )

    def __init__(
        self, system: ActorSystem, actor: Actor, ref: Ref, spec: MailboxSpec, parent: Ref | None
    ) -> None:
        self.system = system
        self.actor = actor
        self.ref = ref
        self.name = ref.actor
        self.mailbox = Mailbox(spec)
        self.handlers = handler_table(type(actor))
        self.parent = parent
        self.state = CellState.STARTING
        self.accepts = True
        self.life: ActorLife | None = None
        """Who records or replays this life, if anyone does."""
        self.random: Random | None = None
        self.links: dict[Ref, None] = {} if parent is None else {parent: None}
        """In the order in which they were made, which is that of exit signals."""
        self.handled = 0
        self.ready: asyncio.Future[None] = system.loop.create_future()
        self.ended: asyncio.Future[Reason] = system.loop.create_future()
        self._watchers: dict[int, Callable[[Down], None]] = {}
        self._next_watch = 0
        self._stop: Reason | None = None
        self._current: Delivery | None = None
        # One context for all tasks of this life: the sender that wakes it lends it nothing of its own.
        self._context = copy_context()
        self._context.run(current_cell.set, self)
        self._context.run(current_delivery.set, None)
        self._task: asyncio.Task[None] | None = self._new_task()

    def _new_task(self) -> asyncio.Task[None]:
        return self.system.loop.create_task(self._run(), name=self.name, context=self._context)

    def wake(self) -> None:
        """Serve the mailbox; call it after each message taken in."""
        if self._task is None and self.accepts:
            self._task = self._new_task()

    # Signals and ends.

    def post(self, signal: Signal) -> None:
        """Put a signal before all messages, if the actor has a handler for it."""
        if not self.accepts or type(signal) not in self.handlers:
            return
        if len(self.mailbox.signals) >= SIGNALS_MAX:
            self.kill(Reason(ReasonKind.KILLED, f"{SIGNALS_MAX} signals wait for it; is a handler stuck?"))
            return
        self.mailbox.signals.append(signal)
        self.wake()

    def exit_signal(self, source: Ref, reason: Reason) -> None:
        """A linked actor ended."""
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
        task = self._task
        if self.life is not None:
            self.life.killed(reason)
        self._finish(reason)
        if task is not None:
            task.cancel()
            self.system.linger(task)

    def watch(self, callback: Callable[[Down], None]) -> int:
        """Call back once at the end of this life; returns a number for `unwatch`, or -1 if too many watch."""
        if len(self._watchers) >= WATCHERS_MAX:
            return -1
        self._next_watch += 1
        self._watchers[self._next_watch] = callback
        return self._next_watch

    def unwatch(self, number: int) -> None:
        """Do not call back."""
        self._watchers.pop(number, None)

    # The task.

    async def _run(self) -> None:
        try:
            if self.state is CellState.STARTING:
                starting = self.actor.started()
                await (starting if self.life is None else self.life.started(starting))
                self.state = CellState.RUNNING
                self.ready.set_result(None)
            await self._serve()
            reason = self._stop
        except asyncio.CancelledError:
            if self.state is CellState.DEAD:
                raise
            reason = Reason(ReasonKind.FAILED, "its handler was cancelled")
        except Exception as error:  # noqa: BLE001 (let it crash: the reason goes to all who are tied to it)
            reason = Reason(ReasonKind.FAILED, f"{type(error).__name__}: {error}")
            self._log_error("actor failed", error)
        except BaseException as error:
            self._finish(Reason(ReasonKind.FAILED, f"{type(error).__name__}: {error}"))
            raise
        if reason is None:
            self._task = None
        else:
            if self.life is not None and self._stop is not reason:
                self.life.failed(reason)
            await self._stop_and_finish(reason)

    async def _serve(self) -> None:
        """Handle signals and messages until there are none, or a stop is requested."""
        mailbox, handlers, actor, life = self.mailbox, self.handlers, self.actor, self.life
        turn = 0
        while self._stop is None:
            turn += 1
            if turn == MESSAGES_PER_TURN:
                turn = 0
                await asyncio.sleep(0)
                continue
            if mailbox.signals:
                signal = mailbox.signals.popleft()
                current_delivery.set(None)
                handling = handlers[type(signal)].function(actor, signal)
                await (handling if life is None else life.signalled(signal, handling))
                continue
            delivery = mailbox.take()
            if delivery is None:
                return
            expired = delivery.deadline_ns and delivery.deadline_ns <= time.monotonic_ns()
            if expired and not (life is not None and life.replays):
                continue  # its asker has already been told
            handler = handlers.get(type(delivery.message))
            if handler is None:
                self._not_understood(delivery)
                continue
            current_delivery.set(delivery)
            self._current = delivery
            handling = handler.function(actor, delivery.message)
            reply = await (handling if life is None else life.received(delivery, handling))
            if type(reply) not in handler.replies:
                raise TypeError(f"the handler of {contract_tag(delivery.message)} returned {reply!r:.200}")
            if life is not None:
                life.replied(delivery, reply)
            room = None if delivery.reply_to is None else delivery.reply_to.reply(reply)
            self._current = None
            self.handled += 1
            if room is not None:
                await room

    def _not_understood(self, delivery: Delivery) -> None:
        tag = contract_tag(delivery.message)
        error = NotUnderstood(f"{self.ref.address} has no handler for {tag}")
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
                async with asyncio.timeout(self.actor.stopping_s):
                    await (stopping if self.life is None else self.life.stopping(reason, stopping))
        except Exception as error:  # noqa: BLE001 (it ends either way, for the reason it had)
            self._log_error("stopping() failed", error, reason=str(reason))
        finally:
            self._finish(reason)

    def _fail_current(self, reason: Reason) -> None:
        delivery, self._current = self._current, None
        if delivery is not None and delivery.reply_to is not None:
            delivery.reply_to.fail(ActorFailed(f"{self.ref.address} {reason}"))

    def _log_error(self, what: str, error: BaseException, **more: str) -> None:
        if self.life is None or not self.life.replays:
            _log.error(what, actor=self.ref.address, exception=_traceback(error), **more)

    def _finish(self, reason: Reason) -> None:
        """The end of this life: everyone who waits for it, or is tied to it, learns of it."""
        if self.state is CellState.DEAD:
            return
        if self.life is not None:
            self.life.ended(reason)
        self.state = CellState.DEAD
        self.accepts = False
        self._task = None
        self.system.forget(self)
        self._fail_current(reason)
        self.mailbox.drain(f"{self.ref!r} {reason}")
        if not self.ready.done():
            self.ready.set_exception(ActorStartFailed(f"{self.ref.address} {reason}"))
        self.ended.set_result(reason)
        down = Down(self.ref, reason)
        watchers, self._watchers = self._watchers, {}
        for callback in watchers.values():
            callback(down)
        links, self.links = self.links, {}
        for other in links:
            self.system.send_exit(self.ref, other, reason)


def _traceback(error: BaseException) -> str:
    """The plain text: what a console renderer makes of `exc_info` takes it a third of a second."""
    return "".join(traceback.format_exception(error))
