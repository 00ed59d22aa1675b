"""The bulk protocol between two machines, over stripes that are cut and interleaved at will."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bulk.bulk_pair import REGION_BYTES, BulkEnd, BulkPair

from zbmd.transport.bulk import events
from zbmd.transport.bulk.machine import BulkMachine, BulkState
from zbmd.transport.bulk.records import (
    GETS_MAX,
    PUTS_AHEAD_MAX,
    Ack,
    Data,
    Get,
    Goodbye,
    Malformed,
    Notify,
    Put,
    PutRefusal,
    Record,
    TransferRefusal,
)
from zbmd.transport.errors import LinkClosed, LocalProtocolError, PeerLost
from zbmd.transport.machine import TimerFired
from zbmd.transport.memory.region import RegionHandle

KEY = bytes(range(32))
SMALL = events.BulkLimits(fragment_bytes=512, fragment_bytes_min=64, stripe_bytes_max=1024)


def settle(pair: BulkPair, rng: random.Random) -> None:
    """Let bytes move in pieces of any size, on any stripe, in any order, until nothing is left."""
    idle = 0
    while idle < 64:
        end = rng.choice((pair.a, pair.b))
        stripe = rng.choice(list(end.ports))
        moved = rng.choice((end.send, end.receive))(stripe, rng.choice((1, 7, 100, 5000)))
        idle = 0 if moved else idle + 1
    pair.run()


@settings(max_examples=60, deadline=None)
@given(
    stripes=st.integers(1, 4),
    keyed=st.booleans(),
    puts=st.lists(st.integers(0, 4000), max_size=12),
    gets=st.lists(st.integers(0, 4000), max_size=6),
    used=st.lists(st.integers(1, 5), max_size=3),
    seed=st.integers(0, 1 << 32),
)
def test_bytes_are_in_place_whenever_a_notification_is_published(
    stripes: int, keyed: bool, puts: list[int], gets: list[int], used: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    pair = BulkPair(stripes, key=KEY if keyed else None, limits=SMALL)
    a, b = pair.a, pair.b
    b.arena[:] = rng.randbytes(REGION_BYTES)
    sources = [rng.randbytes(nbytes) for nbytes in puts]
    expected = bytearray(REGION_BYTES)

    def on_publish(channel: int, value: int) -> None:
        assert channel == 3 and value == len(b.published), "out of order"
        at = 5000 * (value - 1)
        expected[at : at + puts[value - 1]] = sources[value - 1]
        assert b.inbox[at : at + puts[value - 1]] == sources[value - 1]

    b.on_publish = on_publish
    for i, source in enumerate(sources):
        if i < len(used):
            for end in (a, b):
                end.handle(events.StripesUsed(count=used[i]))
        a.put(b.inbox_handle, source, 5000 * i, channel=3, value=i + 1)
    asked = {a.get(b.arena_handle, nbytes, 100 * i): (100 * i, nbytes) for i, nbytes in enumerate(gets)}
    settle(pair, rng)
    assert len(b.published) == len(puts) and b.inbox == expected
    for transfer, (at, nbytes) in asked.items():
        assert a.buffers[transfer] == b.arena[at : at + nbytes]
    assert set(a.finished) == set(range(1, a.transfers + 1)) and not any(a.finished.values())
    assert not b.served
    a.handle(events.CloseAsked())
    settle(pair, rng)
    for end in (a, b):
        assert end.end is not None and end.end.error is None and all(p.closed for p in end.ports.values())


@settings(max_examples=60, deadline=None)
@given(
    stripes=st.integers(1, 4),
    puts=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 3000)), max_size=12),
    seed=st.integers(0, 1 << 32),
)
def test_puts_that_overlap_take_effect_in_their_order_and_a_get_sees_them(
    stripes: int, puts: list[tuple[int, int]], seed: int
) -> None:
    rng = random.Random(seed)
    pair = BulkPair(stripes, key=None, limits=SMALL)
    a, b = pair.a, pair.b
    b.arena = b.inbox
    expected = bytearray(REGION_BYTES)
    for value, (at, nbytes) in enumerate(puts, 1):
        a.put(b.inbox_handle, bytes([value]) * nbytes, at, channel=0, value=value)
        expected[at : at + nbytes] = bytes([value]) * nbytes
    last = a.get(b.arena_handle, 5000, 0)
    settle(pair, rng)
    assert b.inbox == expected
    assert a.buffers[last] == expected[:5000] and len(b.published) == len(puts)


def test_a_later_put_waits_for_an_earlier_one_on_another_stripe() -> None:
    pair = BulkPair(2, key=KEY, limits=SMALL)
    pair.a.put(pair.b.inbox_handle, bytes(range(250)) * 5, 0, channel=0, value=1)
    pair.a.notify(0, 2)
    while pair.a.send(1, 1 << 20):
        pair.b.receive(1, 1 << 20)
    assert pair.b.published == []
    pair.run()
    assert pair.b.published == [(0, 1), (0, 2)]


def test_more_notifications_than_may_be_ahead_all_arrive_in_order() -> None:
    pair = BulkPair(3, key=None)
    count = 3 * PUTS_AHEAD_MAX
    for value in range(1, count + 1):
        pair.a.notify(0, value)
    for stripe in (1, 2):
        pair.a.send(stripe, 1 << 30)
    assert len(pair.a.finished) < PUTS_AHEAD_MAX
    settle(pair, random.Random(1))
    assert pair.b.published == [(0, value) for value in range(1, count + 1)]


def test_gets_beyond_the_bound_wait_their_turn() -> None:
    pair = BulkPair(1, key=KEY)
    for _ in range(2 * GETS_MAX):
        pair.a.get(pair.b.arena_handle, 10, 0)
    pair.run()
    assert len(pair.a.finished) == 2 * GETS_MAX and not any(pair.a.finished.values())


def test_what_is_asked_before_there_is_a_stripe_waits_for_it() -> None:
    pair = BulkPair(0, key=KEY)
    pair.a.put(pair.b.inbox_handle, b"early", 0, channel=1, value=9)
    pair.run()
    assert not pair.a.finished
    pair.open_stripe(4)
    pair.run()
    assert pair.b.published == [(1, 9)] and pair.b.inbox[:5] == b"early"


def forged(end: BulkEnd) -> RegionHandle:
    return RegionHandle(slot=end.slot, incarnation=2, offset=0, nbytes=REGION_BYTES, writable=True)


@pytest.mark.parametrize("stripes", [1, 3])
@pytest.mark.parametrize("nbytes", [0, 4, 4000])
def test_a_refused_put_fails_alone(nbytes: int, stripes: int) -> None:
    pair = BulkPair(stripes, key=KEY, limits=SMALL)
    first = pair.a.put(pair.b.inbox_handle, b"good", 0, channel=0, value=1)
    bad = pair.a.put(forged(pair.b), bytes(nbytes), 0, channel=1, value=1)
    last = pair.a.notify(2, 1)
    settle(pair, random.Random(4))
    assert pair.b.published == [(0, 1), (2, 1)] and pair.b.inbox[:8] == b"good" + bytes(4)
    assert "no such region" in str(pair.a.finished[bad])
    assert pair.a.finished[first] is None and pair.a.finished[last] is None
    pair.a.handle(events.CloseAsked())
    settle(pair, random.Random(5))
    assert [end.end.error if end.end else 0 for end in (pair.a, pair.b)] == [None, None]


def test_a_refused_get_fails_alone() -> None:
    pair = BulkPair(1, key=KEY)
    bad = pair.a.get(forged(pair.b), 10, 0)
    good = pair.a.get(pair.b.arena_handle, 10, 0)
    pair.run()
    assert "no such region" in str(pair.a.finished[bad]) and pair.a.finished[good] is None
    assert pair.a.end is None and pair.b.end is None and not pair.b.served


@pytest.mark.parametrize("cut", [0, 1, 150, 2000])
def test_the_end_of_a_stream_at_any_place_loses_the_peer(cut: int) -> None:
    pair = BulkPair(1, key=KEY)
    pair.a.put(pair.b.inbox_handle, bytes(4000), 0, channel=0, value=1)
    got = pair.a.get(pair.b.arena_handle, 10, 0)
    pair.a.send(0, cut)
    pair.a.ports[0].out.shut = pair.b.ports[0].out.shut = True
    pair.b.receive(0, 1 << 20)
    pair.a.receive(0, 1 << 20)
    assert pair.b.published == []
    for end in (pair.a, pair.b):
        assert end.end is not None and isinstance(end.end.error, PeerLost)
    assert isinstance(pair.a.finished[got], PeerLost)
    pair.a.notify(0, 1)
    assert isinstance(pair.a.finished[pair.a.transfers], PeerLost)


def test_what_is_under_way_is_finished_before_an_orderly_end() -> None:
    pair = BulkPair(2, key=KEY, limits=SMALL)
    pair.a.put(pair.b.inbox_handle, b"z" * 3000, 0, channel=0, value=1)
    get = pair.b.get(pair.a.arena_handle, 3000, 0)
    for stripe in range(2):
        pair.b.send(stripe, 1 << 20)
        pair.a.receive(stripe, 1 << 20)
    pair.a.handle(events.CloseAsked())
    pair.b.handle(events.CloseAsked())
    pair.a.notify(0, 2)
    assert isinstance(pair.a.finished[pair.a.transfers], LinkClosed)
    settle(pair, random.Random(2))
    assert pair.b.published == [(0, 1)] and pair.b.inbox[:3000] == b"z" * 3000
    assert pair.b.finished[get] is None
    assert [end.end.error if end.end else 0 for end in (pair.a, pair.b)] == [None, None]


def test_a_get_that_meets_a_goodbye_fails() -> None:
    pair = BulkPair(2, key=KEY)
    get = pair.b.get(pair.a.arena_handle, 3000, 0)
    pair.a.handle(events.CloseAsked())
    settle(pair, random.Random(3))
    assert isinstance(pair.b.finished[get], LinkClosed)
    assert [end.end.error if end.end else 0 for end in (pair.a, pair.b)] == [None, None]


def test_a_goodbye_that_is_not_answered_in_time() -> None:
    pair = BulkPair(1, key=KEY)
    pair.a.handle(TimerFired())
    pair.a.handle(events.CloseAsked())
    pair.a.send(0, 1 << 20)
    assert pair.a.machine.state is BulkState.CLOSING
    pair.a.handle(TimerFired())
    assert pair.a.end is not None and isinstance(pair.a.end.error, LinkClosed)


def test_closing_without_stripes_is_at_once() -> None:
    pair = BulkPair(0, key=None)
    pair.a.handle(events.CloseAsked())
    assert pair.a.end is not None and pair.a.end.error is None


REGION = RegionHandle(slot=1, incarnation=1, offset=0, nbytes=REGION_BYTES, writable=True)


def fragment(
    number: int = 0, *, offset: int = 0, total: int = 16, fragment_bytes: int = 8, value: int = 1
) -> Put:
    nbytes = min(fragment_bytes, total - offset)
    return Put(
        transfer=number, handle=REGION, at=0, total=total, fragment_bytes=fragment_bytes, offset=offset,
        nbytes=nbytes, channel=0, value=value,
    )  # fmt: skip


def data(transfer: int, *, total: int = 8, offset: int = 0) -> Data:
    return Data(
        transfer=transfer, total=total, fragment_bytes=8, offset=offset, nbytes=min(8, total - offset)
    )


def note(number: int) -> Notify:
    return Notify(transfer=number, channel=0, value=1)


@pytest.mark.parametrize(
    "records",
    [
        [fragment(), fragment()],
        [fragment(), fragment(offset=8, value=2)],
        [fragment(), fragment(offset=8, fragment_bytes=4)],
        [fragment(PUTS_AHEAD_MAX)],
        [note(0), note(0)],
        [note(1), note(1)],
        [note(1), fragment(1)],
        [fragment(), note(0)],
        [Ack(puts=1)],
        [data(1)],
        [TransferRefusal(transfer=1, nbytes=5)],
        [PutRefusal(transfer=0, nbytes=5)],
        [Get(transfer=i, handle=REGION, at=0, total=1, after=0) for i in range(GETS_MAX + 1)],
        [Get(transfer=3, handle=REGION, at=0, total=1, after=0)] * 2,
    ],
)
def test_a_peer_that_breaks_the_order_is_told_apart(records: list[Record]) -> None:
    end = BulkEnd(1)
    machine = end.machine
    for stripe in range(len(records)):
        machine.handle(events.StripeOpened(stripe=stripe), now_ns=0)
    for stripe, record in enumerate(records):
        assert machine.state is BulkState.OPEN
        machine.handle(events.RecordCame(stripe=stripe, record=record), now_ns=0)
    actions = machine.handle(events.CloseAsked(), now_ns=0)
    assert machine.state is BulkState.ENDED and actions == []
    with pytest.raises(Malformed):
        raise machine.end_error


def test_answers_that_do_not_fit_the_question() -> None:
    for records in ([data(1, total=9)], [data(1, total=16), data(1, total=16)]):
        machine = BulkMachine(peer=1)
        for stripe in range(2):
            machine.handle(events.StripeOpened(stripe=stripe), now_ns=0)
        total = records[-1].total if len(records) == 2 else 8
        machine.handle(events.GetAsked(transfer=1, handle=REGION, at=0, total=total), now_ns=0)
        for stripe, record in enumerate(records):
            machine.handle(events.RecordCame(stripe=stripe, record=record), now_ns=0)
        assert isinstance(machine.end_error, Malformed)


def test_misuse_is_told_as_ours() -> None:
    machine = BulkMachine(peer=1)
    machine.handle(events.StripeOpened(stripe=0), now_ns=0)
    with pytest.raises(LocalProtocolError, match="open already"):
        machine.handle(events.StripeOpened(stripe=0), now_ns=0)
    with pytest.raises(LocalProtocolError, match="records sent"):
        machine.handle(events.RecordsSent(stripe=0, records=1), now_ns=0)
    machine.handle(events.NotifyAsked(transfer=1, channel=0, value=1), now_ns=0)
    with pytest.raises(LocalProtocolError, match="under way"):
        machine.handle(events.NotifyAsked(transfer=1, channel=0, value=1), now_ns=0)
    with pytest.raises(LocalProtocolError):
        events.BulkLimits(stripe_bytes_max=0)
    with pytest.raises(LocalProtocolError):
        events.BulkLimits(fragment_bytes=1 << 30)


def test_events_after_the_end_change_nothing() -> None:
    machine = BulkMachine(peer=1)
    machine.handle(events.StripeOpened(stripe=0), now_ns=0)
    machine.handle(events.StripeFailed(stripe=0, error=PeerLost(1, "reset")), now_ns=0)
    late = (
        events.StripeEnded(stripe=0, between_records=True),
        events.RecordCame(stripe=0, record=Goodbye()),
        TimerFired(),
    )
    for event in late:
        assert machine.handle(event, now_ns=0) == []


def test_what_is_sent_goes_over_the_first_stripes_alone_if_it_is_told_so() -> None:
    pair = BulkPair(4, key=None, limits=SMALL)
    a, b = pair.a, pair.b
    a.handle(events.StripesUsed(count=1))
    a.put(b.inbox_handle, bytes(4000), 0, channel=3, value=1)
    assert sorted(number for number, port in a.ports.items() if not port.writer.idle) == [0]
    settle(pair, random.Random(1))
    a.handle(events.StripesUsed(count=3))
    a.put(b.inbox_handle, bytes(4000), 0, channel=3, value=2)
    assert sorted(number for number, port in a.ports.items() if not port.writer.idle) == [0, 1, 2]
    settle(pair, random.Random(1))
    assert len(b.published) == 2
