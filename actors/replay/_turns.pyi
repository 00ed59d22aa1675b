from collections.abc import Awaitable, Callable, Coroutine
from types import CodeType, FrameType
from typing import Any, Final, ParamSpec, TypeVar

from zbmd.actors.contracts import Contract
from zbmd.actors.core.native._mailbox import Delivery
from zbmd.actors.core.ref import Ref
from zbmd.actors.replay.events import ActorAction, ActorEvent, Record
from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.capture.records import RawRecord

P = ParamSpec("P")
T = TypeVar("T")

SERVING: Final[int]
"""The strand that handles signals and messages."""
WALL_CHECK_NS: Final[int]
"""The shortest time between two checks of whether the wall clock has been set."""

class Turn:
    """One turn, as a recorder takes it in place of the two records of its event and its actions."""

    def unfold(self) -> list[RawRecord]:
        """The records. Of a turn that is open, or was the first time, the event alone: its actions are, or
        will be, a record that was taken by itself.
        """

class Turns:
    """The part of a recorded actor that runs at every message; `TracedActor` has the rest.

    Messages of plain values are kept by reference, as nothing can change them, and are encoded when the
    records are written; any other is encoded at once.
    """

    current: Strand | None
    closed: bool
    now_ns: int
    _calls: int
    _wall_minus_monotonic_ns: int
    _wall_checked_ns: int
    _stream: int
    def _follow(self, recorder: Recorder, digests: bool) -> None:
        """Record into `recorder`; once, when `now_ns` is known. digests: of actions, instead of them."""
    def received(self, delivery: Delivery, awaitable: Awaitable[T]) -> Awaitable[T]:
        """A message is to be handled; its turn goes on until `replied`."""
    def replied(self, delivery: Delivery, reply: Any) -> None:
        """The handler has returned."""
    def act(self, kind: Callable[P, ActorAction], *args: P.args, **fields: P.kwargs) -> None:
        """Part of the running turn's outcome; see `said`."""
    def settle(self) -> None:
        """The turn is over."""
    def _record(self, record: Record[ActorEvent]) -> None:
        """End the turn that runs, if any, and begin one with this event."""

class Wrapped:
    """Answers a debugger's questions about a coroutine by the one that is wrapped."""

    @property
    def cr_frame(self) -> FrameType | None: ...
    @property
    def cr_await(self) -> Any: ...
    @property
    def cr_code(self) -> CodeType | None: ...
    @property
    def cr_running(self) -> bool: ...

class Strand(Wrapped, Coroutine[Any, Any, Any]):
    """A coroutine of a traced actor: the tracing sees every turn, and may delay it.

    begins: what lets it begin, if that is not `Resumed`; settles: whether its last turn ends with it.
    """

    number: int
    begins: type[ActorEvent] | None
    settles: bool
    busy: bool
    """It is inside of a call whose outcome has an event of its own."""
    def __init__(
        self,
        traced: object,
        number: int,
        awaitable: Awaitable[Any],
        begins: type[ActorEvent] | None = None,
        settles: bool = True,
    ) -> None: ...
    def send(self, value: object) -> Any: ...
    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any: ...
    def close(self) -> None: ...
    def __await__(self) -> Strand: ...
    def __iter__(self) -> Strand: ...
    def __next__(self) -> Any: ...

class Call(Wrapped, Coroutine[Any, Any, Any]):
    """An ask or a tell of a recorded actor: `coroutine`, which does it, whose begin and end are recorded."""

    def __init__(
        self,
        traced: Turns,
        coroutine: Coroutine[Any, Any, Any],
        ref: Ref,
        message: Contract,
        asks: bool,
        wanted: type[Any] | None = None,
        timeout: float | None = None,
    ) -> None: ...
    def send(self, value: object) -> Any: ...
    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any: ...
    def close(self) -> None: ...
    def __await__(self) -> Call: ...
    def __iter__(self) -> Call: ...
    def __next__(self) -> Any: ...
