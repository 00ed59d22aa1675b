"""Actors, as their authors write them: what a handler may call."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING, cast

from zbmd.actors.core.actor_base import ActorBase
from zbmd.actors.core.actor_base import on as on
from zbmd.actors.core.context import ActorClock
from zbmd.actors.core.deferred import LATER, Deferred, Later
from zbmd.actors.core.signals import Reason, ReasonKind
from zbmd.transport.errors import LocalProtocolError

if TYPE_CHECKING:
    from zbmd.actors.contracts import Contract
    from zbmd.actors.core.cell import ActorCell
    from zbmd.actors.core.ref import Ref
    from zbmd.actors.core.system import CoreSystem
    from zbmd.actors.core.timers import Timer

SEED_BYTES = 8


class Actor(ActorBase):
    """The base of every actor. Its state is its own, and it handles one message at a time.

    An exception in a handler ends the actor ("let it crash"): the asker gets `ActorFailed`, linked actors
    and its supervisor learn of it. The constructor runs in the spawner; `started()` is the first thing that
    runs in the actor and `stopping()` the last, unless it is killed.

    An actor that is recorded can be replayed if what it does follows from its constructor's arguments and
    from what it takes in through its own interface: messages, signals, answers, `clock` and `random`. Tasks,
    `asyncio.sleep`, timeouts, queues and locks between its tasks are fine. Instead of `time.time()` and
    `time.monotonic()` use `clock`; instead of `random` and `secrets` use `random`; iterate over a dict or a
    sorted list, not over a set; leave I/O, threads and callbacks of the event loop (`call_later`) to another
    actor and ask it.
    """

    @property
    def ref(self) -> Ref:
        """This actor's own reference."""
        return self._running_cell().ref

    @property
    def system(self) -> CoreSystem:
        """The system this actor runs in."""
        return cast("CoreSystem", self._running_cell().system)

    @property
    def clock(self) -> ActorClock:
        """The time, as it can be replayed."""
        return ActorClock(self._running_cell())

    @property
    def random(self) -> Random:
        """Return a generator of this life's own, seeded with a number that is recorded. Not for secrets."""
        cell = self._running_cell()
        if cell.random is None:
            life = cell.life
            cell.random = Random(int.from_bytes(os.urandom(SEED_BYTES)) if life is None else life.seed)
        return cell.random

    def monitor(self, ref: Ref) -> None:
        """Receive one `Down` when that actor ends."""
        self.system.monitor(ref, to=self.ref)

    def link(self, ref: Ref) -> None:
        """Tie the two lives: when one ends other than normally, so does the other (see `trap_exit`)."""
        self.system.link(self.ref, ref)

    def unlink(self, ref: Ref) -> None:
        """Undo `link`."""
        self.system.unlink(self.ref, ref)

    def stop(self, text: str = "") -> None:
        """End normally once the current handler has returned."""
        cell = self._running_cell()
        if cell.life is not None:
            cell.life.asks_to_stop(text)
        cell.request_stop(Reason(ReasonKind.NORMAL, text))

    # Its own messages.

    def after(self, delay_s: float, message: Contract) -> Timer:
        """Send itself `message` in `delay_s` seconds, in the order of the mailbox; see `Timer.cancel`.

        A timer's message comes even if the mailbox is full. Raises `LocalProtocolError` if it has no handler,
        `TooManyPending` past `TIMERS_PER_ACTOR_MAX` timers. They end with the actor.
        """
        return self._running_cell().timers.set(message, delay_s, again=False)

    def every(self, period_s: float, message: Contract) -> Timer:
        """As `after`, again and again. While the last one waits, no other comes (`Timer.missed` counts)."""
        return self._running_cell().timers.set(message, period_s, again=True)

    def defer(self) -> Deferred:
        """Take the answer to the current message over: to be given later, by any task.

        The handler returns what this returns, and says so: `async def take(self, m: Take) -> Item | Later`.
        """
        cell = self._running_cell()
        return cell.deferred.defer(cell.handling("defer()"))

    def stash(self) -> Later:
        """Put the current message aside, until `unstash`. Its handler returns what this does (see `defer`).

        As many may be aside as the mailbox may hold; raises `StashFull`. If the actor ends, their askers get
        `DeadActor`; those whose deadline passes are not handled.
        """
        self._running_cell().stash()
        return LATER

    def unstash(self) -> None:
        """Handle all that is aside next, in the order in which it came, before what waits in the mailbox."""
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
