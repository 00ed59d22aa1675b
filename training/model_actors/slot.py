"""A seat: the place of a supervised actor through all of its lives, and how a message gets to who sits there.

From a compute thread a message is a direct call (`Seat.call`): the thread waits for the actor's turn, and
runs the method itself. What an actor promises holds all the same:

- it handles one message at a time, whether that comes by the mailbox or by a direct call;
- what it raises ends it, its supervisor learns why, and starts it again, after a back-off, under its name;
- an answer counts only if the life that gave it is not over.

The caller is blocked meanwhile and then does the same again, at the next life. So a message of a seat is one
that may be handled twice: a computation that leaves its inputs as they are.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

import structlog

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.signals import Down, Reason, ReasonKind
from zbmd.actors.errors import ActorFailed, DeadActor
from zbmd.actors.supervision.events import Restart
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.training.model_actors.turn import Turn
from zbmd.transport.errors import LocalProtocolError, OutOfMemory, PeerLost, UserError, ZbmdError

ATTEMPTS_MAX: Final = 8
"""How often one message is handed to one life after the other."""
RESTART_S: Final = 30.0
"""How long the next life may take to come, back-off included."""
LOOK_S: Final = 0.05
"""Who waits for it looks this often whether it still should."""

SeatedT = TypeVar("SeatedT", bound="SeatedActor")
ReplyT = TypeVar("ReplyT", bound=Contract)
P = ParamSpec("P")
R = TypeVar("R")

log: Final = structlog.stdlib.get_logger("zbmd.training.actors")


class GivenUp(ZbmdError):
    """An actor kept failing: its supervisor gave up, or one message failed in one life after the other."""


ANSWERS: Final = (GivenUp, UserError, MemoryError, OutOfMemory)
"""What is no failure of the actor, and would be raised again by its next life: it goes to the caller."""


class DescribeSeat(Contract, id="zbmd.training.describe"):
    """Ask a seated actor how it stands."""


class SeatDescribed(Contract, id="zbmd.training.described"):
    """life: how many have sat there, this one included; failures: direct calls that failed in all of them.

    place: where it computes; moves: how often that has changed.
    """

    kind: str
    life: int
    failures: int
    last_failure: str
    place: str
    moves: int = 0


class Seat(Generic[SeatedT]):
    """The place of one actor, named `name`. Made on the loop; `call` is for compute threads.

    answers: exceptions that its methods raise for the caller, beside `ANSWERS`.
    """

    def __init__(
        self,
        name: str,
        *,
        answers: tuple[type[Exception], ...] = (),
        attempts_max: int = ATTEMPTS_MAX,
        restart_s: float = RESTART_S,
        turn: Turn | None = None,
    ) -> None:
        self.name = name
        self.turn = turn
        """Shared with the seats that compute together, by all lives; else each life has its own."""
        self.life: SeatedT | None = None
        """Who sits here. Written on the loop."""
        self.lives = 0
        self.failures = 0
        self.last_failure = ""
        self.check: Callable[[], None] = no_check
        """Called from time to time by a thread that waits for the next life; what it raises ends the wait."""
        self._answers: tuple[type[Exception], ...] = (*ANSWERS, *answers)
        self._attempts_max = attempts_max
        self._restart_s = restart_s
        self._closed = ""
        self._changed = threading.Condition()
        self._news: asyncio.Event | None = None
        self._loop_thread = threading.get_ident()
        self.on_change: list[Callable[[bool], None]] = []
        """Called on the loop when a life begins (True) or is over (False); as many as there are crews."""

    def child(
        self,
        actor: type[SeatedT],
        *args: Any,
        restart: Restart = Restart.PERMANENT,
        shutdown_s: float | None = None,
    ) -> ChildSpec:
        """Who sits here, for a supervisor: `actor(seat, *args)`."""
        return ChildSpec(
            name=self.name, actor=actor, args=(self, *args), restart=restart, shutdown_s=shutdown_s
        )

    # From a compute thread.

    def call(self, method: Callable[Concatenate[SeatedT, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Have the actor run `method(actor, …)` here and now; again at its next lives if it fails.

        The result is of a life that was not over when the method returned. Raises `GivenUp`, the
        seat's answers, and what `check` raises.
        """
        life = self.life
        if life is None:
            life = self._wait(None)
        for attempt in range(self._attempts_max):
            turn = life.turn
            if not turn.lock.acquire(False):
                turn.take()
            try:
                result = method(life, *args, **kwargs)
            except self._answers:
                raise
            except Exception as error:  # noqa: BLE001 (let it crash: it is told to its supervisor)
                self.failed(life, error)
            else:
                if self.life is life:
                    if attempt:
                        self.worked()
                    return result
            finally:
                turn.give()
            life = self._wait(life)
        raise GivenUp(
            f"{self.name} failed {self._attempts_max} times in a row; the last: {self.last_failure}"
        )

    def failed(self, life: SeatedActor, error: Exception) -> None:
        """A direct call failed: that life is over. From any thread."""
        self.failures += 1
        self.last_failure = f"{type(error).__name__}: {error}"
        log.warning(
            "actor failed in a direct call",
            seat=self.name,
            exception="".join(traceback.format_exception(error)),
        )
        life.fail_soon(error)

    def wait_behind(self, life: SeatedActor) -> None:
        """Wait for the life that comes behind this one. Raises `GivenUp`, and what `check` raises."""
        self._wait(life)

    def wait(self) -> None:
        """Wait until somebody sits here. Raises `GivenUp`, and what `check` raises."""
        self._wait(None)

    def worked(self) -> None:
        """The message that had failed was handled. From any thread."""
        life = self.life
        if life is not None:
            life.system.loop.call_soon_threadsafe(life.worked)

    def _wait(self, behind: SeatedActor | None) -> SeatedT:
        if threading.get_ident() == self._loop_thread:
            raise LocalProtocolError(
                f"{self.name}: called directly on the loop that is to restart it: use ask"
            )
        end_s = time.monotonic() + self._restart_s
        with self._changed:
            while self.life is None or self.life is behind:
                if self._closed:
                    raise self._given_up()
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise GivenUp(
                        f"{self.name} has not come back in {self._restart_s:g} s: {self.last_failure}"
                    )
                self._changed.wait(min(LOOK_S, left_s))
                self.check()
            return self.life

    def _given_up(self) -> GivenUp:
        last = f"; it failed last by {self.last_failure}" if self.last_failure else ""
        return GivenUp(f"{self.name} is not coming back: {self._closed}{last}")

    # On the loop.

    async def ask(self, message: Contract, *, reply: type[ReplyT], timeout: float) -> ReplyT:
        """Ask whoever sits here, life after life. timeout: seconds, for all of it.

        The message may be handled twice. Raises `GivenUp`, and what `Ref.ask` raises for a deadline or for a
        message that is not understood.
        """
        end_s = time.monotonic() + timeout
        behind: SeatedActor | None = None
        for _ in range(self._attempts_max):
            life = self.life
            if life is None or life is behind:
                life = await self._seated(behind, end_s)
            left_s = max(1e-3, end_s - time.monotonic())
            try:
                return await life.ref.ask(message, reply=reply, timeout=left_s)
            except (ActorFailed, DeadActor, PeerLost) as error:
                behind, self.last_failure = life, str(error)
                self.failures += 1
        raise GivenUp(
            f"{self.name} failed {self._attempts_max} times in a row; the last: {self.last_failure}"
        )

    async def _seated(self, behind: SeatedActor | None, end_s: float) -> SeatedT:
        if self._news is None:
            self._news = asyncio.Event()
        async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
            while (life := self.life) is None or life is behind:
                if self._closed:
                    raise self._given_up()
                self._news.clear()
                await self._news.wait()
        return life

    def sit(self, life: SeatedT) -> None:
        """A new life begins."""
        with self._changed:
            self.life, self._closed = life, ""
            self.lives += 1
            for tell in self.on_change:
                tell(True)
            self._changed.notify_all()
        self._tell()

    def leave(self, life: SeatedActor, reason: str) -> None:
        """A life is over."""
        if self.life is life:
            self.life = None
            for tell in self.on_change:
                tell(False)
            self.last_failure = self.last_failure or reason

    def close(self, reason: str) -> None:
        """Nobody will sit here again; who waits gets `GivenUp`."""
        if self.life is not None:
            self.leave(self.life, reason)
        with self._changed:
            self._closed = reason or "it was stopped"
            self._changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()


def no_check() -> None:
    """No reason not to wait."""


class SeatedActor(Actor):
    """The base of actors that a compute thread calls directly. Its children's first argument is their seat.

    `ready` is what `started` is elsewhere; the seat is taken once it has returned.
    """

    captured = False  # what it computes with is no message

    def __init__(self, seat: Seat[Any]) -> None:
        self.seat = seat
        self.turn = seat.turn or Turn()

    async def ready(self) -> None:
        """Become what one sits here for."""

    async def started(self) -> None:
        """Sit down."""
        self._running_cell().watch(self._over)
        await self.ready()
        self.seat.sit(self)

    @on(DescribeSeat)
    async def describe(self, _: DescribeSeat) -> SeatDescribed:
        """How it stands."""
        seat = self.seat
        kind, place, moves = type(self).__name__, self.place, self.moves
        return SeatDescribed(kind, seat.lives, seat.failures, seat.last_failure, place, moves)

    @property
    def place(self) -> str:
        """Where it computes."""
        return self.system.name

    @property
    def moves(self) -> int:
        """How often that has changed, in all lives."""
        return 0

    def failed(self, error: Exception) -> None:
        """A direct call failed, which ends this life."""

    def worked(self) -> None:
        """A direct call that had failed has been brought to its end, by this life."""

    def fail_soon(self, error: Exception) -> None:
        """End as one does that raises in a handler. From any thread."""
        self.system.loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: Exception) -> None:
        self.failed(error)
        reason = Reason(ReasonKind.FAILED, f"{type(error).__name__}: {error}")
        self._running_cell().request_stop(reason)

    def code_state(self) -> dict[str, Any]:
        """Its attributes, not copied: what it computes with lies elsewhere."""
        return {name: value for name, value in vars(self).items() if name != "_cell"}

    def _over(self, down: Down) -> None:
        self.left(down.reason)
        self.seat.leave(self, str(down.reason))

    def left(self, reason: Reason) -> None:
        """Its life is over, killed or not."""
