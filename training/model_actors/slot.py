"""A slot: the position of a supervised actor through all of its incarnations, and how messages reach the
actor.

From a compute thread a message is a direct call (`ActorSlot.call`): the thread waits for the actor's turn and
runs the method itself. The guarantees of actors hold nevertheless:

- it handles one message at a time, whether that comes by the mailbox or by a direct call;
- an exception ends it; its supervisor learns the reason and restarts it, after a back-off, under its name;
- a result counts only if the incarnation that returned it has not ended.

The caller blocks until the message is handled, and repeats it at the next incarnation. A message to a slot
may therefore be handled twice: it must be a computation that does not change its inputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

import structlog

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import Down, Reason, ReasonKind
from zbmd.actors.errors import ActorFailed, DeadActor
from zbmd.actors.supervision.events import Restart
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.collectives.errors import OperationAborted
from zbmd.training.autograd.tape import Parameter, Tape
from zbmd.transport.errors import (
    DeadlineExceeded,
    LocalProtocolError,
    OutOfMemory,
    PeerLost,
    UserError,
    ZbmdError,
)

TURN_S = 60.0
"""Longest wait of a thread for its turn; one message of the actor takes less."""


class Turn:
    """A lock between threads and one event loop, which never blocks the loop and is fair to it.

    Threads use `take` and `give`; code on the loop uses `async with`. If a task on the loop waits, `give`
    hands the turn to it instead of releasing it.
    """

    __slots__ = ("_loop", "_waiters", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by whoever has the turn; released by `give`."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: deque[asyncio.Future[None]] = deque()  # tasks of a model's actors: one each

    def take(self, timeout_s: float = TURN_S) -> None:
        """Wait for the turn. Raises `DeadlineExceeded`."""
        if not self.lock.acquire(timeout=timeout_s):
            raise DeadlineExceeded(
                f"the actor has handled another message for {timeout_s:g} s: look for a blocked handler"
            )

    def give(self) -> None:
        """End the turn."""
        if self._waiters and self._loop is not None:
            self._loop.call_soon_threadsafe(self._hand_over)
        else:
            self.lock.release()

    async def __aenter__(self) -> None:
        if self.lock.acquire(blocking=False):
            return
        self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        if self.lock.acquire(blocking=False):  # it was given back before it could be seen that we wait
            self._waiters.remove(waiter)
            return
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give()  # it was ours already
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)

    async def __aexit__(self, *_: object) -> None:
        self.give()

    def _hand_over(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.lock.release()


ATTEMPTS_MAX: Final = 8
"""Number of incarnations that one message is given to."""
RESTART_S: Final = 30.0
"""Longest time until the next incarnation has started, back-off included."""
POLL_S: Final = 0.05
"""Interval at which a waiting thread calls `check`."""

SlotActorT = TypeVar("SlotActorT", bound="SlotActor")
ReplyT = TypeVar("ReplyT", bound=Contract)
P = ParamSpec("P")
R = TypeVar("R")

log: Final = structlog.stdlib.get_logger("zbmd.training.actors")


class RestartsExhausted(ZbmdError):
    """An actor kept failing: its supervisor gave up, or one message failed at one incarnation after the
    other.
    """


CALLER_ERRORS: Final = (RestartsExhausted, UserError, MemoryError, OutOfMemory)
"""Errors that are no failure of the actor, and that its next incarnation would raise again: the caller gets
them.
"""


class DescribeSlot(Contract, id="zbmd.training.describe"):
    """Ask an actor in a slot for its state."""


class SlotDescription(Contract, id="zbmd.training.described"):
    """The state of an actor in a slot.

    `incarnation`: how many it had, this one included; `failures`: direct calls that failed in all of them;
    `place`: the device on which it computes; `moves`: how often that has changed.
    """

    kind: str
    incarnation: int
    failures: int
    last_failure: str
    place: str
    moves: int = 0


class ActorSlot(Generic[SlotActorT]):
    """The position of one actor, named `name`. Made on the loop; `call` is for compute threads.

    `caller_errors`: exceptions that its methods raise for the caller, in addition to `CALLER_ERRORS`.
    """

    def __init__(
        self,
        name: str,
        *,
        caller_errors: tuple[type[Exception], ...] = (),
        attempts_max: int = ATTEMPTS_MAX,
        restart_s: float = RESTART_S,
        turn: Turn | None = None,
    ) -> None:
        self.name = name
        self.turn = turn
        """Shared with the slots of a joint call, by all incarnations; otherwise each incarnation has its
        own."""
        self.actor: SlotActorT | None = None
        """The current incarnation; None between two. Written on the loop."""
        self.incarnations = 0
        self.failures = 0
        self.last_failure = ""
        self.check: Callable[[], None] = no_check
        """Called from time to time by a thread that waits for the next incarnation; an exception ends the
        wait.
        """
        self._caller_errors: tuple[type[Exception], ...] = (*CALLER_ERRORS, *caller_errors)
        self._attempts_max = attempts_max
        self._restart_s = restart_s
        self._closed = ""
        self._changed = threading.Condition()
        self._news: asyncio.Event | None = None
        self._loop_thread = threading.get_ident()
        self.on_change: list[Callable[[bool], None]] = []
        """Called on the loop when an incarnation attaches (True) or detaches (False); one for each joint
        call.
        """

    def child(
        self,
        actor: type[SlotActorT],
        *args: Any,
        restart: Restart = Restart.PERMANENT,
        shutdown_s: float | None = None,
    ) -> ChildSpec:
        """Return the child specification of `actor(slot, *args)`, for a supervisor."""
        return ChildSpec(
            name=self.name, actor=actor, args=(self, *args), restart=restart, shutdown_s=shutdown_s
        )

    # From a compute thread.

    def call(
        self, method: Callable[Concatenate[SlotActorT, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Have the actor run `method(actor, …)` on this thread; again at its next incarnations if it fails.

        The result is from an incarnation that had not ended when the method returned. Raises
        `RestartsExhausted`, the slot's caller errors, and what `check` raises.
        """
        actor = self.actor
        if actor is None:
            actor = self._wait(None)
        for attempt in range(self._attempts_max):
            turn = actor.turn
            if not turn.lock.acquire(False):
                turn.take()
            try:
                result = method(actor, *args, **kwargs)
            except self._caller_errors:
                raise
            except Exception as error:  # noqa: BLE001 (let it crash: its supervisor receives it)
                self.failed(actor, error)
            else:
                if self.actor is actor:
                    if attempt:
                        self.worked()
                    return result
            finally:
                turn.give()
            actor = self._wait(actor)
        raise RestartsExhausted(
            f"{self.name} failed {self._attempts_max} times in a row; the last: {self.last_failure}"
        )

    def failed(self, actor: SlotActor, error: Exception) -> None:
        """Note that a direct call failed, which ends that incarnation. From any thread."""
        self.failures += 1
        self.last_failure = f"{type(error).__name__}: {error}"
        log.warning(
            "actor failed in a direct call",
            slot=self.name,
            exception="".join(traceback.format_exception(error)),
        )
        actor.fail_soon(error)

    def wait_for_next(self, actor: SlotActor) -> None:
        """Wait for the incarnation after `actor`. Raises `RestartsExhausted`, and what `check` raises."""
        self._wait(actor)

    def wait(self) -> None:
        """Wait until an actor is attached. Raises `RestartsExhausted`, and what `check` raises."""
        self._wait(None)

    def worked(self) -> None:
        """Note that the message that had failed was handled. From any thread."""
        actor = self.actor
        if actor is not None:
            actor.system.loop.call_soon_threadsafe(actor.worked)

    def _wait(self, before: SlotActor | None) -> SlotActorT:
        if threading.get_ident() == self._loop_thread:
            raise LocalProtocolError(
                f"{self.name}: call() blocks the event loop that restarts the actor: use ask() on the loop"
            )
        end_s = time.monotonic() + self._restart_s
        with self._changed:
            while self.actor is None or self.actor is before:
                if self._closed:
                    raise self._given_up()
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise RestartsExhausted(
                        f"{self.name} has not come back in {self._restart_s:g} s: {self.last_failure}"
                    )
                self._changed.wait(min(POLL_S, left_s))
                self.check()
            return self.actor

    def _given_up(self) -> RestartsExhausted:
        last = f"; it failed last by {self.last_failure}" if self.last_failure else ""
        return RestartsExhausted(f"{self.name} is not coming back: {self._closed}{last}")

    # On the loop.

    async def ask(self, message: Contract, *, reply: type[ReplyT], timeout: float) -> ReplyT:
        """Ask the current incarnation, and the next ones if it fails. `timeout`: seconds, for all of it.

        The message may be handled twice. Raises `RestartsExhausted`, and what `Ref.ask` raises for a deadline
        or for a message that is not understood.
        """
        end_s = time.monotonic() + timeout
        before: SlotActor | None = None
        for _ in range(self._attempts_max):
            actor = self.actor
            if actor is None or actor is before:
                actor = await self._next_actor(before, end_s)
            left_s = max(1e-3, end_s - time.monotonic())
            try:
                return await actor.ref.ask(message, reply=reply, timeout=left_s)
            except (ActorFailed, DeadActor, PeerLost) as error:
                before, self.last_failure = actor, str(error)
                self.failures += 1
        raise RestartsExhausted(
            f"{self.name} failed {self._attempts_max} times in a row; the last: {self.last_failure}"
        )

    async def _next_actor(self, before: SlotActor | None, end_s: float) -> SlotActorT:
        if self._news is None:
            self._news = asyncio.Event()
        async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
            while (actor := self.actor) is None or actor is before:
                if self._closed:
                    raise self._given_up()
                self._news.clear()
                await self._news.wait()
        return actor

    def attach(self, actor: SlotActorT) -> None:
        """Take in a new incarnation."""
        with self._changed:
            self.actor, self._closed = actor, ""
            self.incarnations += 1
            for tell in self.on_change:
                tell(True)
            self._changed.notify_all()
        self._tell()

    def detach(self, actor: SlotActor, reason: str) -> None:
        """Note that an incarnation has ended."""
        if self.actor is actor:
            self.actor = None
            for tell in self.on_change:
                tell(False)
            self.last_failure = self.last_failure or reason

    def close(self, reason: str) -> None:
        """Close the slot: no actor will attach again, and waiting callers get `RestartsExhausted`."""
        if self.actor is not None:
            self.detach(self.actor, reason)
        with self._changed:
            self._closed = reason or "it was stopped"
            self._changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()


def no_check() -> None:
    """Do nothing: the wait continues."""


class SlotActor(Actor):
    """The base of actors that a compute thread calls directly. The first argument of its children is their
    slot.

    Override `ready` instead of `started`; the actor is attached once it has returned.
    """

    captured = False  # what it computes with is no message

    def __init__(self, slot: ActorSlot[Any]) -> None:
        self.slot = slot
        self.turn = slot.turn or Turn()

    async def ready(self) -> None:
        """Prepare for calls."""

    async def started(self) -> None:
        """Attach to the slot."""
        self._running_cell().watch(self._over)
        await self.ready()
        self.slot.attach(self)

    @on(DescribeSlot)
    async def describe(self, _: DescribeSlot) -> SlotDescription:
        """Reply with the state of the slot."""
        slot = self.slot
        kind, place, moves = type(self).__name__, self.place, self.moves
        return SlotDescription(kind, slot.incarnations, slot.failures, slot.last_failure, place, moves)

    @property
    def place(self) -> str:
        """Return where it computes."""
        return self.system.name

    @property
    def moves(self) -> int:
        """Return how often that has changed, over all incarnations."""
        return 0

    def failed(self, error: Exception) -> None:
        """Override to act on a failed direct call, which ends this incarnation."""

    def worked(self) -> None:
        """Override to act on the success, in this incarnation, of a direct call that had failed."""

    def fail_soon(self, error: Exception) -> None:
        """End like an actor whose handler raises. From any thread."""
        self.system.loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: Exception) -> None:
        self.failed(error)
        reason = Reason(ReasonKind.FAILED, f"{type(error).__name__}: {error}")
        self._running_cell().request_stop(reason)

    def code_state(self) -> dict[str, Any]:
        """Return its attributes, not copied: the data it computes with lies elsewhere."""
        return {name: value for name, value in vars(self).items() if name != "_cell"}

    def _over(self, down: Down) -> None:
        self.ended(down.reason)
        self.slot.detach(self, str(down.reason))

    def ended(self, reason: Reason) -> None:
        """Override to act on the end of this incarnation, killed or not."""


GROUP_ERRORS: Final = (PeerLost, OperationAborted, DeadlineExceeded)
"""Raised by collectives inside a unit: they end the step, and are no failure of an actor."""


class SlotVacated(Exception):
    """An actor detached during a joint call: the result does not count."""


@dataclass(slots=True)
class Attempt:
    """One run of a joint computation. number: from 0; tape, parameters: those that it computes with;
    unit: what is computed, if nothing is on a tape."""

    number: int
    unit: int = 0
    tape: Tape | None = None
    parameters: Sequence[Parameter] = ()


class JointCall:
    """The slots that one computation needs. Add them with `join` before any actor attaches."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = Turn()
        """The turn of all of them."""
        self.slots: tuple[ActorSlot[Any], ...] = ()
        self._absent = 0  # written on the loop
        self._vacated = False

    def join(self, slots: Sequence[ActorSlot[Any]]) -> None:
        """Add slots, which were made with this turn."""
        self.slots = (*self.slots, *slots)
        self._absent += len(slots)
        for slot in slots:
            assert slot.turn is self.turn, f"{slot.name} has a turn of its own"
            slot.on_change.append(self._changed)

    def call(self, work: Callable[[Attempt], R], blame: Callable[[Attempt], ActorSlot[Any] | None]) -> R:
        """Return `work(attempt)`, computed by all attached actors while none of them handles other calls.

        If an op or a unit fails, the actor in the slot `blame(attempt)` ends (None: the error is the
        caller's). Once its next incarnation is attached, all of `work` is repeated: it must not have changed
        what it computes from. Raises `RestartsExhausted`, and what `ActorSlot.call` raises.
        """
        last, failed = "an actor ended", list[ActorSlot[Any]]()
        for number in range(ATTEMPTS_MAX):
            if self._absent:
                self._wait_for_all()
            if not self.turn.lock.acquire(False):
                self.turn.take()
            self._vacated = False
            attempt = Attempt(number)
            try:
                if self._absent:
                    continue
                result = work(attempt)
                if not self._vacated:
                    for slot in set(failed):
                        slot.worked()
                    return result
                continue
            except SlotVacated:
                continue
            except (*CALLER_ERRORS, *GROUP_ERRORS):
                raise
            except Exception as error:  # let it crash: its supervisor receives it
                at_work = blame(attempt)
                if at_work is None:
                    raise
                actor = at_work.actor
                if actor is not None:
                    at_work.failed(actor, error)
                    failed.append(at_work)
                    last = at_work.last_failure
            finally:
                self.turn.give()
            if actor is not None:
                at_work.wait_for_next(actor)
        raise RestartsExhausted(
            f"{self.name} was interrupted {ATTEMPTS_MAX} times in a row; the last: {last}"
        )

    def _wait_for_all(self) -> None:
        for slot in self.slots:
            slot.wait()

    def _changed(self, sits: bool) -> None:
        if sits:
            self._absent -= 1
        else:
            self._absent += 1
            self._vacated = True
