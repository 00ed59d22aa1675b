"""Decides whether heartbeats with one peer use RDMA, beside their TCP connection (sans-I/O).

One machine for each peer; a new connection starts it again. A route that fails is not retried beside the
same connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias, assert_never

from zbmd.actors.cluster.contracts import (
    WHY_MAX,
    BeatsAnswer,
    BeatsAt,
    BeatsOffer,
    BeatsReady,
    BeatsSaid,
)


class RouteState(Enum):
    """State of the route's setup."""

    NO_STRIPE = "no stripe"
    PLAIN = "by the stripe alone"
    AWAITS_OFFER = "awaits an offer"
    MAKING = "makes an end"
    OFFERED = "awaits the answer"
    CONNECTING = "connects its end"
    ANSWERED = "takes beats, and awaits that the peer does"
    BOTH_WAYS = "takes beats and sends them"


WITH_END: Final = (RouteState.OFFERED, RouteState.CONNECTING, RouteState.ANSWERED, RouteState.BOTH_WAYS)
BOTH_HAVE_IT: Final = "both sides have RDMA"


# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionUp:
    """Beats use this connection from now on. offers: this side dialed it, and makes the offer."""

    lane: bytes
    offers: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionDown:
    """The connection ended, and the route beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMessage:
    """A message of the peer arrived."""

    what: BeatsSaid


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointMade:
    """The endpoint that `MakeEndpoint` asked for is ready at `at`."""

    at: BeatsAt


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """`Connect` succeeded: beats of the peer are received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteFailed:
    """`MakeEndpoint` or `Connect` failed, or the route ended."""

    why: str


Event: TypeAlias = ConnectionUp | ConnectionDown | PeerMessage | EndpointMade | Connected | RouteFailed


# --- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeEndpoint:
    """Make an endpoint; answered at once by `EndpointMade` or `RouteFailed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Connect the endpoint and receive beats; answered at once by `Connected` or `RouteFailed`."""

    to: BeatsAt


@dataclass(frozen=True, slots=True, kw_only=True)
class SendByRdma:
    """Send beats over the route as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropEndpoint:
    """Release the endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToPeer:
    """Send this message to the peer."""

    what: BeatsSaid


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChosen:
    """Log which route beats use from now on, and why."""

    rdma: bool
    reason: str


Action: TypeAlias = MakeEndpoint | Connect | SendByRdma | DropEndpoint | SendToPeer | RouteChosen


class HeartbeatRoute:
    """The route to one peer. why_not: why this node has no RDMA, or None; tells: whether to tell peers."""

    def __init__(self, *, why_not: str | None, tells: bool = True) -> None:
        self.state = RouteState.NO_STRIPE
        self.has_end = False
        self._why_not = why_not
        self._tells = tells
        self._stripe = b""
        self._offers = False
        self._early: BeatsOffer | None = None
        """An offer for a connection that is not up here yet: links and connections are not ordered."""
        self._own: BeatsAt | None = None
        self._theirs: BeatsAt | None = None

    def handle(self, event: Event) -> list[Action]:
        """Take one event and return what follows, in order."""
        match event:
            case ConnectionUp():
                return self._stripe_stands(event)
            case ConnectionDown():
                self._stripe = b""
                return self._to(RouteState.NO_STRIPE)
            case PeerMessage(what=what):
                return self._said(what)
            case EndpointMade(at=at):
                return self._made(at)
            case Connected():
                return self._connected()
            case RouteFailed(why=why):
                return self._failed(why)
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """An endpoint exists exactly while it may be used, a connection in every state but NO_STRIPE."""
        assert self.has_end == (self.state in WITH_END), (self.state, self.has_end)
        assert (self.state is RouteState.NO_STRIPE) == (not self._stripe), (self.state, self._stripe)

    def _to(self, state: RouteState) -> list[Action]:
        had, self.has_end = self.has_end, False
        self.state, self._own, self._theirs = state, None, None
        return [DropEndpoint()] if had else []

    def _plain(self, reason: str) -> list[Action]:
        return [*self._to(RouteState.PLAIN), RouteChosen(rdma=False, reason=reason)]

    def _refuse(self, why: str) -> list[Action]:
        """Decline RDMA, in place of the message that is due from this side."""
        why = why[:WHY_MAX]
        what: BeatsSaid
        if not self._offers:
            what = BeatsAnswer(lane=self._stripe, why=why)
        elif self.state is RouteState.MAKING:
            what = BeatsOffer(lane=self._stripe, why=why)
        else:
            what = BeatsReady(lane=self._stripe, why=why)
        return [SendToPeer(what=what), *self._plain(why)]

    def _make(self) -> list[Action]:
        self.state = RouteState.MAKING
        if self._why_not is None:
            return [MakeEndpoint()]
        return self._refuse(self._why_not) if self._tells else self._plain(self._why_not)

    def _stripe_stands(self, event: ConnectionUp) -> list[Action]:
        actions = self._to(RouteState.AWAITS_OFFER)
        self._stripe, self._offers = event.lane, event.offers
        early, self._early = self._early, None
        if event.offers:
            actions += self._make()
        elif early is not None:
            actions += self._said(early)
        return actions

    def _said(self, what: BeatsSaid) -> list[Action]:
        if what.lane != self._stripe:
            if isinstance(what, BeatsOffer):
                self._early = what
            return []
        match what, self.state:
            case BeatsOffer(at=None, why=why), RouteState.AWAITS_OFFER:
                return self._plain(why)
            case BeatsOffer(at=at), RouteState.AWAITS_OFFER:
                self._theirs = at
                return self._make()
            case BeatsAnswer(at=None, why=why), RouteState.OFFERED:
                return self._plain(why)
            case BeatsAnswer(at=at), RouteState.OFFERED:
                assert at is not None
                self.state = RouteState.CONNECTING
                return [Connect(to=at)]
            case BeatsReady(why=""), RouteState.ANSWERED:
                self.state = RouteState.BOTH_WAYS
                return [SendByRdma(), RouteChosen(rdma=True, reason=BOTH_HAVE_IT)]
            case BeatsReady(why=why), RouteState.ANSWERED:
                return self._plain(why)
            case _:
                return []  # what it answers is over

    def _made(self, at: BeatsAt) -> list[Action]:
        self.has_end = True
        if self._offers:
            self.state = RouteState.OFFERED
            return [SendToPeer(what=BeatsOffer(lane=self._stripe, at=at))]
        assert self._theirs is not None
        self.state, self._own = RouteState.CONNECTING, at
        return [Connect(to=self._theirs)]

    def _connected(self) -> list[Action]:
        """Tell the other side, which may send only now."""
        if not self._offers:
            self.state = RouteState.ANSWERED
            return [SendToPeer(what=BeatsAnswer(lane=self._stripe, at=self._own))]
        self.state = RouteState.BOTH_WAYS
        return [
            SendToPeer(what=BeatsReady(lane=self._stripe)),
            SendByRdma(),
            RouteChosen(rdma=True, reason=BOTH_HAVE_IT),
        ]

    def _failed(self, why: str) -> list[Action]:
        match self.state:
            case RouteState.NO_STRIPE | RouteState.PLAIN | RouteState.AWAITS_OFFER:
                return []  # its end is given back already
            case RouteState.BOTH_WAYS:
                return self._plain(why)  # the peer finds out by its own beats
            case _:
                return self._refuse(why)
