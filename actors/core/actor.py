"""Actors, as their authors write them: what a handler may call."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING, cast

from zbmd.actors.core.actor_base import ActorBase
from zbmd.actors.core.actor_base import on as on
from zbmd.actors.core.context import DEFERRED, ActorClock, Deferred, DeferredReply
from zbmd.actors.core.ref import Reason, ReasonKind
from zbmd.transport.errors import LocalProtocolError

if TYPE_CHECKING:
    from zbmd.actors.contracts import Contract
    from zbmd.actors.core.cell import ActorCell
    from zbmd.actors.core.ref import Ref
    from zbmd.actors.core.system import CoreSystem
    from zbmd.actors.core.timers import Timer

SEED_BYTES = 8


class Actor(ActorBase):
    """The base of every actor. An actor owns its state and handles one message at a time.

    An exception in a handler ends the actor ("let it crash"): the asker gets `ActorFailed`; linked actors and
    the supervisor are notified. The constructor runs in the spawner; `started()` runs first in the actor and
    `stopping()` last, unless the actor is killed.

    A recorded actor can be replayed if its behaviour depends only on its constructor's arguments and on what
    it receives through its own interface: messages, signals, replies, `clock` and `random`. Tasks,
    `asyncio.sleep`, timeouts, queues and locks between its tasks are fine. Use `clock` instead of
    `time.time()` and `time.monotonic()`, and `random` instead of the modules `random` and `secrets`. Iterate
    over a dict or a sorted list, not over a set. Leave I/O, threads and callbacks of the event loop
    (`call_later`) to another actor and ask it.
    """

    @property
    def ref(self) -> Ref:
        """Return this actor's own reference."""
        return self._running_cell().ref

    @property
    def system(self) -> CoreSystem:
        """Return the system in which this actor runs."""
        return cast("CoreSystem", self._running_cell().system)

    @property
    def clock(self) -> ActorClock:
        """Return the actor's clocks, whose readings can be replayed."""
        return ActorClock(self._running_cell())

    @property
    def random(self) -> Random:
        """Return a random generator of this incarnation; its seed is recorded. Not for secrets."""
        cell = self._running_cell()
        if cell.random is None:
            traced = cell.traced
            cell.random = Random(int.from_bytes(os.urandom(SEED_BYTES)) if traced is None else traced.seed)
        return cell.random

    def monitor(self, ref: Ref) -> None:
        """Receive one `Down` when that actor ends."""
        self.system.monitor(ref, to=self.ref)

    def link(self, ref: Ref) -> None:
        """Link with another actor: unless it ends normally, each ends with the other (see `trap_exit`)."""
        self.system.link(self.ref, ref)

    def unlink(self, ref: Ref) -> None:
        """Undo `link`."""
        self.system.unlink(self.ref, ref)

    def stop(self, text: str = "") -> None:
        """End normally once the current handler has returned."""
        cell = self._running_cell()
        if cell.traced is not None:
            cell.traced.asks_to_stop(text)
        cell.request_stop(Reason(ReasonKind.NORMAL, text))

    # Its own messages.

    def after(self, delay_s: float, message: Contract) -> Timer:
        """Send itself `message` in `delay_s` seconds, in the order of the mailbox.

        The message arrives even if the mailbox is full. Raises `LocalProtocolError` if it has no handler,
        `TooManyPending` past `TIMERS_PER_ACTOR_MAX` timers. Timers end with the actor.
        """
        return self._running_cell().timers.set(message, delay_s, again=False)

    def every(self, period_s: float, message: Contract) -> Timer:
        """Send itself `message` every `period_s` seconds, unless the last one still waits."""
        return self._running_cell().timers.set(message, period_s, again=True)

    def defer(self) -> Deferred:
        """Defer the reply to the current message: it can be given later, by any task.

        The handler returns the result: `async def take(self, m: Take) -> Item | DeferredReply`.
        """
        cell = self._running_cell()
        return cell.deferred.defer(cell.handling("defer()"))

    def stash(self) -> DeferredReply:
        """Stash the current message until `unstash`. The handler returns the result, as with `defer`.

        The stash holds as many messages as the mailbox; raises `StashFull`. If the actor ends, the askers get
        `DeadActor`. Messages whose deadline has passed are not handled.
        """
        self._running_cell().stash()
        return DEFERRED

    def unstash(self) -> None:
        """Handle all stashed messages next, in the order of their arrival, before those in the mailbox."""
        self._running_cell().unstash()

    def __repr__(self) -> str:
        cell = self._cell
        if cell is None:
            return f"<{type(self).__name__}, not spawned>"
        return f"<{type(self).__name__} {cell.ref.address}#{cell.incarnation}, {cell.words()}>"

    def _running_cell(self) -> ActorCell:
        cell: ActorCell | None = self._cell
        if cell is None:
            raise LocalProtocolError(f"{type(self).__name__} has not been spawned: use system.spawn(...)")
        return cell
