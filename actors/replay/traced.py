"""An actor that is recorded or replayed: its strands, and the turns they take.

A strand is one line of execution of an actor: strand 0 handles signals and messages, every task that the
actor starts is one more, numbered in the order in which they are started. A strand's turn is what runs, in
one go, from its resumption until it waits again. Turns of one actor never overlap, so an incarnation is a
sequence of turns, and each has one cause: an event of `events`. Calls through the actor's own interface
(`Ref.ask`, `ActorSystem.spawn` …) end a turn and begin one with their outcome, even if they need not wait.

`RecordedActor` (`recording`) writes the sequence down as it happens; `ReplayedActor` (`stage`) makes
it happen as it is written down: a strand that could go on is held until its turn has come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec

from zbmd.actors.contracts import Contract, contract_tag
from zbmd.actors.core.cell import ActorCell
from zbmd.actors.core.native._mailbox import Delivery
from zbmd.actors.core.ref import Reason, Ref, Signal
from zbmd.actors.core.wire import RefData, reason_data
from zbmd.actors.replay import events
from zbmd.actors.replay._turns import SERVING, Strand

P = ParamSpec("P")
T = TypeVar("T")

_SERVE_CODE = ActorCell._run.__code__


class TracedActor(ABC):
    """The common part of a recorded and a replayed actor.

    seed: of `Actor.random`; now_ns: when the turn began, monotonic; replays: all has happened before, so that
    what was handled is handled whatever the clock says, and failures are not logged again.
    """

    replays = False

    def __init__(self, seed: int, now_ns: int, wall_ns: int) -> None:
        self.seed = seed
        self.now_ns = now_ns
        self.current: Strand | None = None
        self.closed = False
        self._strands = SERVING
        self._calls = 0
        self._wall_minus_monotonic_ns = wall_ns - now_ns

    # For the cell.

    @abstractmethod
    def started(self, awaitable: Awaitable[None]) -> Awaitable[None]:
        """`started()` is to run."""

    @abstractmethod
    def received(self, delivery: Delivery, awaitable: Awaitable[T]) -> Awaitable[T]:
        """A message is to be handled; its turn goes on until `replied`."""

    @abstractmethod
    def signalled(self, signal: Signal, awaitable: Awaitable[None]) -> Awaitable[None]:
        """A signal is to be handled."""

    @abstractmethod
    def stopping(self, reason: Reason, awaitable: Awaitable[None]) -> Awaitable[None]:
        """`stopping()` is to run; its turn goes on until `ended`."""

    @abstractmethod
    def killed(self, reason: Reason) -> None:
        """The actor is about to end from outside."""

    def replied(self, delivery: Delivery, reply: Any) -> None:
        """The handler has returned."""
        if delivery.reply_to is not None:
            self.act(events.Replied, message=self.text(reply))
        self.settle()

    def failed(self, reason: Reason) -> None:
        """The handler, or `started()`, has raised."""
        self.act(events.Crashed, reason=reason_data(reason))
        self.current = None  # but its turn may have one more outcome: that it has ended

    def ended(self, reason: Reason) -> None:
        """The actor has ended."""
        self.act(events.Ended, reason=reason_data(reason))
        self.settle()
        self.closed = True

    @abstractmethod
    def withdrawn(self) -> None:
        """The handler of the current message is about to be cancelled: its asker has given up."""

    # For the actor's interface.

    def sets_timer(self, timer: int, message: Contract, delay_s: float, again: bool) -> bool:
        """`Actor.after` and `every`; whether it is to fire."""
        if self.turn("after()") is not None:
            text = self.text(message)
            self.act(events.TimerSet, timer=timer, delay_s=float(delay_s), again=again, message=text)
        return not self.replays

    def cancels_timer(self, timer: int) -> None:
        """`Timer.cancel`."""
        if self.turn("Timer.cancel()") is not None:
            self.act(events.TimerCancelled, timer=timer)

    def defers(self, reply: int) -> None:
        """`Actor.defer`."""
        if self.turn("defer()") is not None:
            self.act(events.ReplyDeferred, reply=reply)

    def replies_later(self, reply: int, message: Contract | None) -> None:
        """`Deferred.reply`."""
        if self.turn("reply()") is not None:
            self.act(events.RepliedLater, reply=reply, message=self.text(message))

    def fails_later(self, reply: int, error: Exception) -> None:
        """`Deferred.fail`."""
        if self.turn("fail()") is not None:
            self.act(events.FailedLater, reply=reply, error=f"{type(error).__name__}: {error}")

    def stashes(self) -> None:
        """`Actor.stash`."""
        if self.turn("stash()") is not None:
            self.act(events.Stashed)

    def unstashes(self) -> None:
        """`Actor.unstash`."""
        if self.turn("unstash()") is not None:
            self.act(events.Unstashed)

    def wall_ns(self) -> int:
        """Return the wall clock at the turn's beginning, ns since 1970."""
        return self.now_ns + self._wall_minus_monotonic_ns

    def asks_to_stop(self, text: str) -> None:
        """`Actor.stop`."""
        if self.turn("stop()") is not None:
            self.act(events.StopAsked, text=text)

    def turn(self, what: str) -> Strand | None:
        """The strand whose turn it is, None if `what` is done for it by a call that is recorded itself."""
        strand = self.current
        if strand is None or strand.busy or self.closed:
            if strand is None:
                self.lose_track(f"{what} was called outside of its tasks, by a callback of the event loop")
            return None
        return strand

    def next_call(self) -> int:
        """Return the number of a call."""
        self._calls += 1
        return self._calls

    @abstractmethod
    async def call(
        self,
        strand: Strand,
        number: int,
        perform: Callable[[], Awaitable[Any]],
        done: Callable[[int, Any], events.Record[events.ActorEvent]],
    ) -> Any:
        """Await `perform()` for the actor; `done` makes an event of its result."""

    @abstractmethod
    def do(self, strand: Strand, perform: Callable[[], T], stand_in: Callable[[], T]) -> T:
        """The actor does something that has no outcome; `stand_in`: what it gets if nothing is done."""

    @abstractmethod
    def lose_track(self, why: str) -> None:
        """From here on the actor depends on more than is recorded."""

    def text(self, message: Any) -> str:
        """A message as it is compared; empty if it cannot be."""
        try:
            return events.encode_text(message)
        except Exception as error:  # noqa: BLE001 (a message's own types may raise anything)
            self.lose_track(f"a {type(message).__name__} cannot be encoded: {error}")
            return ""

    def body(self, message: Any) -> bytes:
        """A message as it is recorded; empty if it cannot be."""
        try:
            return events.encode_body(message)
        except Exception as error:  # noqa: BLE001 (as above)
            self.lose_track(f"a {type(message).__name__} cannot be encoded: {error}")
            return b""

    def answered(self, number: int, reply: Contract | None) -> events.Record[events.ActorEvent]:
        """Return the event of an answer."""
        if reply is None:
            return events.recorded(events.Answered, call=number, contract="", body=b"")
        return events.recorded(
            events.Answered, call=number, contract=contract_tag(reply), body=self.body(reply)
        )

    @abstractmethod
    def act(self, kind: Callable[P, events.ActorAction], *args: P.args, **fields: P.kwargs) -> None:
        """Part of the running turn's outcome; see `recorded`."""

    def adopt(self, coroutine: Any) -> Any:
        """Return what a new task in the actor's context is to run: a strand, if the actor starts it."""
        current = self.current
        if (
            current is None
            or current.busy
            or self.closed
            or isinstance(coroutine, Strand)
            or getattr(coroutine, "cr_code", None) is _SERVE_CODE
        ):
            return coroutine
        self._strands += 1
        return Strand(self, self._strands, coroutine)

    # For strands (see also `ReplayedActor.resumes`).

    @abstractmethod
    def settle(self) -> None:
        """The turn is over."""


# --- the arguments of an actor's constructor as bytes: plain data, references and contracts ---------------


ARGUMENT_DEPTH_MAX = 16
ARGUMENTS_BYTES_MAX = 1 << 20

_REF, _TUPLE, _CONTRACT = 1, 2, 3
_SCALARS = frozenset((type(None), bool, int, float, str, bytes))
_INTEGERS = range(-(1 << 63), 1 << 64)


class NotPlain(ValueError):
    """An argument cannot be given again from a recording."""


def pack_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Positional and named arguments as bytes. Raises `NotPlain`."""
    plain = [[_packed(value, str(number), 0) for number, value in enumerate(args)], {}]
    plain[1] = {name: _packed(value, name, 0) for name, value in kwargs.items()}
    packed = msgspec.msgpack.encode(plain)
    if len(packed) > ARGUMENTS_BYTES_MAX:
        raise NotPlain(f"its constructor was given {len(packed)} bytes of arguments")
    return packed


def unpack_arguments(
    packed: bytes, bind: Callable[[RefData], Ref], decode_contract: Callable[[bytes], Contract]
) -> tuple[list[Any], dict[str, Any]]:
    """What `pack_arguments` was given. Raises `ValueError` or `RecursionError` if these are no arguments."""

    def unpack(code: int, data: memoryview) -> Any:
        match code:
            case 1:
                return bind(msgspec.msgpack.decode(data, type=RefData))
            case 2:
                return tuple(items.decode(data))
            case 3:
                return decode_contract(bytes(data))
            case _:
                raise ValueError(f"no argument is an extension {code}")

    items = msgspec.msgpack.Decoder(list[Any], ext_hook=unpack)
    match msgspec.msgpack.Decoder(ext_hook=unpack).decode(packed):
        case [list(args), dict(kwargs)] if all(isinstance(name, str) for name in kwargs):
            return args, kwargs
        case _:
            raise ValueError("these are no arguments")


def _packed(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        if kind is int and value not in _INTEGERS:
            raise NotPlain(f"its constructor's argument {where} has more than 64 bits")
        return value
    if depth == ARGUMENT_DEPTH_MAX:
        raise NotPlain(f"its constructor's argument {where} nests deeper than {ARGUMENT_DEPTH_MAX}")
    if kind is list:
        return [_packed(item, where, depth + 1) for item in value]
    if kind is dict:
        return {_key(key, where): _packed(item, where, depth + 1) for key, item in value.items()}
    if kind is tuple:
        items = [_packed(item, where, depth + 1) for item in value]
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(items))
    if kind is Ref:
        return msgspec.msgpack.Ext(_REF, msgspec.msgpack.encode(value.key()))
    if isinstance(value, Contract):
        try:
            return msgspec.msgpack.Ext(_CONTRACT, events.encode_body(value))
        except Exception as error:
            raise NotPlain(f"its constructor's argument {where}, a {contract_tag(value)}: {error}") from error
    raise NotPlain(
        f"its constructor's argument {where} is a {kind.__qualname__}: neither plain data nor a Ref"
    )


def _key(key: Any, where: str) -> Any:
    if type(key) in _SCALARS:
        return key
    raise NotPlain(f"its constructor's argument {where} has a {type(key).__qualname__} as a key")
