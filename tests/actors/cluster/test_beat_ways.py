"""Two nodes agree on whether their heartbeats go by RDMA: whatever fails, is late, or ends."""

from __future__ import annotations

import random
from collections import deque

import pytest

from zbmd.actors.cluster.contracts import BeatsAt, BeatsOffer, BeatsSaid
from zbmd.actors.cluster.heartbeats import route_machine as w
from zbmd.transport.rdma.setup import QueuePairAt

HISTORIES = 400
WHY = "node2 has no RDMA device"


def at(number: int) -> BeatsAt:
    queue_pair = QueuePairAt(gid=bytes(16), lid=0, number=number, first_psn=0, mtu=3)
    return BeatsAt(at=queue_pair, address=4096 * number, key=number)


class Side:
    """A machine, what it has of its end, and what it has said."""

    def __init__(
        self, number: int, why_not: str | None, broken: w.MakeEndpoint | w.Connect | None = None
    ) -> None:
        self.machine = w.HeartbeatRoute(why_not=why_not)
        self.number = number
        self.broken = broken
        self.end: BeatsAt | None = None
        self.connected: BeatsAt | None = None
        self.sends = False
        self.chosen: list[w.RouteChosen] = []
        self.said: deque[BeatsSaid] = deque()

    def take(self, event: w.Event) -> None:
        for action in self.machine.handle(event):
            self.perform(action)
        self.machine.check_invariants()

    def perform(self, action: w.Action) -> None:
        match action:
            case w.MakeEndpoint() | w.Connect() if type(action) is type(self.broken):
                self.take(w.RouteFailed(why="the device is gone"))
            case w.MakeEndpoint():
                assert self.end is None
                self.number += 2
                self.end = at(self.number)
                self.take(w.EndpointMade(at=self.end))
            case w.Connect(to=to):
                assert self.end is not None and self.connected is None
                self.connected = to
                self.take(w.Connected())
            case w.SendByRdma():
                assert self.connected is not None
                self.sends = True
            case w.DropEndpoint():
                assert self.end is not None
                self.end = self.connected = None
                self.sends = False
            case w.SendToPeer(what=what):
                self.said.append(what)
            case w.RouteChosen():
                self.chosen.append(action)

    @property
    def reason(self) -> str:
        return self.chosen[-1].reason


def talk(dialer: Side, listener: Side) -> None:
    while dialer.said or listener.said:
        if dialer.said:
            listener.take(w.PeerMessage(what=dialer.said.popleft()))
        if listener.said:
            dialer.take(w.PeerMessage(what=listener.said.popleft()))


def stand(dialer: Side, listener: Side, stripe: bytes = b"a" * 16) -> None:
    dialer.take(w.ConnectionUp(lane=stripe, offers=True))
    listener.take(w.ConnectionUp(lane=stripe, offers=False))
    talk(dialer, listener)


def test_both_sides_have_it_and_use_each_others_end() -> None:
    dialer, listener = Side(1, None), Side(2, None)
    stand(dialer, listener)
    assert (dialer.connected, listener.connected) == (listener.end, dialer.end)
    assert dialer.sends and listener.sends and dialer.chosen == listener.chosen
    assert dialer.chosen[-1].rdma


@pytest.mark.parametrize("which", range(2))
@pytest.mark.parametrize("broken", [None, w.MakeEndpoint(), w.Connect(to=at(1))])
def test_what_one_side_lacks_both_tell(which: int, broken: w.MakeEndpoint | w.Connect | None) -> None:
    sides = [Side(1, None), Side(2, None)]
    sides[which] = Side(3, WHY if broken is None else None, broken)
    stand(sides[0], sides[1])
    assert [side.reason for side in sides] == 2 * [WHY if broken is None else "the device is gone"]
    assert not any(side.end or side.sends or side.chosen[-1].rdma for side in sides)


def test_a_way_that_fails_is_tried_again_with_the_next_stripe_alone() -> None:
    dialer, listener = Side(1, None), Side(2, None)
    stand(dialer, listener)
    dialer.take(w.RouteFailed(why="a beat was not acknowledged"))
    talk(dialer, listener)
    assert (dialer.sends, dialer.end, dialer.reason) == (False, None, "a beat was not acknowledged")
    assert listener.sends, "its own beats tell it"
    listener.take(w.RouteFailed(why="a beat was not acknowledged"))
    stand(dialer, listener, b"b" * 16)
    assert dialer.sends and listener.sends and dialer.connected == listener.end


def test_an_offer_may_come_before_its_stripe_and_late_ones_mean_nothing() -> None:
    dialer, listener = Side(1, None), Side(2, None)
    dialer.take(w.ConnectionUp(lane=b"a" * 16, offers=True))
    late = dialer.said[0]
    talk(dialer, listener)
    assert not listener.said and listener.end is None
    listener.take(w.ConnectionUp(lane=b"a" * 16, offers=False))
    talk(dialer, listener)
    assert dialer.sends and listener.sends
    listener.take(w.PeerMessage(what=late))
    listener.take(w.ConnectionDown())
    listener.take(w.PeerMessage(what=late))
    assert isinstance(late, BeatsOffer) and listener.end is None and not listener.said


def test_under_random_histories_both_find_together_with_the_next_stripe() -> None:
    """Stripes come and go, ways fail, messages are late."""
    for seed in range(HISTORIES):
        history(random.Random(seed))


def history(draw: random.Random) -> None:
    sides = [Side(1, None), Side(2, None)]
    stripes = 0
    for _ in range(draw.randrange(30)):
        side = draw.choice(sides)
        other = sides[1 - sides.index(side)]
        match draw.randrange(6):
            case 0:
                stripes += 1
                for each in draw.sample(sides, 2):
                    each.take(w.ConnectionUp(lane=stripes.to_bytes(16), offers=each is sides[0]))
            case 1:
                side.take(w.ConnectionDown())
            case 2 if side.connected is not None:
                side.take(w.RouteFailed(why="a beat was not acknowledged"))
            case _ if side.said:
                other.take(w.PeerMessage(what=side.said.popleft()))
            case _:
                pass
    talk(sides[0], sides[1])
    for side, other in zip(sides, reversed(sides), strict=True):
        if side.sends and other.end is not None:
            assert (side.connected, other.connected) == (other.end, side.end)
    stand(sides[0], sides[1], b"z" * 16)
    assert all(side.sends and side.chosen[-1].rdma for side in sides)
    assert sides[0].connected == sides[1].end
