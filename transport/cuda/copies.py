"""The order of copies, events and notifications of one peer, on one stream. Sans-I/O.

All that is asked for one peer goes through one stream of ours, in the order in which it was asked. Of a copy
that is reported by a cell, the cell is set once the copy has drained: so whoever has waited for the cell sees
every byte, on whatever stream or thread. A *signal* is reported as soon as the device has been asked: behind
the copies an event of its channel is recorded, then the cell is set, and the peer's stream waits for the
event. Since all signals of a channel are recorded on the one stream, an event that has been recorded again
stands for the earlier signals, too.

A buffer is handed back (`FinishCopy`) only when the device touches it no more: its copy has drained, or the
context has failed as a whole. The death of the peer hands back nothing early.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias, assert_never

from zbmd.transport.errors import LinkFull, LocalProtocolError

OPERATIONS_MAX: Final = 1024
"""Copies of one peer that are under way, and notifications behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyAsked:
    """Copy, then set a cell if `channel` is given. after: the stream that makes what is copied."""

    operation: int
    after: int | None = None
    channel: int | None = None
    value: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CellAsked:
    """Set a cell behind all copies that were asked before."""

    channel: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalAsked:
    """Record the channel's event behind all that was asked before, then set the cell at once."""

    channel: int
    value: int
    after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """The device is done with a copy."""

    operation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGone:
    """Its process has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted:
    """The device or its driver has failed: nothing that was asked goes on."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesCloseAsked:
    """Let go of the peer once all that is under way has drained."""


Event: TypeAlias = CopyAsked | CellAsked | SignalAsked | Drained | PeerGone | Faulted | CopiesCloseAsked


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Our stream waits for what `stream` was asked until now."""

    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """Ask our stream for the copy, and record an event behind it, by which it is known to have drained."""

    operation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSignal:
    """Record the event of the channel on our stream."""

    channel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPeerCell:
    """Set the peer's cell."""

    channel: int
    value: int


class CopyOutcome(Enum):
    """The outcome of a copy."""

    DONE = "done"
    LOST = "lost"
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishCopy:
    """The buffers of a copy may be reused."""

    operation: int
    outcome: CopyOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LetGo:
    """Nothing is under way, and nothing will be: close the peer's memory and events, destroy the stream."""


Action: TypeAlias = Join | Issue | RecordSignal | SetPeerCell | FinishCopy | LetGo


class CopiesState(Enum):
    """Of the peer."""

    OPEN = "open"
    GONE = "gone"
    FAULTED = "faulted"


class CudaCopies:
    """One peer, from our side."""

    def __init__(self) -> None:
        self.state = CopiesState.OPEN
        self.why = ""
        """The message of a fault."""
        self._closing = False
        self._let_go = False
        self._waiting: deque[CopyAsked | CellAsked] = deque()
        """In the order in which they were asked; the first is always a copy."""
        self._signals: dict[int, int] = {}
        """By channel the last value that was signalled; no copy may report a value of such a channel."""
        self.under_way = 0
        """Copies that have not drained."""

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Return the actions to perform, in this order.

        Raises `LinkFull` beyond `OPERATIONS_MAX`, and `LocalProtocolError` on a call of no use: something
        asked of a peer that is not open, a copy that drains out of order, or a channel that is used both for
        signals and for notifications.
        """
        actions = self._dispatch(event)
        if self._closing and not self.under_way and not self._let_go:
            self._let_go = True
            actions.append(LetGo())
        self.check_invariants()
        return actions

    def _dispatch(self, event: Event) -> list[Action]:
        match event:
            case CopyAsked():
                return self._copy(event)
            case CellAsked():
                return self._notify(event)
            case SignalAsked():
                return self._signal(event)
            case Drained():
                return self._drained(event)
            case PeerGone():
                if self.state is CopiesState.OPEN:
                    self.state = CopiesState.GONE
                return []
            case Faulted():
                return self._faulted(event)
            case CopiesCloseAsked():
                self._closing = True
                return []
            case _:
                assert_never(event)

    def _copy(self, event: CopyAsked) -> list[Action]:
        self._require_open()
        if event.channel is not None:
            self._require_unsignalled(event.channel)
        self._waiting.append(event)
        self.under_way += 1
        return [*self._joined(event.after), Issue(operation=event.operation)]

    def _notify(self, event: CellAsked) -> list[Action]:
        self._require_open()
        self._require_unsignalled(event.channel)
        if not self._waiting:
            return [SetPeerCell(channel=event.channel, value=event.value)]
        self._waiting.append(event)
        return []

    def _signal(self, event: SignalAsked) -> list[Action]:
        self._require_open()
        if any(each.channel == event.channel for each in self._waiting):
            raise LocalProtocolError(f"channel {event.channel} has notifications behind copies under way")
        before = self._signals.get(event.channel, -1)
        if event.value <= before:
            raise LocalProtocolError(
                f"channel {event.channel} signals {event.value} behind {before}: signals only grow"
            )
        self._signals[event.channel] = event.value
        return [
            *self._joined(event.after),
            RecordSignal(channel=event.channel),
            SetPeerCell(channel=event.channel, value=event.value),
        ]

    def _drained(self, event: Drained) -> list[Action]:
        if self.state is CopiesState.FAULTED:  # it was handed back with the fault
            return []
        head = self._waiting[0] if self._waiting else None
        if not isinstance(head, CopyAsked) or head.operation != event.operation:
            raise LocalProtocolError(f"copy {event.operation} has drained, and {head} is the first under way")
        self._waiting.popleft()
        self.under_way -= 1
        lost = self.state is CopiesState.GONE
        actions: list[Action] = []
        if not lost and head.channel is not None:
            actions.append(SetPeerCell(channel=head.channel, value=head.value))
        actions.append(
            FinishCopy(operation=head.operation, outcome=CopyOutcome.LOST if lost else CopyOutcome.DONE)
        )
        while self._waiting and isinstance(self._waiting[0], CellAsked):
            notice = self._waiting.popleft()
            if not lost:
                assert notice.channel is not None
                actions.append(SetPeerCell(channel=notice.channel, value=notice.value))
        return actions

    def _faulted(self, event: Faulted) -> list[Action]:
        if self.state is CopiesState.FAULTED:
            return []
        self.state, self.why = CopiesState.FAULTED, event.why
        copies = [each for each in self._waiting if isinstance(each, CopyAsked)]
        self._waiting.clear()
        self.under_way = 0
        return [FinishCopy(operation=each.operation, outcome=CopyOutcome.FAULT) for each in copies]

    def _joined(self, after: int | None) -> list[Action]:
        return [] if after is None else [Join(stream=after)]

    def _require_open(self) -> None:
        if self.state is not CopiesState.OPEN or self._closing:
            state = "closing" if self._closing else self.state.value
            raise LocalProtocolError(f"something is asked of a peer's device memory that is {state}")
        if len(self._waiting) >= OPERATIONS_MAX:
            raise LinkFull(f"{OPERATIONS_MAX} copies are under way; await one of them")

    def _require_unsignalled(self, channel: int) -> None:
        if channel in self._signals:
            raise LocalProtocolError(f"channel {channel} is used for signals: give notifications another one")

    def check_invariants(self) -> None:
        """Raise `AssertionError` if an invariant does not hold."""
        assert self.under_way == sum(isinstance(each, CopyAsked) for each in self._waiting)
        assert not self._waiting or isinstance(self._waiting[0], CopyAsked), "it waits for nothing"
        assert len(self._waiting) <= OPERATIONS_MAX
        assert not (self._let_go and self.under_way), "memory is let go of that a copy may touch"
