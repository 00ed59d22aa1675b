"""Events and actions of simulated machines, conditions, history and failures. See the package's docstring."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, overload

import msgspec

from zbmd.transport.errors import LocalProtocolError, UserError, ZbmdError
from zbmd.transport.machine import Machine

# Errors of the asyncio simulator.


class NotSimulated(LocalProtocolError):
    """There is no real I/O, signal or thread in a simulation."""


class Livelock(ZbmdError):
    """Callbacks keep running and virtual time stands still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A task that has not ended, and where it waits."""

    process: str
    task: str
    frames: tuple[str, ...]
    """The outermost await first, as `file:line in function`."""

    def __str__(self) -> str:
        return f"{self.process} {self.task}: " + " > ".join(self.frames)


class Deadlock(ZbmdError):
    """Nothing can run and no timer is set, while tasks wait: nothing will ever happen again.

    `waiting` says what every task waits for.
    """

    def __init__(self, waiting: Sequence[Waiting]) -> None:
        lines = "\n".join(f"    {task}" for task in waiting) or "    (no task is left)"
        super().__init__(f"nothing can run and no timer is set; {len(waiting)} tasks wait:\n{lines}")
        self.waiting = tuple(waiting)


MessageT = TypeVar("MessageT")
EventT = TypeVar("EventT")
ActionT = TypeVar("ActionT")

SIM_START_NS = 1_000_000_000
"""Virtual time starts here, not at zero, so that a zero deadline that means "none" is never a real one."""

MAX_EVENTS_DEFAULT = 200_000
"""A run that takes more events than this has not ended by itself: reported as a failure."""

STORY_RECORDS = 40
"""Number of the last records that a failure quotes."""


# --- stimuli of a process -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The process begins. The first stimulus of every incarnation."""

    incarnation: int


class Arrived(msgspec.Struct, Generic[MessageT], frozen=True, kw_only=True):
    """A message arrived from `sender`'s incarnation `incarnation` (which may have died since)."""

    sender: str
    incarnation: int
    message: MessageT


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """The timer `name` is due."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEnded:
    """`peer`'s incarnation `incarnation` is no more; `clean` if it left by itself. Told at most once.

    Incarnation 0: we sent to a peer that has not started yet.
    """

    peer: str
    incarnation: int
    clean: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Commanded:
    """A stimulus of the scenario: what a user or an upper layer would ask for."""

    command: object


Stimulus: TypeAlias = Started | Arrived[MessageT] | TimerFired | PeerEnded | Commanded


# --- what a process does --------------------------------------------------------------------------------


class Send(msgspec.Struct, Generic[MessageT], frozen=True, kw_only=True):
    """Send `message` to the process `to`; `nbytes` is what it costs on the wire.

    It goes to the incarnation of `to` that lives now, and to no later one. If none lives, the sender gets
    that process's `PeerEnded` (unless it had it already). To oneself: delivered at once, and never lost.
    """

    to: str
    message: MessageT
    nbytes: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Set the timer `name`, in place of one of the same name; a time that has passed means at once."""

    name: str
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTimer:
    """Cancel the timer `name` if it is set."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Write `value` into the history, for checkers and for whoever reads it."""

    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a new incarnation of `process`, which must not live then; takes a while, as a fork does."""

    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Kill `process` with SIGKILL."""

    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Leave cleanly: what was sent arrives, and peers get `clean=True`. Later effects are dropped."""


Effect: TypeAlias = Send[MessageT] | SetTimer | CancelTimer | Note | Start | Kill | Exit


class Process(Protocol[MessageT]):
    """One simulated process: a machine behind an adapter. Lost, with all its state, when it is killed."""

    def deliver(self, stimulus: Stimulus[MessageT], *, now_ns: int) -> Sequence[Effect[MessageT]]:
        """Take one stimulus at virtual time `now_ns` and return what to do, in order."""
        ...

    def check_invariants(self) -> None:
        """Raise `AssertionError` on a state that may not be. Called after every delivery."""
        ...


class MachineProcess(Generic[EventT, ActionT, MessageT]):
    """A machine as a simulated process.

    `to_events` turns a stimulus into the machine's events (none: it does not care), `to_effects` an action
    into effects. Both are pure and hold no state of their own, like any driver.
    """

    def __init__(
        self,
        machine: Machine[EventT, ActionT],
        *,
        to_events: Callable[[Stimulus[MessageT]], Iterable[EventT]],
        to_effects: Callable[[ActionT], Iterable[Effect[MessageT]]],
    ) -> None:
        self.machine = machine
        self._to_events = to_events
        self._to_effects = to_effects

    def deliver(self, stimulus: Stimulus[MessageT], *, now_ns: int) -> Sequence[Effect[MessageT]]:
        """Run the machine over the stimulus's events; its actions become effects, in order."""
        effects: list[Effect[MessageT]] = []
        for event in self._to_events(stimulus):
            for action in self.machine.handle(event, now_ns=now_ns):
                effects.extend(self._to_effects(action))
        return effects

    def check_invariants(self) -> None:
        """Check the machine's own invariants."""
        self.machine.check_invariants()


# --- the world ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The behaviour of the network and the machine underneath.

    Messages of a pair arrive in order and each takes `latency_ns` plus up to `jitter_ns` plus its bytes'
    time on a link of `bandwidth_bytes_per_s`; `loss`, `duplicate` and `reorder` are probabilities per
    message. A death is noticed by each peer after `notice_min_ns` to `notice_max_ns`. Notice is not a
    fence: a dead process's messages may arrive after it, unless `notice_is_fence` says that the driver
    drops those. Timers are up to `timer_lag_ns` late; a start takes `start_min_ns` to `start_max_ns`.
    """

    latency_ns: int = 20_000
    jitter_ns: int = 20_000
    bandwidth_bytes_per_s: int = 10_000_000_000
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    timer_lag_ns: int = 0
    notice_min_ns: int = 100_000
    notice_max_ns: int = 2_000_000
    notice_is_fence: bool = False
    start_min_ns: int = 2_000_000
    start_max_ns: int = 50_000_000

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "reorder"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UserError(f"{name} is a probability per message: give a number from 0 to 1")
        if min(self.latency_ns, self.jitter_ns, self.timer_lag_ns) < 0 or self.bandwidth_bytes_per_s <= 0:
            raise UserError("latency, jitter and timer lag must be at least 0 ns, the bandwidth above 0 B/s")
        if (
            not 0 <= self.notice_min_ns <= self.notice_max_ns
            or not 0 <= self.start_min_ns <= self.start_max_ns
        ):
            raise UserError("give the notice and start times as 0 <= min_ns <= max_ns")


CALM = Conditions()
"""Reliable, ordered, prompt: what liveness is asked under."""


class HistoryKind(Enum):
    """The kind of a record of the history."""

    DELIVER = "<-"
    SEND = "->"
    LOSE = "lost"
    DROP = "drop"
    TIMER = "timer"
    NOTE = "note"
    START = "start"
    CRASH = "crash"
    EXIT = "exit"
    PAUSE = "pause"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the history: at `at_ns`, `process` (incarnation `incarnation`), `kind`, and `detail`."""

    at_ns: int
    process: str
    incarnation: int
    kind: HistoryKind
    detail: object

    def __str__(self) -> str:
        us = (self.at_ns - SIM_START_NS) / 1000
        return f"{us:12.3f} us {self.process}#{self.incarnation} {self.kind.value} {self.detail}"


@dataclass(frozen=True, slots=True, order=True)
class KillPoint:
    """Between two effects: `process` dies in its `delivery`-th stimulus (from 1) after `effects` effects."""

    process: str
    incarnation: int
    delivery: int
    effects: int


class RunEnd(Enum):
    """Why a run ended without a failure."""

    REACHED = "the condition holds"
    QUIET = "nothing is under way any more"
    TIME_UP = "virtual time is up"


class FailureKind(Enum):
    """The kind of failure that ended a run."""

    CRASH = "crash"
    """An exception that nobody expects."""
    SAFETY = "safety"
    """A checker or an invariant: something happened that must never happen."""
    LIVENESS = "liveness"
    """Something that must happen does not."""


class SimulationFailure(ZbmdError):
    """A checker, an invariant or a machine failed, or the run did not end. Says how to see it again.

    `kind`, `seed`, `at_ns` and `story` (the last records before it) are kept; `__cause__` is the first error.
    """

    def __init__(
        self,
        what: str,
        *,
        kind: FailureKind,
        seed: int | str,
        at_ns: int,
        events: int,
        story: Sequence[Record],
    ) -> None:
        lines = "\n".join(f"    {record}" for record in story)
        super().__init__(f"seed {seed!r}, event {events}: {what}\n  the last {len(story)} records:\n{lines}")
        self.kind = kind
        self.what = what
        self.seed = seed
        self.at_ns = at_ns
        self.story = tuple(story)


# The history of a run: what happened, in order, and a digest that tells two runs apart.
#
# Recording appends one tuple and nothing else; records are made, and hashed in batches, when they are asked
# for. What is recorded must therefore not change afterwards: messages are frozen.

BATCH_RECORDS = 4096
"""Number of records that are encoded at once for the digest."""

Raw: TypeAlias = tuple[int, str, int, HistoryKind, object]
"""The fields of a `Record`: time, ns; process; incarnation; kind; detail."""


def _plain(value: object) -> Any:
    """What msgspec cannot encode by itself, in words. (It asks for no other types than those.)"""
    return repr(value)


class History(Sequence[Record]):
    """The records of one run. Append to `raw`; everything else reads."""

    def __init__(self) -> None:
        self.raw: MutableSequence[Raw] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._hashed = 0
        # Sets and dicts in a fixed order: the digest may not depend on PYTHONHASHSEED.
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain, order="deterministic")

    def keep_last(self, records: int) -> None:
        """Remember no more than the last `records` from now on. There is no digest then."""
        self.raw = deque(self.raw, maxlen=records)

    def __len__(self) -> int:
        return len(self.raw)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [Record(*raw) for raw in list(self.raw)[index]]
        return Record(*self.raw[index])

    def __iter__(self) -> Iterator[Record]:
        return (Record(*raw) for raw in self.raw)

    def notes(self) -> Iterator[tuple[str, object]]:
        """The notes so far, as (process, value)."""
        return ((process, detail) for _, process, _, kind, detail in self.raw if kind is HistoryKind.NOTE)

    def turns(self, numbers: list[int]) -> None:
        """Take the order of turns into the digest: (time, process) pairs, which no record holds."""
        if numbers:
            self._digest.update(self._encoder.encode((len(self.raw), numbers)))

    def digest(self) -> str:
        """A digest (BLAKE2b) of every record so far: equal for equal seeds.

        That holds for details that msgspec encodes, dataclasses and sets of them included, and for others
        whose repr holds no id. Raises `LocalProtocolError` if not all is remembered.
        """
        if not isinstance(self.raw, list):
            raise LocalProtocolError("a history of which only the last records are kept has no digest")
        while self._hashed < len(self.raw):
            batch = self.raw[self._hashed : self._hashed + BATCH_RECORDS]
            self._digest.update(self._encode(batch))
            self._hashed += len(batch)
        return self._digest.hexdigest()

    def _encode(self, batch: list[Raw]) -> bytes:
        kinds = " ".join([type(raw[4]).__name__ for raw in batch]).encode()
        try:
            return kinds + self._encoder.encode(batch)
        except (OverflowError, TypeError, ValueError):  # an integer beyond 64 bits, a dict keyed by objects
            return kinds + repr(batch).encode()
