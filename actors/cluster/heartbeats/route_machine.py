"""Whether heartbeats with one peer go by RDMA, beside the lane that they have (sans-I/O).

One machine is one peer; a lane begins it anew. A way that fails is not tried again beside the same lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias, assert_never

from zbmd.actors.cluster.heartbeats.contracts import (
    WHY_MAX,
    BeatsAnswer,
    BeatsAt,
    BeatsOffer,
    BeatsReady,
    BeatsSaid,
)


class State(Enum):
    """How far it has come."""

    NO_LANE = "no lane"
    PLAIN = "by the lane alone"
    AWAITS_OFFER = "awaits an offer"
    MAKING = "makes an end"
    OFFERED = "awaits the answer"
    CONNECTING = "connects its end"
    ANSWERED = "takes beats, and awaits that the peer does"
    BOTH_WAYS = "takes beats and sends them"


WITH_END: Final = (State.OFFERED, State.CONNECTING, State.ANSWERED, State.BOTH_WAYS)
BOTH_HAVE_IT: Final = "both sides have RDMA"


# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStands:
    """Beats go over this lane from now on. offers: it is ours to offer, for we have dialed it."""

    lane: bytes
    offers: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneEnded:
    """It has, and what was beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The peer has said this."""

    what: BeatsSaid


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What `Make` asked for is there, reached at `at`."""

    at: BeatsAt


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """What `Connect` asked for is done: beats of the peer are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """`Make` or `Connect` could not be done, or the way has ended."""

    why: str


Event: TypeAlias = LaneStands | LaneEnded | Said | Made | Connected | Failed


# --- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """Make an end; `Made` or `Failed` follows at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Connect the end, and read beats by it; `Connected` or `Failed` follows at once."""

    to: BeatsAt


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Send beats by it, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Give the end back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """Say this to the peer."""

    what: BeatsSaid


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Tell how beats go from now on, and why."""

    rdma: bool
    reason: str


Action: TypeAlias = Make | Connect | Use | Drop | Say | Chosen


class BeatWay:
    """One peer. why_not: why this node has no RDMA, None if it has; tells: and says so to peers."""

    def __init__(self, *, why_not: str | None, tells: bool = True) -> None:
        self.state = State.NO_LANE
        self.has_end = False
        self._why_not = why_not
        self._tells = tells
        self._lane = b""
        self._offers = False
        self._early: BeatsOffer | None = None
        """Of a lane that we have not heard of yet: links and lanes do not keep one order."""
        self._own: BeatsAt | None = None
        self._theirs: BeatsAt | None = None

    def handle(self, event: Event) -> list[Action]:
        """Take one event and return what follows, in order."""
        match event:
            case LaneStands():
                return self._lane_stands(event)
            case LaneEnded():
                self._lane = b""
                return self._to(State.NO_LANE)
            case Said(what=what):
                return self._said(what)
            case Made(at=at):
                return self._made(at)
            case Connected():
                return self._connected()
            case Failed(why=why):
                return self._failed(why)
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """There is an end while it may be used, and no other; a lane, unless there is none."""
        assert self.has_end == (self.state in WITH_END), (self.state, self.has_end)
        assert (self.state is State.NO_LANE) == (not self._lane), (self.state, self._lane)

    def _to(self, state: State) -> list[Action]:
        had, self.has_end = self.has_end, False
        self.state, self._own, self._theirs = state, None, None
        return [Drop()] if had else []

    def _plain(self, reason: str) -> list[Action]:
        return [*self._to(State.PLAIN), Chosen(rdma=False, reason=reason)]

    def _refuse(self, why: str) -> list[Action]:
        """Take the lane alone, and say so in place of what is due from us."""
        why = why[:WHY_MAX]
        what: BeatsSaid
        if not self._offers:
            what = BeatsAnswer(lane=self._lane, why=why)
        elif self.state is State.MAKING:
            what = BeatsOffer(lane=self._lane, why=why)
        else:
            what = BeatsReady(lane=self._lane, why=why)
        return [Say(what=what), *self._plain(why)]

    def _make(self) -> list[Action]:
        self.state = State.MAKING
        if self._why_not is None:
            return [Make()]
        return self._refuse(self._why_not) if self._tells else self._plain(self._why_not)

    def _lane_stands(self, event: LaneStands) -> list[Action]:
        actions = self._to(State.AWAITS_OFFER)
        self._lane, self._offers = event.lane, event.offers
        early, self._early = self._early, None
        if event.offers:
            actions += self._make()
        elif early is not None:
            actions += self._said(early)
        return actions

    def _said(self, what: BeatsSaid) -> list[Action]:
        if what.lane != self._lane:
            if isinstance(what, BeatsOffer):
                self._early = what
            return []
        match what, self.state:
            case BeatsOffer(at=None, why=why), State.AWAITS_OFFER:
                return self._plain(why)
            case BeatsOffer(at=at), State.AWAITS_OFFER:
                self._theirs = at
                return self._make()
            case BeatsAnswer(at=None, why=why), State.OFFERED:
                return self._plain(why)
            case BeatsAnswer(at=at), State.OFFERED:
                assert at is not None
                self.state = State.CONNECTING
                return [Connect(to=at)]
            case BeatsReady(why=""), State.ANSWERED:
                self.state = State.BOTH_WAYS
                return [Use(), Chosen(rdma=True, reason=BOTH_HAVE_IT)]
            case BeatsReady(why=why), State.ANSWERED:
                return self._plain(why)
            case _:
                return []  # what it answers is over

    def _made(self, at: BeatsAt) -> list[Action]:
        self.has_end = True
        if self._offers:
            self.state = State.OFFERED
            return [Say(what=BeatsOffer(lane=self._lane, at=at))]
        assert self._theirs is not None
        self.state, self._own = State.CONNECTING, at
        return [Connect(to=self._theirs)]

    def _connected(self) -> list[Action]:
        """Only now the other side may send: it finds us ready."""
        if not self._offers:
            self.state = State.ANSWERED
            return [Say(what=BeatsAnswer(lane=self._lane, at=self._own))]
        self.state = State.BOTH_WAYS
        return [Say(what=BeatsReady(lane=self._lane)), Use(), Chosen(rdma=True, reason=BOTH_HAVE_IT)]

    def _failed(self, why: str) -> list[Action]:
        match self.state:
            case State.NO_LANE | State.PLAIN | State.AWAITS_OFFER:
                return []  # its end is given back already
            case State.BOTH_WAYS:
                return self._plain(why)  # the peer finds out by its own beats
            case _:
                return self._refuse(why)
