"""The end of a memory connection over RDMA: orderly, by goodbyes both ways, or at once.

Sans-I/O. A side that closes says goodbye behind all that it has put, and the other answers with its own, once
all that it had put has arrived. A side that has sent and received one ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, assert_never

from zbmd.transport.bulk.events import CloseAsked, End, MarkLost
from zbmd.transport.errors import LinkClosed, PeerLost, RemoteProtocolError, ZbmdError
from zbmd.transport.machine import SetTimer, TimerFired


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodbyeCame:
    """Nothing of the peer comes any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodbyeArrived:
    """The peer has ours, and all before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Nothing can be sent, or come, any more."""

    error: ZbmdError


ClosingEvent: TypeAlias = CloseAsked | GoodbyeCame | GoodbyeArrived | Failed | TimerFired


@dataclass(frozen=True, slots=True, kw_only=True)
class SayGoodbye:
    """Behind all that was asked for; nothing new is."""


ClosingAction: TypeAlias = SayGoodbye | SetTimer | MarkLost | End


class ClosingState(Enum):
    """Of a connection."""

    OPEN = "open"
    CLOSING = "closing"
    ENDED = "ended"


class RdmaClosing:
    """One side. peer: how it is called in errors; close_ns: how long an orderly end may take."""

    def __init__(self, *, peer: int | str, close_ns: int) -> None:
        self.peer = peer
        self.state = ClosingState.OPEN
        self._close_ns = close_ns
        self._heard = False
        self._arrived = False

    def handle(self, event: ClosingEvent, *, now_ns: int) -> list[ClosingAction]:
        """Take one event; `now_ns` is monotonic. See `Machine`."""
        if self.state is ClosingState.ENDED:
            return []
        match event:
            case CloseAsked():
                return self._close(now_ns)
            case GoodbyeCame():
                self._heard = True
                return self._close(now_ns) + self._end_if_done()
            case GoodbyeArrived():
                self._arrived = True
                return self._end_if_done()
            case Failed(error=error):
                # A peer that has said goodbye may have ended before our last acknowledgement came.
                return self._end(None if self._heard else error)
            case TimerFired():
                late = LinkClosed(f"{self.peer} did not answer our goodbye in time")
                return self._end(late) if self.state is ClosingState.CLOSING else []
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """See `Machine`."""
        assert not (self._arrived and self.state is ClosingState.OPEN), "a goodbye arrived that was not said"

    def _close(self, now_ns: int) -> list[ClosingAction]:
        if self.state is not ClosingState.OPEN:
            return []
        self.state = ClosingState.CLOSING
        return [SayGoodbye(), SetTimer(at_ns=now_ns + self._close_ns)]

    def _end_if_done(self) -> list[ClosingAction]:
        return self._end(None) if self._heard and self._arrived else []

    def _end(self, error: ZbmdError | None) -> list[ClosingAction]:
        self.state = ClosingState.ENDED
        lost = isinstance(error, PeerLost | RemoteProtocolError)
        return [End(error=error), *([MarkLost()] if lost else [])]
