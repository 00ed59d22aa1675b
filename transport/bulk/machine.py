"""The bulk protocol with one peer over its stripes: order, fragments, bounds, refusals, the end.

Puts and notifications are numbered in the order in which they were asked for. A put is cut into fragments,
and every stripe that has room takes the next one, so that several connections share a large put. The
receiver counts the fragments of each put and publishes notifications in the order of the numbers, a put's
when all its fragments are in place and authentic: so a notification is never seen before the bytes of any
put before it. How far the numbers may run ahead of what is published is bounded by acknowledgements.

Puts take effect in their order, also where they overlap, and a get sees what was put before it.

A transfer is done when the peer has acknowledged it, so what the receiver refuses (a region that is stale,
released, too small) fails that transfer alone: nothing of it is written, and its notification is not given.
Acknowledgements and refusals go on one stripe, the first, so that they stay in order.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from itertools import islice
from typing import Final, assert_never

from zbmd.transport.bulk import events
from zbmd.transport.bulk.records import (
    FRAGMENT_BYTES_MAX,
    GETS_MAX,
    PUTS_AHEAD_MAX,
    TEXT_BYTES_MAX,
    Ack,
    BulkError,
    Data,
    Error,
    Get,
    Goodbye,
    Malformed,
    Notify,
    Put,
    PutRefusal,
    Record,
    TransferRefusal,
)
from zbmd.transport.bulk.transfers import (
    Arrivals,
    FastPathCounts,
    Fragments,
    Outgoing,
    OwnGet,
    StripeState,
    fragment_record,
)
from zbmd.transport.errors import LinkClosed, LocalProtocolError, PeerLost, RemoteProtocolError, ZbmdError
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.secure.protection import STRIPES_MAX

STORY_EVENTS: Final = 8


class BulkState(Enum):
    """The state of the connection."""

    OPEN = "open"
    CLOSING = "closing"
    ENDED = "ended"


class BulkMachine:
    """One side of the bulk connection with one peer. peer: how it is called in errors.

    Ends with exactly one `End`; whatever is asked for after it is finished with the error of the end. Raises
    `LocalProtocolError` on events out of turn. What the peer does wrong ends the connection, and only that.
    """

    def __init__(self, *, peer: int | str, limits: events.BulkLimits | None = None) -> None:
        self.peer = peer
        self.state = BulkState.OPEN
        self._limits = limits or events.BulkLimits()
        self._stripes: dict[int, StripeState] = {}
        self._stripes_used = STRIPES_MAX
        self._first_stripe: int | None = None
        """For acknowledgements and refusals."""
        self._transfers: set[int] = set()
        """Ours, not finished."""
        self._urgent: deque[tuple[Record, bytes, Outgoing | None]] = deque()
        self._puts: deque[Outgoing] = deque()
        self._unacked: deque[Outgoing] = deque()
        """Those that are cut whole, in order."""
        self._next_put = 0
        self._acked = 0
        """Puts of ours that the peer has published."""
        self._gets: dict[int, OwnGet] = {}
        self._gets_waiting: deque[events.GetAsked] = deque()
        self._gets_asked = 0
        self._serving: dict[int, Outgoing] = {}
        """The peer's gets: numbers to answers."""
        self._early_gets: dict[int, Get] = {}
        """Those of them that have to wait for puts."""
        self._answers: deque[Outgoing] = deque()
        self._answer_is_next = False
        self._arrivals = Arrivals()
        self.end_error: ZbmdError = LinkClosed(f"the bulk connection with {peer} is closed")
        """The error of a transfer that is asked for after the end."""
        self._actions: list[events.BulkAction] = []
        self._story: deque[str] = deque(maxlen=STORY_EVENTS)

    def handle(self, event: events.BulkEvent, *, now_ns: int) -> list[events.BulkAction]:
        """Take one event; `now_ns` is monotonic. See `Machine`."""
        self._actions = []
        try:
            self._dispatch(event, now_ns)
            if self.state is not BulkState.ENDED:
                self._feed()
                self._close_if_done()
        except BulkError as error:
            named = type(error)(f"{self.peer}: {error}", story=tuple(self._story))
            self._fail(named, tell=True)
        return self._actions

    def rest(self) -> FastPathCounts | None:
        """Return the counts from which the fast path may start, until `QuickMoved`; None: not now."""
        moving = self._puts or self._urgent or self._gets or self._serving
        if (
            self.state is not BulkState.OPEN
            or self._first_stripe is None
            or moving
            or not self._arrivals.at_rest
        ):
            return None
        if any(
            stripe.handed or stripe.receiving or stripe.goodbye_heard for stripe in self._stripes.values()
        ):
            return None
        awaited = next((put.order + 1 for put in reversed(self._unacked) if not put.settled), self._acked)
        return FastPathCounts(
            stripe=self._first_stripe,
            puts=self._next_put,
            acked=self._acked,
            awaited=awaited,
            published=self._arrivals.published,
            acknowledged=self._arrivals.acknowledged,
        )

    def check_invariants(self) -> None:
        """See `Machine`."""
        limits = self._limits
        if self.state is BulkState.ENDED:
            assert not self._transfers and not self._serving, "something outlives the end"
            return
        if self.state is BulkState.OPEN:
            assert self._acked + len(self._unacked) + len(self._puts) == self._next_put
        assert self._gets_asked <= GETS_MAX and len(self._serving) <= GETS_MAX
        self._arrivals.check_invariants()
        for stripe in self._stripes.values():
            assert stripe.handed_bytes == sum(record.nbytes for record, _ in stripe.handed)
            assert stripe.handed_bytes < limits.stripe_bytes_max + FRAGMENT_BYTES_MAX
            assert not (stripe.goodbye_sent and stripe.handed)

    # -- events --------------------------------------------------------------------------------------

    def _dispatch(self, event: events.BulkEvent, now_ns: int) -> None:
        match event:
            case events.PutAsked() | events.NotifyAsked() | events.GetAsked():
                self._asked(event)
            case events.StripesUsed(count=count):
                self._stripes_used = count
            case _ if self.state is BulkState.ENDED:
                return
            case events.StripeOpened(stripe=stripe):
                if stripe in self._stripes:
                    raise LocalProtocolError(f"stripe {stripe} to {self.peer} is open already")
                self._stripes[stripe] = StripeState()
                if self._first_stripe is None:
                    self._first_stripe = stripe
            case events.RecordsSent(stripe=stripe, records=records):
                self._sent(self._stripes[stripe], stripe, records)
            case events.RecordCame(stripe=stripe, record=record):
                self._story.append(f"{type(record).__name__} on stripe {stripe}")
                self._came(stripe, self._stripes[stripe], record, now_ns)
            case events.PayloadCame(stripe=stripe, text=text):
                self._payload_came(self._stripes[stripe], text)
            case events.PutRefused(stripe=stripe, reason=reason):
                put = self._stripes[stripe].receiving
                assert isinstance(put, Put)
                self._arrivals.refuse(put, reason)
            case events.QuickMoved():
                self._quick_moved(event)
            case events.GetResolved(get=get):
                self._answers.append(self._serving[get])
            case events.GetRefused(get=get, reason=reason):
                refused_text = _text(reason)
                refusal = TransferRefusal(transfer=get, nbytes=len(refused_text))
                self._urgent.append((refusal, refused_text, self._serving[get]))
            case events.StripeEnded(stripe=stripe, between_records=between_records):
                self._stripe_ended(self._stripes.get(stripe), between_records)
            case events.StripeFailed(error=error):
                self._fail(error, tell=isinstance(error, BulkError))
            case events.CloseAsked():
                self._start_closing(now_ns)
            case TimerFired():
                if self.state is BulkState.CLOSING:
                    error = LinkClosed(f"{self.peer} did not answer our goodbye in time")
                    self._fail(error, tell=False)
            case _:
                assert_never(event)

    def _asked(self, ask: events.PutAsked | events.NotifyAsked | events.GetAsked) -> None:
        if ask.transfer in self._transfers:
            raise LocalProtocolError(f"transfer {ask.transfer} is under way already")
        if self.state is not BulkState.OPEN:
            self._actions.append(events.Finish(transfer=ask.transfer, error=self.end_error))
            return
        self._transfers.add(ask.transfer)
        if isinstance(ask, events.GetAsked):
            self._gets[ask.transfer] = OwnGet(ask, after=self._next_put)
            self._gets_waiting.append(ask)
            return
        total = ask.total if isinstance(ask, events.PutAsked) else 0
        put = Outgoing(events.SourceKind.TRANSFER, ask.transfer, total, order=self._next_put, ask=ask)
        self._next_put += 1
        self._puts.append(put)

    def _quick_moved(self, event: events.QuickMoved) -> None:
        if self.rest() is None:
            raise LocalProtocolError(f"puts to {self.peer} went past a machine that was not at rest")
        for _ in range(event.puts):
            put = Outgoing(
                events.SourceKind.TRANSFER, 0, 0, order=self._next_put, cut_whole=True, settled=True
            )
            self._next_put += 1
            self._unacked.append(put)
        self._acknowledged(event.acked)
        self._arrivals.go_on(event.published, event.acknowledged)

    def _sent(self, stripe: StripeState, number: int, records: int) -> None:
        if records > len(stripe.handed):
            raise LocalProtocolError(f"{records} records sent, of {len(stripe.handed)} given to a stripe")
        for _ in range(records):
            record, outgoing = stripe.handed.popleft()
            stripe.handed_bytes -= record.nbytes
            if isinstance(record, Goodbye):
                stripe.goodbye_sent = True
                self._actions.append(events.ShutStripe(stripe=number))
            if outgoing is not None:
                outgoing.unsent -= 1
                if outgoing.cut_whole and outgoing.unsent == 0:
                    self._all_sent(outgoing)

    def _all_sent(self, outgoing: Outgoing) -> None:
        if outgoing.of is events.SourceKind.SERVED:
            del self._serving[outgoing.number]
            self._actions.append(events.Unserve(get=outgoing.number))

    def _finish(self, transfer: int, error: ZbmdError | None = None) -> None:
        self._transfers.remove(transfer)
        self._actions.append(events.Finish(transfer=transfer, error=error))

    # -- what comes ----------------------------------------------------------------------------------

    def _came(self, number: int, stripe: StripeState, record: Record, now_ns: int) -> None:
        if stripe.receiving is not None:
            raise LocalProtocolError(f"a record on stripe {number} before the payload of the last")
        match record:
            case Put():
                self._arrivals.fragment(record)
                stripe.receiving, stripe.held_back = record, True
                self._land()
            case Notify():
                self._arrivals.notify(record)
                self._land()
                self._publish()
            case Get():
                self._get_came(record)
            case Data():
                self._data_came(number, stripe, record)
            case TransferRefusal() | PutRefusal() | Error():
                if isinstance(record, TransferRefusal):
                    self._own_get(record.transfer)
                elif isinstance(record, PutRefusal):
                    self._own_put(record.transfer)
                stripe.receiving = record
                self._actions.append(events.ReceiveText(stripe=number))
            case Ack(puts=puts):
                self._acknowledged(puts)
            case Goodbye():
                stripe.goodbye_heard = True
                self._start_closing(now_ns)
            case _:
                assert_never(record)

    def _acknowledged(self, puts: int) -> None:
        if not self._acked <= puts <= self._acked + len(self._unacked):
            raise Malformed(f"{puts} puts are acknowledged, and {self._acked + len(self._unacked)} sent")
        while self._acked < puts:
            put = self._unacked.popleft()
            if put.unsent:
                raise Malformed(f"put {put.order} is acknowledged before it is sent")
            self._acked += 1
            if not (put.refused or put.settled):
                self._finish(put.number)

    def _own_put(self, order: int) -> Outgoing:
        index = order - self._acked
        if not 0 <= index < len(self._unacked) or self._unacked[index].refused:
            raise Malformed(f"put {order} is refused, which is not under way")
        return self._unacked[index]

    def _get_came(self, get: Get) -> None:
        if get.transfer in self._serving or len(self._serving) >= GETS_MAX:
            raise Malformed(f"get {get.transfer} came twice, or is one too many at once")
        answer = Outgoing(events.SourceKind.SERVED, get.transfer, get.total)
        self._serving[get.transfer] = answer
        if get.after <= self._arrivals.published:
            self._serve(get)
        else:
            self._early_gets[get.transfer] = get

    def _serve(self, get: Get) -> None:
        self._actions.append(events.Serve(get=get.transfer, handle=get.handle, at=get.at, total=get.total))

    def _own_get(self, transfer: int) -> OwnGet:
        get = self._gets.get(transfer)
        if get is None or not get.asked:
            raise Malformed(f"an answer came to get {transfer}, which we have not asked")
        return get

    def _data_came(self, number: int, stripe: StripeState, data: Data) -> None:
        get = self._own_get(data.transfer)
        if get.fragments is None:
            get.fragments = Fragments(data)
        if data.total != get.ask.total:
            raise Malformed(f"the answer to get {data.transfer} is not what was asked for")
        get.fragments.claim(data)
        stripe.receiving = data
        self._actions.append(
            events.ReceiveGet(stripe=number, transfer=data.transfer, offset=data.offset, nbytes=data.nbytes)
        )

    def _payload_came(self, stripe: StripeState, text: str) -> None:
        record, stripe.receiving = stripe.receiving, None
        match record:
            case Put():
                self._arrivals.fragment_done(record)
                self._land()
                self._publish()
            case Data():
                get = self._own_get(record.transfer)
                assert get.fragments is not None
                get.fragments.left -= 1
                if get.fragments.left == 0:
                    self._get_done(record.transfer)
            case TransferRefusal():
                error = RemoteProtocolError(f"{self.peer} refuses a get: {text}")
                self._get_done(record.transfer, error)
            case PutRefusal():
                put = self._own_put(record.transfer)
                if put.unsent:
                    raise Malformed(f"put {put.order} is refused before it is sent")
                put.refused = True
                if not put.settled:
                    self._finish(put.number, RemoteProtocolError(f"{self.peer} refuses a put: {text}"))
            case Error():
                self._fail(BulkError(f"{self.peer} ends the connection: {text}"), tell=False)
            case _:
                raise LocalProtocolError("a payload came that was not due", story=tuple(self._story))

    def _get_done(self, transfer: int, error: ZbmdError | None = None) -> None:
        # On several stripes a refusal may come while a fragment is received: the peer must not do both.
        if error is not None and self._own_get(transfer).fragments is not None:
            raise Malformed(f"get {transfer} is served and refused")
        del self._gets[transfer]
        self._gets_asked -= 1
        self._finish(transfer, error)

    def _land(self) -> None:
        """Have the payloads received that nothing holds back any more."""
        for number, stripe in self._stripes.items():
            put = stripe.receiving
            if stripe.held_back and isinstance(put, Put) and self._arrivals.may_land(put):
                stripe.held_back = False
                self._actions.append(
                    events.ReceivePut(
                        stripe=number, handle=put.handle, offset=put.at + put.offset, nbytes=put.nbytes
                    )
                )

    def _publish(self) -> None:
        for put, refused in self._arrivals.publish():
            if refused is None:
                self._actions.append(events.Publish(channel=put.channel, value=put.value))
            else:
                text = _text(refused)
                refusal = PutRefusal(transfer=put.transfer, nbytes=len(text))
                self._urgent.append((refusal, text, None))
        for number, get in list(self._early_gets.items()):
            if get.after <= self._arrivals.published:
                del self._early_gets[number]
                self._serve(get)

    # -- what goes -----------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Give records to stripes, one at a time to each, until no stripe has room or there are none."""
        given = True
        while given:
            given = False
            for number, stripe in islice(self._stripes.items(), self._stripes_used):
                has_room = stripe.handed_bytes < self._limits.stripe_bytes_max and not stripe.goodbye_said
                if has_room and len(stripe.handed) < PUTS_AHEAD_MAX:
                    given |= self._give_next(number, stripe)

    def _give_next(self, number: int, stripe: StripeState) -> bool:
        if number == self._first_stripe and self._give_urgent(number, stripe):
            return True
        if self._gets_waiting and self._gets_asked < GETS_MAX:
            ask = self._gets_waiting.popleft()
            own = self._gets[ask.transfer]
            own.asked = True
            self._gets_asked += 1
            get = Get(transfer=ask.transfer, handle=ask.handle, at=ask.at, total=ask.total, after=own.after)
            self._give(number, stripe, get, None)
            return True
        may_put = bool(self._puts) and self._puts[0].order - self._acked < PUTS_AHEAD_MAX
        if self._answers and (self._answer_is_next or not may_put):
            self._answer_is_next = False
            self._give_fragment(number, stripe, self._answers)
        elif may_put:
            self._answer_is_next = True
            self._give_fragment(number, stripe, self._puts)
        else:
            return False
        return True

    def _give_urgent(self, number: int, stripe: StripeState) -> bool:
        if self._urgent:
            record, text, outgoing = self._urgent.popleft()
            if outgoing is not None:
                outgoing.cut_whole = True
            self._give(number, stripe, record, outgoing, text=text)
        elif self._arrivals.ack_due:
            # Behind the refusals of what it covers.
            self._give(number, stripe, Ack(puts=self._arrivals.acknowledge()), None)
        else:
            return False
        return True

    def _give_fragment(self, number: int, stripe: StripeState, queue: deque[Outgoing]) -> None:
        outgoing = queue[0]
        if not outgoing.fragment_bytes:
            outgoing.fragment_bytes = self._fragment_bytes(outgoing.total)
        offset = outgoing.cut_bytes
        nbytes = min(outgoing.fragment_bytes, outgoing.total - offset)
        record = fragment_record(outgoing, offset, nbytes)
        outgoing.cut_bytes += nbytes
        if outgoing.cut_bytes == outgoing.total:
            outgoing.cut_whole = True
            queue.popleft()
            if outgoing.of is events.SourceKind.TRANSFER:
                self._unacked.append(outgoing)
        source = events.Source(of=outgoing.of, number=outgoing.number, offset=offset, nbytes=nbytes)
        self._give(number, stripe, record, outgoing, source=source if nbytes else None)

    def _fragment_bytes(self, total: int) -> int:
        stripes, limits = min(len(self._stripes), self._stripes_used), self._limits
        if stripes == 1:
            return FRAGMENT_BYTES_MAX
        share = -(-total // (stripes * limits.fragment_bytes_min)) * limits.fragment_bytes_min
        return max(limits.fragment_bytes_min, min(share, limits.fragment_bytes))

    def _give(
        self,
        number: int,
        stripe: StripeState,
        record: Record,
        outgoing: Outgoing | None,
        *,
        source: events.Source | None = None,
        text: bytes = b"",
    ) -> None:
        stripe.handed.append((record, outgoing))
        stripe.handed_bytes += record.nbytes
        if outgoing is not None:
            outgoing.unsent += 1
        self._actions.append(events.SendRecord(stripe=number, record=record, source=source, text=text))

    # -- the end -------------------------------------------------------------------------------------

    def _start_closing(self, now_ns: int) -> None:
        if self.state is BulkState.OPEN:
            self.state = BulkState.CLOSING
            self._actions.append(SetTimer(at_ns=now_ns + self._limits.close_ns))

    def _stripe_ended(self, stripe: StripeState | None, between_records: bool) -> None:
        if stripe is not None and not stripe.goodbye_heard:
            where = "" if between_records else " in the middle of a record"
            self._fail(PeerLost(self.peer, f"its bulk connection ended{where}"), tell=False)

    def _close_if_done(self) -> None:
        if self.state is not BulkState.CLOSING:
            return
        if all(stripe.goodbye_heard for stripe in self._stripes.values()):
            for transfer in list(self._gets):
                self._finish(transfer, self.end_error)
            self._gets.clear()
            self._gets_waiting.clear()
            while self._unacked and not self._unacked[0].unsent:
                put = self._unacked.popleft()
                if not (put.refused or put.settled):
                    self._finish(put.number, self.end_error)
        under_way = self._puts or self._unacked or self._serving or self._gets
        if not (under_way or self._urgent or self._arrivals.ack_due):
            for number, stripe in self._stripes.items():
                if not stripe.goodbye_said:
                    stripe.goodbye_said = True
                    self._give(number, stripe, Goodbye(), None)
        for number, stripe in list(self._stripes.items()):
            if stripe.goodbye_sent and stripe.goodbye_heard:
                del self._stripes[number]
                self._actions.append(events.CloseStripe(stripe=number))
        if not self._stripes:
            self._fail(None, tell=False)

    def _fail(self, error: ZbmdError | None, *, tell: bool) -> None:
        """The end, orderly without an error.

        Tell: say why on a stripe that is free for it, if there is one.
        """
        if error is not None:
            self.end_error = error
        if isinstance(error, PeerLost | RemoteProtocolError):
            self._actions.append(events.MarkLost())
        if tell:
            text = _text(str(error))
            for number, stripe in self._stripes.items():
                if not stripe.handed and not stripe.goodbye_said:
                    self._give(number, stripe, Error(nbytes=len(text)), None, text=text)
                    break
        for transfer in sorted(self._transfers):
            self._actions.append(events.Finish(transfer=transfer, error=self.end_error))
        self._actions += [events.Unserve(get=get) for get in self._serving]
        self._transfers.clear()
        self._serving.clear()
        self.state = BulkState.ENDED
        self._actions.append(events.End(error=error))


def _text(reason: str) -> bytes:
    return (reason or "no reason").encode(errors="replace")[:TEXT_BYTES_MAX]
