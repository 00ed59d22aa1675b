from asyncio import AbstractEventLoop, Task
from collections.abc import Awaitable, Coroutine, Generator, Mapping
from typing import Any, Final, Literal

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor_base import ActorBase, Handler
from zbmd.actors.core.cell import ActorCell
from zbmd.actors.core.native._mailbox import Delivery, Mailbox
from zbmd.actors.core.ref import Reason, Ref
from zbmd.actors.core.services import Tracer
from zbmd.actors.core.timers import DeadlineWheel
from zbmd.actors.replay.traced import TracedActor

TURN_NS: Final[int]
"""The time that an actor handles messages before the loop gets its turn; see `MESSAGES_PER_LOOK`."""
MESSAGES_PER_LOOK: Final[int]
LOOKS_PER_TURN: Final[int]
"""So often it looks before that if it is fast, and nobody in the process waits for an answer."""
TELLS_PER_TURN: Final[int]
"""After how many tells to actors of this process the loop gets its turn, lest one sender keep it.

At once, if somebody waits for an answer and the receiver has more than enough to do."""

RESTING_MAX: Final[int]
"""Tasks that rest between two messages. Of all other actors the task ends when nothing waits, and a new one
is made for the next message: that takes more time."""
REST_S: Final[float]
"""The least time that a task rests before its actor counts as idle, seconds."""
ENDED_MAX: Final[int]
"""Tasks of idle actors that are ended at a time, lest the loop be kept."""

class CellCore:
    """The part of an actor that every message touches. An unset field is None.

    traced: what records or replays it, or None; task: what serves the mailbox, None while it is idle;
    current: the message that is being handled; turns: how often the loop gave it its turn.
    """

    mailbox: Mailbox
    actor: ActorBase
    handlers: Mapping[type, Handler]
    traced: TracedActor | None
    task: Task[None] | None
    current: Delivery | None
    name: str
    incarnation: int
    system: Any
    """Its `CoreSystem`."""
    ref: Ref
    accepts: bool
    handled: int
    turns: int
    _stop: Reason | None
    _withdrawn: Delivery | None
    @property
    def _resting(self) -> Task[None] | None:
        """The task that has just served the mailbox and may again: see `RESTING_MAX` and `REST_S`."""

    def __init__(self, *_: Any) -> None: ...
    def wake(self) -> None:
        """Serve the mailbox; call it after each message taken in. `_new_task` makes the task, if need be."""

class Serving:
    """Awaited, it handles messages until there are none, or something is out of the ordinary.

    It yields to the loop when a turn is over, and waits for the next message, as one of `RESTING_MAX`. Its
    result is what is to be awaited for room on an answer's way back, None if nothing waits, or False if
    somebody should look at what comes next.
    """

    def __init__(self, cell: ActorCell) -> None: ...
    def __await__(self) -> Generator[Any, Any, Awaitable[None] | Literal[False] | None]: ...
    def is_over(self) -> bool:
        """Whether the loop is to get its turn now, before the message that is about to be handled."""

class Tell(Coroutine[Any, Any, None]):
    """What `Ref.tell` returns: the short way, and `tell_at_length` where something is out of the ordinary."""

    def __init__(self, system: Post, ref: Ref, message: Contract) -> None: ...
    def send(self, value: object) -> Any: ...
    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any: ...
    def close(self) -> None: ...
    def __await__(self) -> Tell: ...
    def __iter__(self) -> Tell: ...
    def __next__(self) -> Any: ...

class Post:
    """The part of a system that every message touches."""

    _cells: dict[str, ActorCell]
    name: str
    incarnation: int
    deadlines: DeadlineWheel
    _last_trace: int
    loop: AbstractEventLoop
    tracer: Tracer | None
    """Records or replays what actors do by way of their system, if they are recorded or replayed."""
    rest_s: float
    """An actor whose task has rested for once or twice as long is idle: the task ends. Seconds."""
    @property
    def resting(self) -> int:
        """Tasks of actors that wait for the next message of many."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def new_trace(self) -> int:
        """A trace id for what nothing else has caused."""
    def has_told(self, cell: ActorCell) -> bool:
        """Note a tell to an actor of this process; return whether the loop is to get its turn now."""
    def _end_rests(self) -> None:
        """End the tasks that have rested since the last call; due every `rest_s` while there are any."""
    def _tell(self, ref: Ref, message: Contract) -> Coroutine[Any, Any, None]:
        """Return the coroutine of `Ref.tell`."""
