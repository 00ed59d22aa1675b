"""The end of memory over RDMA: two sides, and a connection that loses nothing until it fails."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.bulk.events import CloseAsked, End, MarkLost
from zbmd.transport.errors import LinkClosed, PeerLost, RemoteProtocolError
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.rdma.closing import (
    ClosingAction,
    ClosingEvent,
    ClosingState,
    Failed,
    GoodbyeArrived,
    GoodbyeCame,
    RdmaClosing,
    SayGoodbye,
)

CLOSE_NS = 1000


class Side:
    """A life, and what has become of it."""

    def __init__(self, name: str) -> None:
        self.life = RdmaClosing(peer=name, close_ns=CLOSE_NS)
        self.inbox: deque[ClosingEvent] = deque()
        self.ends: list[End] = []
        self.lost = False
        self.said = 0
        self.timer_ns: int | None = None

    def take(self, event: ClosingEvent, now_ns: int) -> list[ClosingAction]:
        actions = self.life.handle(event, now_ns=now_ns)
        self.life.check_invariants()
        for action in actions:
            match action:
                case SayGoodbye():
                    self.said += 1
                case SetTimer(at_ns=at_ns):
                    self.timer_ns = at_ns
                case End():
                    self.ends.append(action)
                case MarkLost():
                    assert self.ends, "the loss is marked only after nothing is written any more"
                    self.lost = True
        return actions


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["close", "deliver", "fail", "time"])), max_size=30))
def test_each_side_ends_once_and_in_good_order_unless_something_fails(steps: list[tuple[bool, str]]) -> None:
    sides = Side("b"), Side("a")
    now_ns, cut = 0, False

    def step(which: int, kind: str) -> None:
        nonlocal cut
        side, other = sides[which], sides[1 - which]
        if kind == "fail":
            cut = True
            for each in sides:
                each.inbox.clear()
                each.take(Failed(error=PeerLost("x", "cut")), now_ns)
            return
        if kind == "close":
            event: ClosingEvent = CloseAsked()
        elif kind == "time":
            if side.timer_ns is None or now_ns < side.timer_ns:
                return
            event = TimerFired()
        elif side.inbox:
            event = side.inbox.popleft()
        else:
            return
        if any(isinstance(action, SayGoodbye) for action in side.take(event, now_ns)):
            other.inbox.append(GoodbyeCame())
            side.inbox.append(GoodbyeArrived())

    for late, kind in steps:
        step(int(late), kind)
    step(0, "close")
    while any(side.inbox for side in sides):
        for which in (0, 1):
            step(which, "deliver")
    for side in sides:
        assert side.life.state is ClosingState.ENDED and len(side.ends) == 1 and side.said <= 1
        assert cut or side.ends[0].error is None
        assert side.lost == isinstance(side.ends[0].error, PeerLost)


def test_a_peer_that_does_not_answer_is_waited_for_in_vain_no_longer_than_said() -> None:
    side = Side("b")
    side.take(CloseAsked(), 5)
    assert side.timer_ns == 5 + CLOSE_NS
    side.take(GoodbyeArrived(), 6)
    assert side.life.state is ClosingState.CLOSING
    side.take(TimerFired(), 5 + CLOSE_NS)
    (end,) = side.ends
    assert isinstance(end.error, LinkClosed) and not side.lost


def test_who_breaks_the_protocol_is_lost() -> None:
    side = Side("b")
    side.take(Failed(error=RemoteProtocolError("a note that is none")), 0)
    assert side.lost


def test_a_connection_that_breaks_behind_the_goodbye_has_ended_in_good_order() -> None:
    side = Side("b")
    side.take(GoodbyeCame(), 0)
    side.take(Failed(error=PeerLost("b", "no acknowledgement")), 1)
    assert side.ends == [End(error=None)]
