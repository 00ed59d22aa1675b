"""The heartbeats of one incarnation: a native thread sends and receives, the detector judges.

The thread (`_heartbeat`) sends this node's beats and receives those of others on **stripes**, TCP
connections beside the links, without Python: neither the GIL nor a busy loop delays a beat. It wakes the
loop when a member's silence has reached the detector's limit, when a beat differs from ours, and on every
beat while the membership machine is at work; otherwise the loop looks at it once a pace. Any frame over a
link counts as a beat, and spares one where it goes out.

A beat over a stripe proves that the peer's process runs and the network path is open. That its Python runs
is proved by the **lease**: beats cease unless the loop has renewed it in time. A stripe ends with the last
link to its peer, so only reachable peers count. Beats use TCP and the port of the links, since a firewall
that drops UDP would look like the death of everybody. To a peer that has no stripe yet, beats go over the
link.

Beside a stripe a peer may have an RDMA route (`connections`), by which beats are written into its memory; the
stripe stands by.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Final, Protocol, assert_never

import structlog
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from zbmd.actors.cluster.heartbeats import detector as d
from zbmd.actors.cluster.heartbeats._heartbeat import BEAT_KEY_BYTES, PEERS_MAX, NativeHeartbeats
from zbmd.actors.cluster.heartbeats.detector import DETECTOR
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.cluster.state.view import OBSERVERS_MAX
from zbmd.transport.bulk.stripe_io import Stripe
from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.capture.tap import Tap
from zbmd.transport.clock.deadlines import Deadlines
from zbmd.transport.identity import Side
from zbmd.transport.native._native import now_ns
from zbmd.transport.secure.protection import Keys, Session

log: Final = structlog.stdlib.get_logger("zbmd.cluster")

PACE_BUDGETS: Final = 2
CALM_PACE_BUDGETS: Final = 4
"""Recovery budgets from one look at a quiet cluster to the next, with a job and without one: a look costs as
much as all else that the loop of an idle node does."""
PAUSE_BUDGETS: Final = 3
"""For so much longer than from one look to the next a node beats without a sign of the loop: longer than any
pause of a busy process, and, all in all, fewer beats than a table keeps."""

STRIPE_LABEL: Final = b"zbmd beat 1"
WAY_LABEL: Final = b"zbmd beat way 1"
assert 2 * OBSERVERS_MAX < PEERS_MAX, "the table has an entry for every watched peer"


class HeartbeatHandler(Protocol):
    """Handles what heartbeats bring. Called on the incarnation's loop; must not block."""

    def suspected(self, key: NodeKey, reason: str) -> None:
        """An observed member is silent."""
        ...

    def trusted(self, key: NodeKey) -> None:
        """The member was heard again."""
        ...

    def beaten(self, key: NodeKey, known: int, entered: int) -> None:
        """The views that a peer knows and acts on, from its last beat."""
        ...

    def beat_by_link(self, key: NodeKey) -> None:
        """Send a beat over the link, since there is no stripe."""
        ...

    def stripe_ended(self, key: NodeKey) -> None:
        """A peer's stripe ended, and the RDMA route beside it."""
        ...

    def way_ended(self, key: NodeKey, reason: str) -> None:
        """A peer's RDMA route ended; its stripe is used."""
        ...

    def paced(self) -> None:
        """Called once a pace, for housekeeping."""
        ...


def beat_keys(control: Session, stripe: Session, label: bytes = STRIPE_LABEL) -> Keys:
    """The keys of the two directions for beats over a stripe, or by a way beside it, under any protection.

    label: which of the two; control: the session of the link; stripe: of the stripe that has joined it. By
    HKDF-Expand (RFC 5869) from what only both ends of the link have; a stripe's session id is never used
    twice.
    """
    of_dialer, of_listener = (
        HKDFExpand(
            algorithm=SHA256(),
            length=BEAT_KEY_BYTES,
            info=b"\0".join((label, by.value.encode(), stripe.session_id)),
        ).derive(control.join_key)
        for by in (Side.DIALER, Side.LISTENER)
    )
    if stripe.side is Side.DIALER:
        return Keys(send=of_dialer, receive=of_listener)
    return Keys(send=of_listener, receive=of_dialer)


class Heartbeats:
    """Created on the incarnation's loop, whose thread must renew the lease. recorder: the detector's."""

    def __init__(
        self, me: NodeKey, deadlines: Deadlines, handler: HeartbeatHandler, recorder: Recorder | None = None
    ) -> None:
        self.detector = d.Detector(deadlines)
        config = {"recovery_budget_ns": deadlines.recovery_budget_ns}
        self._tap = Tap(recorder, DETECTOR, "detector", self.detector, config)
        self._me = me
        self._deadlines = deadlines
        self._beat_ns = deadlines.heartbeat_ns
        self._handler = handler
        self._pace_ns = PACE_BUDGETS * deadlines.recovery_budget_ns
        self._native = NativeHeartbeats(period_ns=deadlines.heartbeat_ns, lease_ns=self._lease_ns)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._native.fd, self._woken)
        self._places: dict[NodeKey, int] = {}
        self._stripes: dict[NodeKey, bool] = {}
        """For each peer with a stripe: whether it is the one that both ends prefer."""
        self._subjects: frozenset[NodeKey] = frozenset()
        self._observers: frozenset[NodeKey] = frozenset()
        self._says = (False, 0, 0)
        self._attentive = False
        self._by_link: asyncio.Handle | None = None
        self._pacing = self._loop.call_later(self._pace_ns / 1e9, self._pace)
        self._closed = False

    def close(self) -> None:
        """Stop beating and close all stripes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._pacing.cancel()
        if self._by_link is not None:
            self._by_link.cancel()
        self._loop.remove_reader(self._native.fd)
        self._native.close()
        self._tap.close("this incarnation is over")

    # -- what the machine wants --------------------------------------------------------------------------

    def watch(self, subjects: Iterable[NodeKey], observers: Iterable[NodeKey], *, busy: bool) -> None:
        """Observe exactly `subjects`, and beat to exactly `observers`. busy: whether the view has a job."""
        self._subjects, self._observers = frozenset(subjects), frozenset(observers)
        self._beat_ns = d.beat_ns(self._deadlines, busy=busy)
        self._set_period()
        self._set_pace((PACE_BUDGETS if busy else CALM_PACE_BUDGETS) * self._deadlines.recovery_budget_ns)
        for key in self._subjects | self._observers:
            self._place(key)
        for key, place in list(self._places.items()):
            self._native.beat_to(place, key in self._observers)
            if key not in self._subjects:
                self._native.observe(place, 0)
        observed = tuple(sorted(self._subjects))
        self._feed(d.Observe(subjects=observed, beat_ns=self._beat_ns), now_ns())
        self._tap.check_invariants()
        self._tidy()
        self._beat_where_no_stripe_is()

    def say(self, on: bool, known: int, entered: int) -> None:
        """Set what beats carry from now on; on: whether any are sent."""
        if self._says != (on, known, entered):
            self._says = on, known, entered
            self._native.say(on, known, entered)
            self._beat_where_no_stripe_is()

    def attend(self, attentive: bool) -> None:
        """Set whether every beat wakes the loop."""
        if self._attentive != attentive:
            self._attentive = attentive
            self._native.attend(attentive)
            self._set_period()

    def _set_period(self) -> None:
        """Beat fast while the machine is at work, since it and others rely on every beat."""
        self._native.set_period(self._deadlines.heartbeat_ns if self._attentive else self._beat_ns)

    # -- links and stripes ---------------------------------------------------------------------------------

    def heard(self, key: NodeKey) -> None:
        """A frame arrived over a link."""
        place = self._places.get(key)
        if place is not None and self._native.heard(place):
            self.look()

    def sent(self, key: NodeKey) -> None:
        """A frame was sent over a link."""
        place = self._places.get(key)
        if place is not None:
            self._native.sent(place)

    def adopt(self, key: NodeKey, stripe: Stripe, control: Session) -> bool:
        """Take over a stripe, unless the preferred one is there. Returns whether it was taken."""
        preferred = (stripe.session.side is Side.DIALER) == (self._me < key)
        if self._closed or (self._stripes.get(key) and not preferred):
            stripe.sock.close()
            return False
        place = self._place(key)
        keys = beat_keys(control, stripe.session)
        self._native.adopt(place, stripe.sock.detach(), keys.send, keys.receive, stripe.surplus)
        self._native.beat_to(place, key in self._observers)
        self._stripes[key] = preferred
        return True

    def drop_stripe(self, key: NodeKey) -> None:
        """The last link to this peer ended."""
        if key in self._stripes and not self._closed:
            self._native.drop_stripe(self._places[key])
            self._no_stripe(key)
            self._tidy()
            self._beat_where_no_stripe_is()

    def add_way(self, key: NodeKey, way: object, keys: Keys) -> bool:
        """Receive beats of this peer over an RDMA route; return False if its stripe has ended.

        way: see `NativeHeartbeats.add_way`.
        """
        return key in self._stripes and self._native.add_way(self._places[key], way, keys.send, keys.receive)

    def use_way(self, key: NodeKey) -> None:
        """Send beats over the route as well."""
        if key in self._stripes:
            self._native.use_way(self._places[key])

    def drop_way(self, key: NodeKey) -> None:
        """Stop using the route; the stripe stays."""
        if key in self._places and not self._closed:
            self._native.drop_way(self._places[key])

    def _no_stripe(self, key: NodeKey) -> None:
        if self._stripes.pop(key, None) is not None:
            self._handler.stripe_ended(key)

    def lacking(self) -> list[NodeKey]:
        """Return the peers that lack a stripe."""
        return sorted((self._subjects | self._observers) - self._stripes.keys())

    def _place(self, key: NodeKey) -> int:
        place = self._places.get(key)
        if place is None and len(self._places) == PEERS_MAX:
            self._vacate(min(self._places.keys() - self._subjects - self._observers))
        if place is None:
            place = self._places[key] = self._native.place()
        return place

    def _tidy(self) -> None:
        """Free the entries of peers that are not watched and have no stripe."""
        for key in self._places.keys() - self._subjects - self._observers - self._stripes.keys():
            self._vacate(key)

    def _vacate(self, key: NodeKey) -> None:
        self._native.vacate(self._places.pop(key))
        self._no_stripe(key)

    # -- what has come -----------------------------------------------------------------------------------

    def look(self) -> None:
        """Take what the thread received, and have it judged."""
        judged_ns = self._native.judged_ns
        news = [(key, self._native.take(place)) for key, place in self._places.items()]
        for key, new in news:
            if new is not None and new[0]:
                self._feed(d.Beats(key=key, arrivals_ns=new[0]), judged_ns)
        self._feed(d.Looked(), judged_ns)
        self._tap.check_invariants()  # once: each event is about another member
        for key, new in news:
            if new is None:
                continue
            _, said, ended, way_ended = new
            if ended:
                log.debug("a heartbeat connection ended", peer=str(key), reason=ended)
                self._no_stripe(key)
            elif way_ended:
                self._handler.way_ended(key, way_ended)
            if said is not None:
                self._handler.beaten(key, *said)
        if any(new is not None and new[2] for _, new in news) and not self._closed:
            self._tidy()
            self._beat_where_no_stripe_is()

    def silence(self, key: NodeKey) -> tuple[int | None, int]:
        """Return how long `key` has been silent, and its limit; None and 0 if it is not observed."""
        self._native.read_now()
        self.look()
        return self.detector.silence(key, now_ns())

    def _woken(self) -> None:
        os.eventfd_read(self._native.fd)
        self.look()

    def _feed(self, event: d.Event, at_ns: int) -> None:
        actions = self._tap.handle(event, now_ns=at_ns)
        for action in actions:
            match action:
                case d.Limit(key=key, limit_ns=limit_ns):
                    place = self._places.get(key)
                    if place is not None:
                        self._native.observe(place, limit_ns)
                case d.Silent(key=key, reason=reason):
                    self._handler.suspected(key, reason)
                case d.Audible(key=key):
                    self._handler.trusted(key)
                case _:
                    assert_never(action)

    # -- timers ------------------------------------------------------------------------------------------

    @property
    def _lease_ns(self) -> int:
        return self._pace_ns + PAUSE_BUDGETS * self._deadlines.recovery_budget_ns

    def _set_pace(self, pace_ns: int) -> None:
        if self._pace_ns != pace_ns:
            self._pace_ns = pace_ns
            self._renew()

    def _renew(self) -> None:
        """Renew the lease: this loop runs."""
        self._pacing.cancel()
        self._pacing = self._loop.call_later(self._pace_ns / 1e9, self._pace)
        if self._native.renew(self._lease_ns):
            log.warning("the cluster's thread was blocked for so long that heartbeats were withheld")

    def _pace(self) -> None:
        self._renew()
        self.look()
        self._handler.paced()

    def _beat_where_no_stripe_is(self) -> None:
        if self._by_link is None and not self._closed:
            self._by_link = self._loop.call_soon(self._beat_by_link)

    def _beat_by_link(self) -> None:
        self._by_link = None
        on, _, _ = self._says
        without = sorted(self._observers - self._stripes.keys())
        if on and without:
            self._by_link = self._loop.call_later(self._beat_ns / 1e9, self._beat_by_link)
            for key in without:
                self._handler.beat_by_link(key)
