"""Sans-I/O: who may go on when a view is cut into halves, as a witness outside of the cluster says.

Without a witness half of a view may go on if it has the lowest id. With one, that is so for the half that
holds the **tie-breaker**: the first life of a member that the witness has heard ask for the next epoch. The
witness is one record, of an epoch and the life that it was given to, which is changed only by
compare-and-swap and only to a higher epoch. So for each epoch there is one tie-breaker at most, however often
it is asked, answers are lost, and whoever asks. Since two halves that hold the same member share it, the rule
of quorums stays what it is.

A reply that is lost leaves open whether the swap was done: reading again tells, as the record names its
holder.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, assert_never

from zbmd.actors.cluster.node_id import NodeKey
from zbmd.transport.errors import LocalProtocolError

STORY_EVENTS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the witness holds: the tie-breaker of an epoch. `revision`: of the record, 0 if there is none "
    "yet."""

    epoch: int
    holder: NodeKey | None
    revision: int


# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Half of a view wants to agree on the view of `epoch`."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The view of `epoch` is decided: nothing is wanted for it, nor for one before it."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The record as it was when the request `number` was done."""

    number: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request `number` was not answered: it may have been done all the same."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """The time asked for by the last `SetTimer` has come."""


Event: TypeAlias = Wanted | Over | Told | Failed | TimerFired


# --- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Ask for the record."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Write the record if its revision still is `revision`; in any case answer with what it is then."""

    number: int
    revision: int
    epoch: int
    holder: NodeKey


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Deliver `TimerFired` at `at_ns`; replaces the timer before it."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The tie-breaker of `epoch` is `holder`; nobody, if the witness has gone on to a later epoch."""

    epoch: int
    holder: NodeKey | None
    reason: str


Action: TypeAlias = Read | Swap | SetTimer | Given


class State(Enum):
    """Where the asking stands."""

    IDLE = "idle"
    READING = "reading"
    SWAPPING = "swapping"
    WAITING = "waiting"


class WitnessMachine:
    """Asks the witness on behalf of one life of a node. retry_ns: how long after a failure it asks again."""

    def __init__(self, me: NodeKey, *, retry_ns: int) -> None:
        if retry_ns <= 0:
            raise LocalProtocolError(f"retry_ns is {retry_ns}")
        self.me = me
        self.state = State.IDLE
        self.retry_ns = retry_ns
        self.story: deque[str] = deque(maxlen=STORY_EVENTS_MAX)
        self._epoch = 0
        """What is wanted, while not idle."""
        self._done = 0
        """The newest epoch that is over or given."""
        self._number = 0
        self._retry_at_ns = 0

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take one event at `now_ns` (monotonic) and return what to do, in order."""
        match event:
            case Wanted(epoch=epoch):
                if epoch <= max(self._done, self._epoch if self.state is not State.IDLE else 0):
                    return []
                self._epoch = epoch
                return self._read(f"epoch {epoch} is wanted")
            case Over(epoch=epoch):
                self._done = max(self._done, epoch)
                if self.state is not State.IDLE and self._epoch <= epoch:
                    self._rest(f"epoch {epoch} is over")
                return []
            case Told(number=number, record=record):
                if number != self._number or self.state not in (State.READING, State.SWAPPING):
                    return []
                return self._told(record)
            case Failed(number=number, reason=reason):
                if number != self._number or self.state not in (State.READING, State.SWAPPING):
                    return []
                self.story.append(f"{self.state.value} failed: {reason}")
                self.state = State.WAITING
                self._retry_at_ns = now_ns + self.retry_ns
                return [SetTimer(at_ns=self._retry_at_ns)]
            case TimerFired():
                if self.state is not State.WAITING:
                    return []
                if now_ns < self._retry_at_ns:
                    return [SetTimer(at_ns=self._retry_at_ns)]
                return self._read("once more")
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Something is wanted unless the machine rests."""
        assert self.state is State.IDLE or self._epoch > self._done, (self.state, self._epoch, self._done)

    def _read(self, why: str) -> list[Action]:
        self.state = State.READING
        self.story.append(f"reads: {why}")
        self._number += 1
        return [Read(number=self._number)]

    def _told(self, record: Record) -> list[Action]:
        if record.epoch < self._epoch:
            self.state = State.SWAPPING
            self.story.append(f"asks for epoch {self._epoch} after {record.epoch}")
            self._number += 1
            return [
                Swap(number=self._number, revision=record.revision, epoch=self._epoch, holder=self.me),
            ]
        epoch, holder = self._epoch, record.holder if record.epoch == self._epoch else None
        if holder is not None:
            reason = f"the witness gave epoch {epoch} to {holder}"
        else:
            reason = f"the witness has gone on to epoch {record.epoch}"
        self._done = epoch
        self._rest(reason)
        return [Given(epoch=epoch, holder=holder, reason=reason)]

    def _rest(self, why: str) -> None:
        self.state = State.IDLE
        self.story.append(f"rests: {why}")
