"""The recorded inputs and outputs of an actor: the events and actions of the kind `actor`.

One event is one turn: it lets one *strand* of the actor (0 is the one that handles messages; each task that
the actor starts is another) run until it waits again, and the actions are what the actor did in that turn. So
nothing is left to a scheduler, and an actor is a pure function of its events.

Messages go in as they would on the wire (`body`), so that they come back the same; they go out as text, so
that a difference can be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, ParamSpec, TypeAlias, TypeVar, cast

import msgspec
import xxhash

from zbmd.actors.core.ref import Ref
from zbmd.actors.core.wire import ReasonData, RefData
from zbmd.transport.capture.codec import UnionCodec, captured_name, encode
from zbmd.transport.capture.errors import CaptureMismatch
from zbmd.transport.errors import ZbmdError

TEXT_BYTES_MAX = 4096
"""A larger message given out is recorded by its digest: it need not come back, only be compared."""

# ---- in


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """`started()` begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message is handled. owed: its sender waits for an answer; deadline_ns: monotonic, 0 for none."""

    contract: str
    body: bytes
    sender: str
    owed: bool
    deadline_ns: int
    trace_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DownReceived:
    """`Down` is handled."""

    captured_as: ClassVar[str] = "DownCame"
    ref: RefData
    reason: ReasonData


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReceived:
    """`Exited` is handled."""

    captured_as: ClassVar[str] = "ExitCame"
    ref: RefData
    reason: ReasonData


@dataclass(frozen=True, slots=True, kw_only=True)
class UndeliveredReceived:
    """`Undelivered` is handled."""

    captured_as: ClassVar[str] = "BounceCame"
    ref: RefData
    contract: str
    error: ZbmdError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """`stopping()` begins."""

    reason: ReasonData


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """Nothing of the actor runs any more."""

    reason: ReasonData


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A strand begins, or goes on: a timer fired, another strand made way, or it was cancelled."""

    strand: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A tell has been taken."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An ask was answered; an empty body is None."""

    call: int
    contract: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnedAs:
    """A spawn is done."""

    call: int
    ref: RefData


@dataclass(frozen=True, slots=True, kw_only=True)
class DownAwaited:
    """The end that the actor waited for has come."""

    call: int
    ref: RefData
    reason: ReasonData


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A call raised."""

    call: int
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSet:
    """The wall clock has been set, so far ahead (or back) of where it would have been."""

    ahead_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """The asker of the message that is handled has given up: its handler is cancelled, in a turn to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TellAllDone:
    """A cast has been taken, but for those of its addressees, by place."""

    captured_as: ClassVar[str] = "CastDone"
    call: int
    failed: dict[int, ZbmdError]


ActorEvent: TypeAlias = (
    Started
    | Received
    | DownReceived
    | ExitReceived
    | UndeliveredReceived
    | Stopping
    | Killed
    | Resumed
    | Sent
    | Answered
    | SpawnedAs
    | DownAwaited
    | Failed
    | ClockSet
    | Withdrawn
    | TellAllDone
)

# ---- out


@dataclass(frozen=True, slots=True, kw_only=True)
class TellSent:
    """`Ref.tell`."""

    captured_as: ClassVar[str] = "Told"
    call: int
    to: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`Ref.ask`, with what its caller gave."""

    call: int
    to: str
    message: str
    timeout_s: float | None
    reply: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replied:
    """The handler's answer."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellAllSent:
    """`ActorSystem.tell_all`."""

    captured_as: ClassVar[str] = "CastTo"
    call: int
    to: list[str]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerSet:
    """`Actor.after`, `Actor.every`. When it fires, its message is `Received`."""

    timer: int
    delay_s: float
    again: bool
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerCancelled:
    """`Timer.cancel`."""

    timer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDeferred:
    """`Actor.defer`, for the `reply`-th time."""

    reply: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepliedLater:
    """`Deferred.reply`."""

    reply: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedLater:
    """`Deferred.fail`."""

    reply: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stashed:
    """`Actor.stash`. The message is `Received` once more after `Unstashed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstashed:
    """`Actor.unstash`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """An actor is spawned. arguments: empty if they are more than plain data."""

    call: int
    process: str
    actor_class: str
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminated:
    """`ActorSystem.terminate`."""

    call: int
    to: str
    timeout_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitsDown:
    """`Monitor.down`."""

    call: int
    to: str
    timeout_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitored:
    """A monitor is set; as_signal: for a `Down`."""

    to: str
    as_signal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmonitored:
    """`Monitor.cancel`."""

    to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLinked:
    """`Actor.link`."""

    captured_as: ClassVar[str] = "Linked"
    to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlinked:
    """`Actor.unlink`."""

    to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitSent:
    """`ActorSystem.exit`."""

    to: str
    reason: ReasonData


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """`Actor.stop`."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """The handler, or `started()`, raised."""

    reason: ReasonData


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The actor has ended."""

    reason: ReasonData


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """Only when replayed: the event let nothing run. at: where the actor's tasks wait instead."""

    at: str


ActorAction: TypeAlias = (
    TellSent
    | Asked
    | Replied
    | TellAllSent
    | TimerSet
    | TimerCancelled
    | ReplyDeferred
    | RepliedLater
    | FailedLater
    | Stashed
    | Unstashed
    | Spawned
    | Terminated
    | AwaitsDown
    | Monitored
    | Unmonitored
    | ActorLinked
    | Unlinked
    | ExitSent
    | StopAsked
    | Crashed
    | Ended
    | Stuck
)

# ---- values

P = ParamSpec("P")
T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=Exception)

Record: TypeAlias = tuple[Callable[..., T], dict[str, Any]]
"""An event or action that is not made yet: its class, and its fields in their order. A log takes it as it is,
and making a frozen dataclass would cost more than all the rest of recording it."""


def recorded(kind: Callable[P, T], *args: P.args, **fields: P.kwargs) -> Record[T]:
    """`kind(**fields)`, to be made when it is needed; all fields are given by name, in their order."""
    return kind, fields


class RecordCodec(UnionCodec[Record[Any]]):
    """Writes what the codec of the union would for the same events and actions."""

    def __init__(self) -> None:
        """It only writes."""

    def tag(self, instance: Record[Any]) -> str:
        """Return the name under which captures hold the class."""
        return captured_name(instance[0])

    def encode(self, instance: Record[Any]) -> bytes:
        """Return the fields as a map."""
        return _encode_fields(instance[1])

    def encode_all(self, instances: Iterable[Record[Any]]) -> bytes:
        """As `[[tag, fields], …]`."""
        named = [(captured_name(kind), fields) for kind, fields in instances]
        return _encode_fields(named) if named else _NO_ACTIONS


_encode_fields = msgspec.msgpack.Encoder().encode
_NO_ACTIONS = _encode_fields([])


def _enc_hook(value: Any) -> Any:
    if isinstance(value, Ref):
        return value.key()
    raise NotImplementedError(f"{type(value).__name__} cannot be part of a message")


encode_body = msgspec.msgpack.Encoder(enc_hook=_enc_hook).encode
"""A message's MessagePack. Raises what msgspec raises, or `NotImplementedError`."""

_WHOLE_FLOAT = re.compile(r"(?<=\d)\.0(?=[],}])")
_encode_text = msgspec.json.Encoder(enc_hook=_enc_hook, order="deterministic").encode


def encode_text(message: Any) -> str:
    """A message as it is shown and compared: JSON, or its size and digest if it is large. Raises as above."""
    body = encode_body(message)
    if len(body) > TEXT_BYTES_MAX:
        return f"{type(message).__name__}: {len(body)} bytes, XXH3-128 {xxhash.xxh3_128_hexdigest(body)}"
    text = _encode_text(message).decode()
    # A sender of this process may have put 5 into a field for floats, which comes back from a body as 5.0.
    return _WHOLE_FLOAT.sub("", text) if ".0" in text else text


def ref_data(ref: Ref) -> RefData:
    """A reference as it is recorded."""
    return RefData(*ref.key())


def ref_text(ref: Ref) -> str:
    """A reference as it is shown: `process#incarnation/actor#incarnation`, 0 for whichever it is."""
    return f"{ref.process}#{ref.process_incarnation}/{ref.actor}#{ref.incarnation}"


def recordable(error: ErrorT) -> ErrorT:
    """The error as it is recorded; with its text alone, if it holds more than plain values."""
    try:
        packed = encode(error)
    except CaptureMismatch:
        packed = encode(error.__class__.__new__(error.__class__, str(error)))
    return cast("ErrorT", msgspec.Raw(packed))
