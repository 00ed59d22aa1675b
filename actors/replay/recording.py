"""Recording actors: a system whose actors are streams of a capture, ready to be replayed.

    system = captured_system(name, incarnation, recorder=recorder)

in place of an `ActorSystem`, and every incarnation of an actor spawned here is a stream of the kind `actor`,
named after the actor and its incarnation. While it is open, tasks are made by a task factory of its own,
which the loop's former one, if any, is called by.

An incarnation that cannot be replayed is still recorded, to be read; its stream says why: the class is
local to a function, the constructor was given more than plain data, references and contracts, or the actor
did something whose outcome is not recorded (`lose_track`). Then its stream ends, and another goes on under
the same name.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast
from weakref import WeakKeyDictionary

from zbmd.actors.contracts import Contract, contract_tag, fingerprint
from zbmd.actors.core.actor import SEED_BYTES
from zbmd.actors.core.actor_base import ActorBase, handler_table, remote_class_id
from zbmd.actors.core.cell import ActorCell
from zbmd.actors.core.context import current_cell
from zbmd.actors.core.ref import Down, Exited, Reason, Ref, Signal, Undelivered
from zbmd.actors.core.wire import reason_data
from zbmd.actors.replay import events as ev
from zbmd.actors.replay._turns import SERVING, Strand, Turns
from zbmd.actors.replay.traced import NotPlain, TracedActor, pack_arguments
from zbmd.actors.replay.tracing import Tracing
from zbmd.actors.system import ActorSystem
from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.machine import Machine

T = TypeVar("T")

WALL_AHEAD_NS_MAX = 1_000_000
"""A wall clock that is further from where it should be has been set."""
REASON_CHARS_MAX = 4096


def _build(config: Mapping[str, Any]) -> Machine[ev.ActorEvent, ev.ActorAction]:
    from zbmd.actors.replay.machine import ActorReplay

    return ActorReplay.build(config)


ACTOR: MachineKind[ev.ActorEvent, ev.ActorAction] = register(
    "actor", 1, _build, events=ev.ActorEvent, actions=ev.ActorAction
)


class RecordedActor(Turns, TracedActor):
    """A recorded actor: writes each turn as it happens."""

    def __init__(self, recorder: Recorder, config: dict[str, Any], name: str) -> None:
        now_ns, wall_ns = recorder.now_ns(), time.time_ns()
        seed = int.from_bytes(os.urandom(SEED_BYTES))
        super().__init__(seed, now_ns, wall_ns)
        self._recorder = recorder
        self._config = {**config, "seed": seed, "now_ns": now_ns, "wall_ns": wall_ns}
        self._name = name
        self._stream = recorder.declare_machine(ACTOR, name, self._config)
        self._follow(recorder, recorder.keeps_digests)

    # For the cell.

    def started(self, awaitable: Awaitable[None]) -> Awaitable[None]:
        """`started()` is to run."""
        return self._begin(ev.recorded(ev.Started), awaitable)

    def signalled(self, signal: Signal, awaitable: Awaitable[None]) -> Awaitable[None]:
        """A signal is to be handled."""
        event: ev.Record[ev.ActorEvent]
        match signal:
            case Down(ref=ref, reason=reason):
                event = ev.recorded(ev.DownReceived, ref=ev.ref_data(ref), reason=reason_data(reason))
            case Exited(ref=ref, reason=reason):
                event = ev.recorded(ev.ExitReceived, ref=ev.ref_data(ref), reason=reason_data(reason))
            case Undelivered(ref=ref, contract=contract, error=error):
                what = ev.recordable(error)
                event = ev.recorded(
                    ev.UndeliveredReceived, ref=ev.ref_data(ref), contract=contract, error=what
                )
            case _:
                self.lose_track(f"{type(signal).__name__} is no signal that can be recorded")
                return awaitable
        return self._begin(event, awaitable)

    def stopping(self, reason: Reason, awaitable: Awaitable[None]) -> Awaitable[None]:
        """`stopping()` is to run; its turn goes on until `ended`."""
        return self._begin(ev.recorded(ev.Stopping, reason=reason_data(reason)), awaitable, settles=False)

    def killed(self, reason: Reason) -> None:
        """The actor is about to end from outside."""
        if not self.closed:
            self._record(ev.recorded(ev.Killed, reason=reason_data(reason)))

    def withdrawn(self) -> None:
        """The handler of the current message is about to be cancelled."""
        if not self.closed:
            self._record(ev.recorded(ev.Withdrawn))
            self.settle()

    def ended(self, reason: Reason) -> None:
        """The actor has ended."""
        if not self.closed:
            super().ended(reason)
            self._recorder.end_stream(self._stream, str(reason))

    def _begin(
        self, event: ev.Record[ev.ActorEvent], awaitable: Awaitable[T], *, settles: bool = True
    ) -> Awaitable[T]:
        strand = Strand(self, SERVING, awaitable, settles=settles)
        self._record(event)
        self.current = strand
        return cast("Awaitable[T]", strand)

    # For the actor's interface.

    async def call(
        self,
        strand: Strand,
        number: int,
        perform: Callable[[], Awaitable[Any]],
        done: Callable[[int, Any], ev.Record[ev.ActorEvent]],
    ) -> Any:
        """Await `perform()` and record how it went."""
        strand.busy = True
        try:
            result = await perform()
        except BaseException as error:
            strand.busy = False
            self.call_failed(strand, number, error)
            raise
        strand.busy = False
        self._go_on(strand, done(number, result))
        return result

    def call_failed(self, strand: Strand, number: int, error: BaseException) -> None:
        """A call raised."""
        if isinstance(error, asyncio.CancelledError):
            self._go_on(strand, ev.recorded(ev.Resumed, strand=strand.number))
        elif isinstance(error, Exception):
            self._go_on(strand, ev.recorded(ev.Failed, call=number, error=ev.recordable(error)))

    def do(self, strand: Strand, perform: Callable[[], T], stand_in: Callable[[], T]) -> T:
        """The actor does something that has no outcome."""
        strand.busy = True
        try:
            return perform()
        except Exception as error:
            self.lose_track(f"what it did at once raised {type(error).__name__}: {error}")
            raise
        finally:
            strand.busy = False

    def lose_track(self, why: str) -> None:
        """End the stream; what follows goes into one that says why it can only be read."""
        if self.closed or self._config["unreplayable"]:
            return
        self.settle()
        self._recorder.end_stream(self._stream, f"can be replayed up to here: {why}")
        self._config = {**self._config, "unreplayable": why[:REASON_CHARS_MAX]}
        self._stream = self._recorder.declare_machine(ACTOR, self._name, self._config)

    # Turns.

    def _go_on(self, strand: Strand, event: ev.Record[ev.ActorEvent]) -> None:
        if not self.closed:
            self._record(event)
            self.current = strand

    def _follow_wall_clock(self) -> None:
        self._wall_checked_ns = self.now_ns
        ahead_ns = time.time_ns() - self.wall_ns()
        if abs(ahead_ns) > WALL_AHEAD_NS_MAX:
            self._wall_minus_monotonic_ns += ahead_ns
            clock_set = ev.recorded(ev.ClockSet, ahead_ns=ahead_ns)
            self._recorder.event(self._stream, _codec, clock_set, self.now_ns)
            self._recorder.acted(self._stream, _codec, [], self.now_ns)


_codec = ev.RecordCodec()


class ActorRecording(Tracing):
    """Records a system's actors; see the module's text."""

    def __init__(self, system: ActorSystem, recorder: Recorder) -> None:
        super().__init__(system)
        self._recorder = recorder
        self._factory = StrandFactory.install(system.loop)

    def creating(
        self, cls: type[ActorBase], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bytes, str] | None:
        """Pack the constructor's arguments."""
        return _pack(args, kwargs) if cls.captured else None

    def created(self, cell: ActorCell, before: tuple[bytes, str] | None) -> None:
        """Begin the stream of an incarnation."""
        if before is not None:
            stream = f"{cell.name}#{cell.ref.incarnation}"
            cell.traced = RecordedActor(self._recorder, _config(cell.ref, type(cell.actor), *before), stream)

    def stopped(self) -> None:
        """Give the loop its former task factory."""
        self._factory.release()


def captured_system(name: str, incarnation: int = 1, *, recorder: Recorder, scope: str = "") -> ActorSystem:
    """Return an actor system whose actors are recorded; see the module's text."""
    system = ActorSystem(name, incarnation, recorder=recorder, scope=scope)
    system.tracer = ActorRecording(system, recorder)
    return system


class StrandFactory:
    """Makes strands of the tasks that recorded actors start. One a loop, however many systems it has."""

    _installed: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, StrandFactory]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._former = loop.get_task_factory()
        self._users = 0

    @classmethod
    def install(cls, loop: asyncio.AbstractEventLoop) -> StrandFactory:
        """Return the loop's; the caller owes a `release`."""
        factory = cls._installed.get(loop)
        if factory is None:
            factory = cls._installed[loop] = cls(loop)
            loop.set_task_factory(factory)
        factory._users += 1
        return factory

    def release(self) -> None:
        """Not needed any more; once by each who installed it."""
        self._users -= 1
        loop = self._loop()
        if self._users or loop is None:
            return
        del self._installed[loop]
        if loop.get_task_factory() is self:  # else someone has put another in front, who calls this one
            loop.set_task_factory(self._former)

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Future[Any]:
        context = options.get("context")
        cell = current_cell.get() if context is None else context.get(current_cell)
        if cell is not None and cell.traced is not None:
            coroutine = cell.traced.adopt(coroutine)
        if self._former is not None:
            return self._former(loop, coroutine, **options)
        return asyncio.Task(coroutine, loop=loop, **options)


def _config(ref: Ref, cls: type[ActorBase], arguments: bytes, unreplayable: str) -> dict[str, Any]:
    if "<locals>" in cls.__qualname__:
        unreplayable = f"{remote_class_id(cls)} is local to a function: it cannot be found again"
    table = handler_table(cls)
    contracts = {*table, *(reply for handler in table.values() for reply in handler.replies)}
    return {
        "actor_class": remote_class_id(cls),
        "arguments": arguments,
        "unreplayable": unreplayable,
        "process": ref.process,
        "process_incarnation": ref.process_incarnation,
        "actor": ref.actor,
        "incarnation": ref.incarnation,
        "contracts": {contract_tag(c): fingerprint(c) for c in contracts if issubclass(c, Contract)},
    }


def _pack(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the constructor's arguments, and why they cannot be given again, if they cannot."""
    try:
        return pack_arguments(args, kwargs), ""
    except NotPlain as error:
        return b"", str(error)
