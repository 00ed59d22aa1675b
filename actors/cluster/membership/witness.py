"""The external tie-breaker (sans-I/O): which half of a split view survives, as an external witness decides.

Without a witness, half of a view may go on if it holds the lowest id. With one, the half that holds the
**tie-breaker** may: the first incarnation of a member that asked the witness for the next epoch. The
witness is one record, of an epoch and the incarnation that it was given to; it is changed only by compare-
and-swap and only to a higher epoch. So each epoch has at most one tie-breaker, however often it is asked
for, whoever asks, and whichever answers are lost. Two halves that hold the same member share it, so the
quorum rule still holds.

A lost reply leaves open whether the swap was done: reading again tells, since the record names its holder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, assert_never

from zbmd.actors.cluster import messages as m
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.cluster.state.view import LOWEST_ID, ClusterView, Verdict, quorum
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired


class TieBreak:
    """Decides which half of a split view goes on: the one with its lowest id, or the one the witness names.

    witnessed: whether the cluster has a witness; the same on all nodes.
    """

    def __init__(self, *, witnessed: bool) -> None:
        self._witnessed = witnessed
        self._gave: m.WitnessGave | None = None

    def gave(self, answer: m.WitnessGave) -> None:
        """Take the witness's answer for an epoch."""
        if self._gave is None or answer.epoch >= self._gave.epoch:
            self._gave = answer

    def quorum(self, view: ClusterView, present: Collection[int], proven: Collection[int]) -> Verdict:
        """Whether the present members may decide what follows `view`; see `view.quorum`."""
        if not self._witnessed:
            return quorum(view, present, proven, tie_breaker=LOWEST_ID)
        named: int | None = None
        if self._gave is not None and self._gave.epoch == view.epoch + 1 and self._gave.holder is not None:
            named = self._gave.holder.id if view.holds(self._gave.holder) else None
        return quorum(view, present, proven, tie_breaker=named)

    def question(self, view: ClusterView, verdict: Verdict) -> list[m.AskWitness]:
        """Return the question for the witness, if it may change the verdict."""
        return [m.AskWitness(epoch=view.epoch + 1)] if verdict.tied else []


STORY_EVENTS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TieBreakRecord:
    """What the witness holds: the tie-breaker of an epoch. `revision`: of the record, 0 if there is none "
    "yet."""

    epoch: int
    holder: NodeKey | None
    revision: int


# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochWanted:
    """Half of a view wants to agree on the view of `epoch`."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDecided:
    """The view of `epoch` is decided: no tie-breaker is needed for it or an earlier one."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRead:
    """The record after request `number` was carried out."""

    number: int
    record: TieBreakRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """Request `number` was not answered; it may have been carried out."""

    number: int
    reason: str


Event: TypeAlias = EpochWanted | EpochDecided | RecordRead | RequestFailed | TimerFired


# --- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Read the record."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Write the record if its revision is still `revision`; either way, answer with the record."""

    number: int
    revision: int
    epoch: int
    holder: NodeKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TieBreakerNamed:
    """The tie-breaker of `epoch` is `holder`; None if the witness moved on to a later epoch."""

    epoch: int
    holder: NodeKey | None
    reason: str


Action: TypeAlias = Read | Swap | SetTimer | TieBreakerNamed


class WitnessState(Enum):
    """State of the request."""

    IDLE = "idle"
    READING = "reading"
    SWAPPING = "swapping"
    WAITING = "waiting"


class WitnessMachine:
    """Asks the witness on behalf of one incarnation of a node, again `retry_ns` after each failure."""

    def __init__(self, me: NodeKey, *, retry_ns: int) -> None:
        if retry_ns <= 0:
            raise LocalProtocolError(f"retry_ns is {retry_ns}")
        self.me = me
        self.state = WitnessState.IDLE
        self.retry_ns = retry_ns
        self.story: deque[str] = deque(maxlen=STORY_EVENTS_MAX)
        self._epoch = 0
        """The wanted epoch, while not idle."""
        self._done = 0
        """The newest epoch that is decided or has a tie-breaker."""
        self._number = 0
        self._retry_at_ns = 0

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take one event at `now_ns` (monotonic) and return what to do, in order."""
        match event:
            case EpochWanted(epoch=epoch):
                if epoch <= max(self._done, self._epoch if self.state is not WitnessState.IDLE else 0):
                    return []
                self._epoch = epoch
                return self._read(f"epoch {epoch} is wanted")
            case EpochDecided(epoch=epoch):
                self._done = max(self._done, epoch)
                if self.state is not WitnessState.IDLE and self._epoch <= epoch:
                    self._rest(f"epoch {epoch} is over")
                return []
            case RecordRead(number=number, record=record):
                if number != self._number or self.state not in (WitnessState.READING, WitnessState.SWAPPING):
                    return []
                return self._told(record)
            case RequestFailed(number=number, reason=reason):
                if number != self._number or self.state not in (WitnessState.READING, WitnessState.SWAPPING):
                    return []
                self.story.append(f"{self.state.value} failed: {reason}")
                self.state = WitnessState.WAITING
                self._retry_at_ns = now_ns + self.retry_ns
                return [SetTimer(at_ns=self._retry_at_ns)]
            case TimerFired():
                if self.state is not WitnessState.WAITING:
                    return []
                if now_ns < self._retry_at_ns:
                    return [SetTimer(at_ns=self._retry_at_ns)]
                return self._read("once more")
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """An epoch is wanted unless the machine is idle."""
        assert self.state is WitnessState.IDLE or self._epoch > self._done, (
            self.state,
            self._epoch,
            self._done,
        )

    def _read(self, why: str) -> list[Action]:
        self.state = WitnessState.READING
        self.story.append(f"reads: {why}")
        self._number += 1
        return [Read(number=self._number)]

    def _told(self, record: TieBreakRecord) -> list[Action]:
        if record.epoch < self._epoch:
            self.state = WitnessState.SWAPPING
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
        return [TieBreakerNamed(epoch=epoch, holder=holder, reason=reason)]

    def _rest(self, why: str) -> None:
        self.state = WitnessState.IDLE
        self.story.append(f"rests: {why}")
