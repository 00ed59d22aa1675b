"""Replays a recorded actor: its own code, on a loop and in a system that are made for it.

Nothing around the actor is real: other actors are its recorded answers, time passes as it did. A strand that
could go on is held until an event gives it its turn, so the order of turns is the recorded one, whatever the
loop's would be. Timers fire only for a strand whose turn has come and that waits for one.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import weakref
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import Any, NoReturn, ParamSpec, TypeVar, TypeVarTuple, Unpack, assert_never

import structlog

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor
from zbmd.actors.core.cell import ActorCell
from zbmd.actors.core.context import current_cell
from zbmd.actors.core.native._mailbox import Delivery
from zbmd.actors.core.ref import Down, Exited, Reason, Ref, Signal, Undelivered
from zbmd.actors.core.wire import ReasonData, RefData
from zbmd.actors.errors import ActorError
from zbmd.actors.replay import events as ev
from zbmd.actors.replay._turns import SERVING, Strand
from zbmd.actors.replay.traced import TracedActor
from zbmd.actors.replay.tracing import Tracing
from zbmd.actors.system import ActorSystem
from zbmd.transport.sim.loop import SimLoop
from zbmd.transport.sim.process import StillDice, waiting

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TIMER_EARLY_NS_MAX = 5_000_000
"""The time by which a real loop may fire a timer early: its clock ticks in ms."""
SUSPECTS_MAX = 64

_log = structlog.get_logger("zbmd.actors.replay")


class StageLoop(SimLoop):
    """A `SimLoop` whose timers wait to be asked for, and whose tasks may be strands."""

    def __init__(self, suspect: Callable[[str], None]) -> None:
        super().__init__()
        self._suspect = suspect
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_set = 0
        self._still_dice = StillDice(self._dice)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Keep the timer for `fire_next`."""
        self._check_usable()
        timer = asyncio.TimerHandle(when, callback, args, self, context or copy_context())
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, timer))
        return timer

    def turn(self, play: Callable[[], None]) -> bool:
        """As `with entered()`, in a fraction of the time; whether `random`'s functions were used.

        Raises as `entered`.
        """
        self._check_enterable()
        self._disguise.put_on()
        try:
            self._still_dice.put_in()
            hooks, collecting = self._begin_running()
            try:
                play()
            finally:
                self._end_running(hooks, collecting)
                drawn = self._still_dice.take_out()
        finally:
            self._disguise.take_off()
        return drawn

    def fire_next(self, latest_ns: int) -> bool:
        """Fire the first timer, if it is due by `latest_ns`."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers or self._timers[0][0] * 1e9 > latest_ns:
            return False
        self._make_ready(heapq.heappop(self._timers)[2])
        return True

    def run_ready(self) -> None:
        """Run until nothing can run."""
        while not self.quiet():
            self.take_turn()

    def create_task(
        self,
        coro: Any,
        *,
        name: object = None,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[Any]:
        """Return a task, which is a strand if the actor starts it."""
        context = copy_context() if context is None else context
        cell = context.get(current_cell)
        if cell is not None and cell.traced is not None:
            coro = cell.traced.adopt(coro)
        return super().create_task(coro, name=name, context=context, **options)

    # The loop's own time is the actor's to use; these two replace `time`.

    def time(self) -> float:
        """Return the time of the turn, monotonic, seconds."""
        return super().monotonic_ns() / 1e9

    def monotonic_ns(self) -> int:
        """Return the time for the `time` module, and note its caller as a suspect."""
        self._suspect("the time module (use self.clock)")
        return super().monotonic_ns()

    def wall_ns(self) -> int:
        """As `monotonic_ns`."""
        self._suspect("the time module (use self.clock)")
        return super().wall_ns()


class _Owed:
    """Takes a replayed answer, which is recorded already."""

    def reply(self, message: Any) -> None:
        """Nowhere."""

    def post(self, message: Any) -> None:
        """Nowhere."""

    def fail(self, error: ActorError) -> None:
        """Nowhere."""


class ReplayedActor(TracedActor):
    """A replayed actor: holds every strand until its turn."""

    replays = True

    def __init__(self, loop: StageLoop, seed: int, now_ns: int, wall_ns: int) -> None:
        super().__init__(seed, now_ns, wall_ns)
        self._loop = loop
        self._permit: tuple[int, type[ev.ActorEvent] | None] | None = None
        self._held: dict[int, tuple[Strand, asyncio.Future[None]]] = {}
        self._outcomes: dict[int, tuple[Strand, asyncio.Future[Any]]] = {}
        self._actions: list[ev.Record[ev.ActorAction]] = []

    # For the stage.

    def permit(self, strand: int, begins: type[ev.ActorEvent] | None = None) -> None:
        """It is the turn of this strand: to go on, or to begin for the reason given."""
        self._permit = (strand, begins)
        held = self._held.get(strand)
        if held is not None and held[0].begins is begins:
            held[1].set_result(None)

    @property
    def waits_for_its_turn(self) -> bool:
        """Return whether the strand whose turn it is has not taken it."""
        return self._permit is not None

    def outcome(self, call: int) -> asyncio.Future[Any] | None:
        """Return the future that takes the outcome of a call; it is the caller's turn."""
        strand, future = self._outcomes.get(call, (None, None))
        if strand is None or future is None or future.done():
            return None
        self.permit(strand.number)
        return future

    def take_actions(self) -> list[ev.ActorAction]:
        """Return the actions of the actor since the last call."""
        self._permit = None
        actions, self._actions = self._actions, []
        return [kind(**fields) for kind, fields in actions]

    def set_wall_clock(self, ahead_ns: int) -> None:
        """The wall clock jumps."""
        self._wall_minus_monotonic_ns += ahead_ns

    def abandon(self) -> None:
        """Nothing that is done from now on counts."""
        self.closed = True

    # For the cell.

    def started(self, awaitable: Awaitable[None]) -> Awaitable[None]:
        """Begins with `Started`."""
        return Strand(self, SERVING, awaitable, ev.Started)

    def received(self, delivery: Delivery, awaitable: Awaitable[T]) -> Awaitable[T]:
        """Begins with `Received`."""
        return Strand(self, SERVING, awaitable, ev.Received, settles=False)

    def signalled(self, signal: Signal, awaitable: Awaitable[None]) -> Awaitable[None]:
        """Begins with the signal's event."""
        return Strand(self, SERVING, awaitable, _SIGNAL_EVENTS[type(signal)])

    def stopping(self, reason: Reason, awaitable: Awaitable[None]) -> Awaitable[None]:
        """Begins with `Stopping`."""
        return Strand(self, SERVING, awaitable, ev.Stopping, settles=False)

    def killed(self, reason: Reason) -> None:
        """Ignore it: the held strands will never run."""

    def withdrawn(self) -> None:
        """The event that says so has come."""

    # For the actor's interface.

    async def call(
        self,
        strand: Strand,
        number: int,
        perform: Callable[[], Awaitable[Any]],
        done: Callable[[int, Any], ev.Record[ev.ActorEvent]],
    ) -> Any:
        """The outcome is what an event says."""
        future = self._loop.create_future()
        self._outcomes[number] = (strand, future)
        try:
            return await future
        finally:
            del self._outcomes[number]

    def do(self, strand: Strand, perform: Callable[[], T], stand_in: Callable[[], T]) -> T:
        """Nothing is done."""
        return stand_in()

    def lose_track(self, why: str) -> NoReturn:
        """It was not lost when the actor was recorded, or the recording would have ended."""
        raise RuntimeError(f"the recorded actor did not do this: {why}")

    # Turns.

    def resumes(self, strand: Strand) -> asyncio.Future[None] | None:
        """A strand could go on: now, if None is returned; else it is held until the future is done."""
        if self.closed:
            return None
        if self._permit == (strand.number, strand.begins):
            self._permit = None
            self._held.pop(strand.number, None)
            strand.begins = None
            self.current = strand
            return None
        held = self._loop.create_future()
        self._held[strand.number] = (strand, held)
        return held

    def act(self, kind: Callable[P, ev.ActorAction], *args: P.args, **fields: P.kwargs) -> None:
        """Part of what `take_actions` returns."""
        if not self.closed:
            self._actions.append((kind, fields))

    def settle(self) -> None:
        """The turn is over."""
        self.current = None


_SIGNAL_EVENTS: dict[type[Signal], type[ev.ActorEvent]] = {
    Down: ev.DownReceived,
    Exited: ev.ExitReceived,
    Undelivered: ev.UndeliveredReceived,
}


class Stage:
    """One incarnation, replayed event by event. Close it at the end.

    make: calls the actor's constructor, in the system given.
    """

    def __init__(
        self,
        ref: RefData,
        seed: int,
        now_ns: int,
        wall_ns: int,
        make: Callable[[ActorSystem], tuple[type[Actor], list[Any], dict[str, Any]]],
    ) -> None:
        self.suspects: dict[str, None] = {}
        """The things that the actor used and that cannot be replayed: what, and where."""
        self._name = f"{ref.process}/{ref.actor}#{ref.incarnation}"
        stage = weakref.ref(self)
        self._loop = StageLoop(lambda what: _suspected(stage(), what))
        self._life = ReplayedActor(self._loop, seed, now_ns, wall_ns)
        self._ref = ref
        self._make = make
        self._cell: ActorCell | None = None
        self._system: ActorSystem | None = None

    def play(self, event: ev.ActorEvent, now_ns: int) -> list[ev.ActorAction]:
        """Let the event happen at `now_ns`, monotonic; what the actor did in this turn."""
        traced, loop = self._life, self._loop
        loop.now_ns = max(loop.now_ns, now_ns)
        traced.now_ns = now_ns
        if loop.turn(lambda: self._play(event, now_ns)):
            self.suspect("the random module (use self.random)", "")
        if traced.waits_for_its_turn:
            traced.act(ev.Stuck, at=_whereabouts(loop))
        return traced.take_actions()

    def _play(self, event: ev.ActorEvent, now_ns: int) -> None:
        traced, loop = self._life, self._loop
        cell = self._begun() if self._cell is None else self._cell
        loop.run_ready()
        self._deliver(cell, event)
        loop.run_ready()
        if isinstance(event, ev.Resumed):
            while traced.waits_for_its_turn and loop.fire_next(now_ns + TIMER_EARLY_NS_MAX):
                loop.run_ready()

    def close(self) -> None:
        """Throw away what is left of the actor."""
        self._life.abandon()
        self._loop.close()

    def check_invariants(self) -> None:
        """Raise `AssertionError` if something ran outside of a turn."""
        assert not self._life.waits_for_its_turn, f"{self._name}: a turn is left over"
        assert self._life.current is None, f"{self._name}: a strand is still running"

    def suspect(self, what: str, where: str) -> None:
        """The actor used something that cannot be replayed; each place is reported once."""
        text = f"{what} at {where}" if where else what
        if text not in self.suspects and len(self.suspects) < SUSPECTS_MAX:
            self.suspects[text] = None
            _log.warning("what follows from this cannot be replayed", actor=self._name, uses=text)

    def _begun(self) -> ActorCell:
        system = self._system = ActorSystem(self._ref.process, self._ref.process_incarnation)
        system.tracer = Tracing(system)
        cls, args, kwargs = self._make(system)
        system._last_actor = self._ref.incarnation - 1
        cell = self._cell = system._create(cls, args, kwargs, self._ref.actor, None, None)
        cell.traced = self._life
        return cell

    def _deliver(self, cell: ActorCell, event: ev.ActorEvent) -> None:
        traced = self._life
        match event:
            case ev.Started():
                traced.permit(SERVING, ev.Started)
            case ev.Received():
                owed = _Owed() if event.owed else None
                message = self._message(event.body)
                cell.mailbox.offer(
                    Delivery(message, event.deadline_ns, event.trace_id, event.sender, None, owed)
                )
                cell.wake()
                traced.permit(SERVING, ev.Received)
            case ev.DownReceived() | ev.ExitReceived() | ev.UndeliveredReceived():
                cell.mailbox.post(self._signal(event))
                cell.wake()
                traced.permit(SERVING, type(event))
            case ev.Stopping():
                cell.request_stop(_reason(event.reason))
                traced.permit(SERVING, ev.Stopping)
            case ev.Killed():
                cell.kill(_reason(event.reason))
            case ev.Resumed():
                traced.permit(event.strand)
            case ev.Withdrawn():
                cell.withdraw_current()
            case (
                ev.Sent() | ev.TellAllDone() | ev.Answered() | ev.SpawnedAs() | ev.DownAwaited() | ev.Failed()
            ):
                self._set_outcome(event)
            case ev.ClockSet():
                traced.set_wall_clock(event.ahead_ns)
            case _:
                assert_never(event)

    def _set_outcome(
        self, event: ev.Sent | ev.TellAllDone | ev.Answered | ev.SpawnedAs | ev.DownAwaited | ev.Failed
    ) -> None:
        future = self._life.outcome(event.call)
        if future is None:
            self._life.act(ev.Stuck, at=f"call {event.call} was not made")
            return
        match event:
            case ev.Sent():
                future.set_result(None)
            case ev.TellAllDone():
                future.set_result(event.failed)
            case ev.Answered():
                future.set_result(self._message(event.body) if event.body else None)
            case ev.SpawnedAs():
                future.set_result(self._bind(event.ref))
            case ev.DownAwaited():
                future.set_result(Down(self._bind(event.ref), _reason(event.reason)))
            case ev.Failed():
                future.set_exception(event.error)
            case _:
                assert_never(event)

    def _signal(self, event: ev.DownReceived | ev.ExitReceived | ev.UndeliveredReceived) -> Signal:
        ref = self._bind(event.ref)
        match event:
            case ev.DownReceived():
                return Down(ref, _reason(event.reason))
            case ev.ExitReceived():
                return Exited(ref, _reason(event.reason))
            case ev.UndeliveredReceived():
                return Undelivered(ref, event.contract, event.error)
            case _:
                assert_never(event)

    def _message(self, body: bytes) -> Contract:
        assert self._system is not None
        return self._system.codec.decode_contract(body)

    def _bind(self, ref: RefData) -> Ref:
        assert self._system is not None
        return self._system._bind(ref)


def _whereabouts(loop: StageLoop) -> str:
    """Return where each task waits: in which line of the actor's, and for what in the end."""
    places: list[str] = []
    for task in waiting([loop.main]):
        frames = [frame for frame in task.frames if not frame.startswith("cell.py:")]
        places.append(" > ".join(frames if len(frames) < 3 else (frames[0], frames[-1])))
    return "; ".join(places) or "it has no task left"


def _reason(data: ReasonData) -> Reason:
    return Reason(data.kind, data.text)


_OURS = ("zbmd.actors.", "zbmd.transport.", "asyncio.", "structlog.", "logging")


def _suspected(stage: Stage | None, what: str) -> None:
    """Return the caller, unless it is zbmd or a library that only measures time."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        module = str(frame.f_globals.get("__name__", ""))
        if module == __name__ or module.startswith("zbmd.transport.sim."):
            continue
        if stage is not None and not module.startswith(_OURS):
            name = frame.f_code.co_filename.rpartition("/")[2]
            stage.suspect(what, f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
        return
