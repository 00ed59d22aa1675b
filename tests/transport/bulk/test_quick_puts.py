"""Small puts past the machine: the same bytes, and nothing taken that the machine would not take."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bulk.bulk_host import BulkHost, deadline, join

from zbmd.transport.bulk._fast_path import QUICK_BYTES_MAX, QuickPuts
from zbmd.transport.bulk.peer import BulkPeer, BulkRegion
from zbmd.transport.bulk.records import HEADER_BYTES, PUTS_AHEAD_MAX, Ack, Notify, Put, Record
from zbmd.transport.bulk.stream import PayloadArrived, StripeReader, StripeWriter
from zbmd.transport.errors import PeerLost
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.segment import Segment
from zbmd.transport.memory.transfer import DONE
from zbmd.transport.native import _native
from zbmd.transport.secure.protection import TAG_BYTES, Protection, RecordMac

KEY = bytes(range(32))
REGION_BYTES = 1 << 12
HANDLE = RegionHandle(slot=1, incarnation=2, offset=4096, nbytes=REGION_BYTES, writable=True)
LARGE = RegionHandle(slot=1, incarnation=2, offset=8192, nbytes=1 << 18, writable=True)
PEER, CHANNEL = 5, 3


class Side:
    """Quick puts over memory of its own; `keyed`: with tags."""

    version = 0

    def __init__(self, segment: Segment, *, keyed: bool, handle: RegionHandle = HANDLE) -> None:
        self.segment = segment
        self.handle = handle
        self.memory = bytearray(handle.nbytes)
        self.asked = 0
        seal = RecordMac(KEY).seal if keyed else None
        self.quick = QuickPuts(
            seal_sent=seal,
            seal_come=seal,
            resolve=self._resolve,
            versions=self,
            own=segment.mapping.address,
            slot=PEER,
        )
        self.quick.begin(0, 0, 0, 0, 0, 0, 0)

    def _resolve(self, slot: int, incarnation: int, offset: int, nbytes: int) -> memoryview | None:
        self.asked += 1
        named = (slot, incarnation, offset, nbytes)
        handle = self.handle
        known = named == (handle.slot, handle.incarnation, handle.offset, handle.nbytes)
        return memoryview(self.memory) if known else None

    @property
    def cell(self) -> int:
        return int(_native.load_cell(self.segment.mapping.address, PEER, CHANNEL))

    def hear(self, data: bytes) -> bool:
        while data:
            room = self.quick.room
            taken = 0
            for piece in room:  # as a scattering receive fills them
                part = data[: len(piece)]
                piece[: len(part)], data = part, data[len(part) :]
                taken += len(part)
            if not self.quick.came(taken):
                return False
        return True


@pytest.fixture(scope="module")
def segment() -> Iterator[Segment]:
    made = Segment.create(slot=1, incarnation=2, arena_bytes=1 << 16, inbox_bytes=1 << 16)
    yield made
    made.close()


@pytest.fixture(params=["tags", "no tags"])
def keyed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "tags")


def put_record(
    number: int, data: bytes, *, at: int = 8, value: int | None = None, handle: RegionHandle = HANDLE
) -> Put:
    return Put(
        transfer=number, handle=handle, at=at, total=len(data), fragment_bytes=1 << 24, offset=0,
        nbytes=len(data), channel=CHANNEL, value=number + 1 if value is None else value,
    )  # fmt: skip


def written(*said: tuple[Record, bytes], keyed: bool) -> bytes:
    """As a stripe sends it."""
    writer = StripeWriter(RecordMac(KEY) if keyed else None)
    for record, data in said:
        writer.add(record, memoryview(data) if data else None)
    found = bytearray()
    while parts := writer.pending(16):
        found += b"".join(parts)
        writer.sent(sum(map(len, parts)))
    return bytes(found)


def test_a_stripe_reads_what_is_sent_quickly(segment: Segment, *, keyed: bool) -> None:
    side, reader = Side(segment, keyed=keyed), StripeReader(RecordMac(KEY) if keyed else None)
    data = random.Random(1).randbytes(300)
    side.hear(written((Notify(transfer=0, channel=CHANNEL, value=1), b""), keyed=keyed))
    sent = b"".join(
        (
            b"".join(side.quick.put(HANDLE, memoryview(data), 8, CHANNEL, 1) or ()),
            bytes(side.quick.notify(CHANNEL, 9) or b""),
            bytes(side.quick.acknowledge()),  # the put has told it already
        )
    )
    found: list[Record] = []
    into = bytearray(len(data))
    while sent:
        want = reader.want()
        n = min(len(want), len(sent))
        want[:n], sent = sent[:n], sent[n:]
        came = reader.filled(n)
        if came is None or isinstance(came, PayloadArrived):
            continue
        found.append(came)
        if came.nbytes:
            reader.receive_into(memoryview(into))
    assert found == [Ack(puts=1), put_record(0, data), Notify(transfer=1, channel=CHANNEL, value=9)]
    assert into == data and side.quick.new_puts == 2 and side.quick.sent_records == 3


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 400), min_size=1, max_size=8), keyed=st.booleans())
def test_what_a_stripe_writes_is_taken_however_it_is_cut(
    segment: Segment, cuts: list[int], *, keyed: bool
) -> None:
    side = Side(segment, keyed=keyed)
    first, second = b"x" * 100, b"y" * 50
    base = side.cell
    said = written(
        (put_record(0, first, value=base + 1), b"x" * 100),
        (Notify(transfer=1, channel=CHANNEL, value=base + 2), b""),
        (put_record(2, second, at=20, value=base + 3), second),
        keyed=keyed,
    )
    k = 0
    while said:
        part, said = said[: cuts[k % len(cuts)]], said[cuts[k % len(cuts)] :]
        assert side.hear(part)
        k += 1
    assert side.quick.published == 3 and side.cell == base + 3 and side.asked == 1
    assert side.memory[8:108] == (b"x" * 12 + b"y" * 50 + b"x" * 38) and side.quick.end() == b""


def long_puts(base: int) -> list[tuple[Record, bytes]]:
    """One that lands where it belongs, one that is here whole, one that lands."""
    draw = random.Random(3)
    said: list[tuple[Record, bytes]] = []
    for number, nbytes in enumerate((200_000, 300, 40_000)):
        data = draw.randbytes(nbytes)
        said.append((put_record(number, data, value=base + number + 1, handle=LARGE), data))
    return said


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 90_000), min_size=1, max_size=8), keyed=st.booleans())
def test_a_long_payload_is_received_where_it_belongs_however_it_is_cut(
    segment: Segment, cuts: list[int], *, keyed: bool
) -> None:
    side = Side(segment, keyed=keyed, handle=LARGE)
    base = side.cell
    records = long_puts(base)
    said, k, expected = written(*records, keyed=keyed), 0, bytearray(LARGE.nbytes)
    while said:
        part, said = said[: cuts[k % len(cuts)]], said[cuts[k % len(cuts)] :]
        published, cell = side.quick.published, side.cell
        assert side.hear(part) and side.cell - cell == side.quick.published - published
        k += 1
    for _, data in records:
        expected[8 : 8 + len(data)] = data
    assert side.quick.published == 3 and side.cell == base + 3
    assert side.memory == expected and side.quick.end() == b""


@pytest.mark.parametrize("cut", [0, 1, 20_000, 199_999])
def test_one_that_is_under_way_is_left_as_it_came(segment: Segment, cut: int, *, keyed: bool) -> None:
    """Return to the machine, which goes on; no peer has been notified of it."""
    side = Side(segment, keyed=keyed, handle=LARGE)
    cell = side.cell
    said = written(*long_puts(cell), keyed=keyed)[: HEADER_BYTES + TAG_BYTES * keyed + cut]
    assert side.hear(said) and side.quick.end() == said and side.cell == cell


def test_one_that_does_not_match_its_tag_is_left_too(segment: Segment) -> None:
    side = Side(segment, keyed=True, handle=LARGE)
    cell = side.cell
    said = bytearray(written(long_puts(cell)[0], keyed=True))
    said[100_000] ^= 1
    assert side.hear(bytes(said[:-1])) and not side.hear(bytes(said[-1:]))
    assert side.quick.end() == said and side.cell == cell


@pytest.mark.parametrize("nbytes", [100, 8_192, 8_193, QUICK_BYTES_MAX])
def test_what_is_long_is_sent_from_where_it_lies(segment: Segment, nbytes: int, *, keyed: bool) -> None:
    side = Side(segment, keyed=keyed)
    data = random.Random(nbytes).randbytes(nbytes)
    record = put_record(0, data)
    assert isinstance(record, Put)
    pieces = side.quick.put(HANDLE, memoryview(data), 8, CHANNEL, 1)
    assert pieces is not None and len(pieces) == (1 if nbytes <= 8_192 else 3)
    assert b"".join(pieces) == written((record, data), keyed=keyed)


def is_left(side: Side, said: bytes) -> bool:
    """Whether it is for the machine, as it came, and nothing has been done about it."""
    cell = side.cell
    left = not side.hear(said)
    return left and side.quick.end() == said and not any(side.memory) and side.cell == cell


@pytest.mark.parametrize(
    ("at", "byte"),
    [
        *((0, 3), (0, 9), (1, 0), (1, 2), (2, 255), (3, 1), (7, 2), (7, 0), (8, 1), (16, 1), (24, 99)),
        *((32, 99), (40, 1), (57, 16), (65, 0), (72, 8), (80, 9), (88, 7), (92, 1)),
    ],
)
def test_a_put_that_is_not_the_usual_one_is_left_to_the_machine(segment: Segment, at: int, byte: int) -> None:
    said = bytearray(written((put_record(0, b"z" * 100), b"z" * 100), keyed=False))
    assert said[at] != byte
    said[at] = byte
    side = Side(segment, keyed=False)
    if at == 24:  # shorter than it says of its whole, so what follows is another record's
        assert not side.hear(bytes(said)) and not any(side.memory)
    else:
        assert is_left(side, bytes(said))


@pytest.mark.parametrize(
    "record",
    [Notify(transfer=1, channel=CHANNEL, value=1), Ack(puts=1), put_record(1, b"z")],
)
def test_so_is_what_is_out_of_turn(segment: Segment, record: Record, *, keyed: bool) -> None:
    assert is_left(Side(segment, keyed=keyed), written((record, b"z" * record.nbytes), keyed=keyed))


@pytest.mark.parametrize("at", [0, 40, HEADER_BYTES, HEADER_BYTES + TAG_BYTES, -1])
def test_so_is_what_does_not_match_its_tag(segment: Segment, at: int) -> None:
    said = bytearray(written((put_record(0, b"z" * 100), b"z" * 100), keyed=True))
    said[at] ^= 1
    assert is_left(Side(segment, keyed=True), bytes(said))


def test_an_acknowledgement_that_a_transfer_waits_for_is_left(segment: Segment) -> None:
    side = Side(segment, keyed=False)
    side.quick.begin(0, 0, 2, 0, 1, 0, 0)
    assert is_left(side, written((Ack(puts=1), b""), keyed=False))
    side.quick.begin(0, 0, 2, 1, 1, 0, 0)
    assert side.hear(written((Ack(puts=2), b""), keyed=False)) and side.quick.acked == 2


def test_bounds(segment: Segment) -> None:
    side = Side(segment, keyed=False)
    for nbytes in (0, QUICK_BYTES_MAX + 1):
        assert side.quick.put(HANDLE, np.zeros(nbytes, np.uint8), 0, CHANNEL, 1) is None
    for number in range(PUTS_AHEAD_MAX):
        assert side.quick.notify(CHANNEL, number) is not None
    assert (
        side.quick.notify(CHANNEL, 0) is None
        and side.quick.put(HANDLE, memoryview(b"x"), 0, CHANNEL, 1) is None
    )


def test_memory_that_peers_may_write_no_more_is_asked_for_again(segment: Segment) -> None:
    side = Side(segment, keyed=False)
    said = [(put_record(k, b"q"), b"q") for k in range(3)]
    bytes_of = [written(*said[: k + 1], keyed=False) for k in range(3)]
    assert side.hear(bytes_of[0]) and side.hear(bytes_of[1][len(bytes_of[0]) :]) and side.asked == 1
    side.version += 1
    assert side.hear(bytes_of[2][len(bytes_of[1]) :]) and side.asked == 2


# -- in a data plane -------------------------------------------------------------------------------------


ROUNDS = 60
HALF = 2 * QUICK_BYTES_MAX
ASIDE = HALF - 8


class Talker:
    """One side of a conversation of which each drives its own plane."""

    def __init__(self, host: BulkHost, end: BulkPeer, other: int) -> None:
        self.host = host
        self.end = end
        self.other = other
        self.inbox = host.segment.inbox.empty(2 * HALF, np.uint8)
        self.inbox[:] = 0
        self.handle = host.regions.register(self.inbox)
        self.was_quick = 0

    def has_said(self, value: int) -> bool:
        return _native.load_cell(self.host.segment.mapping.address, self.other, CHANNEL) >= value

    def talk(self, theirs: RegionHandle) -> None:
        """In each round, tell a number behind a put whose bytes tell it, too; now and then in other ways."""
        draw, region, limit = random.Random(self.other), self.end.open_region(theirs), deadline()
        for k in range(1, ROUNDS + 1):
            nbytes = draw.choice((8, 900, 20_000, 300_000, QUICK_BYTES_MAX + 8))
            at = k % 2 * HALF  # the other half is still being looked at
            with self.host.plane.driving():
                region.put(np.full(nbytes, k, np.uint8), at, channel=CHANNEL, value=2 * k - 1)
                region.notify(CHANNEL, 2 * k)
                while not self.has_said(2 * k) and _native.now_ns() < limit:
                    if not self.host.plane.drive():
                        self.host.plane.park()  # what is held back for others leaves, too
                self.was_quick += self.end._quick.stripe >= 0
            assert self.has_said(2 * k) and self.inbox[at] == self.inbox[at + 7] == k
            if draw.random() < 0.2:
                region.put(np.full(8, k, np.uint8), ASIDE, channel=ASIDE % 7, value=k).wait(limit)


@pytest.mark.parametrize("protection", [Protection.MAC, Protection.NONE])
@pytest.mark.parametrize("stripes", [1, 2])
def test_quick_puts_and_all_else_keep_their_order(protection: Protection, stripes: int) -> None:
    nbytes = 3 * HALF
    with BulkHost(0, nbytes=nbytes) as a, BulkHost(1, nbytes=nbytes) as b, ThreadPoolExecutor(2) as threads:
        to_b, to_a = join(a, b, stripes=stripes, protection=protection)
        talkers = Talker(a, to_b, 1), Talker(b, to_a, 0)
        done = [
            threads.submit(one.talk, two.handle) for one, two in zip(talkers, reversed(talkers), strict=True)
        ]
        for future in done:
            future.result()
        assert all(talker.was_quick for talker in talkers)
        to_a.close()
        to_b.close()
        to_a.ended.wait(deadline())
        to_b.ended.wait(deadline())


def put_quickly(host: BulkHost, region: BulkRegion) -> int:
    """Put ones, each with the next value, until a put was quick; its value. At first no stripe rests."""
    value, limit = 1, deadline()
    while (put := region.put(np.ones(8, np.uint8), channel=CHANNEL, value=value)) is not DONE:
        while not put.done:
            assert _native.now_ns() < limit, "no put was quick"
            host.plane.drive()
        value += 1
    return value


def test_a_quick_put_that_is_refused_ends_nothing() -> None:
    with BulkHost(0) as a, BulkHost(1) as b:
        end, _ = join(a, b)
        inbox = b.segment.inbox.empty(64, np.uint8)
        inbox[:] = 0
        handle = b.regions.register(inbox)
        region = end.open_region(handle)
        b.regions.release(handle)
        with a.plane.driving():
            value = put_quickly(a, region)
            region.notify(CHANNEL, value + 1)
        assert b.wait(0, CHANNEL, value + 1) == 0
        assert not inbox.any()
        end.settled().wait(deadline())


def test_a_death_behind_quick_puts_is_one() -> None:
    with BulkHost(0) as a, BulkHost(1) as b:
        end, theirs = join(a, b)
        inbox = b.segment.inbox.empty(64, np.uint8)
        region = end.open_region(b.regions.register(inbox))
        with a.plane.driving():
            value = put_quickly(a, region)
            theirs.abort(PeerLost("b", "it was killed"))
            while not end.ended.done:
                a.plane.drive()
        assert a.segment.lost_mask() == 1 << 1
        with pytest.raises(PeerLost):
            region.put(np.ones(8, np.uint8), channel=CHANNEL, value=value + 1)


def test_a_long_put_waits_for_room_and_not_for_a_peer_that_does_not_read() -> None:
    """Unsent bytes are copied then, so that the source may change at once."""
    with BulkHost(0, nbytes=1 << 26) as a, BulkHost(1, nbytes=1 << 26) as b:
        end, _ = join(a, b)
        nbytes, count = QUICK_BYTES_MAX, 24
        inbox = b.segment.inbox.empty(nbytes * count, np.uint8)
        inbox[:] = 0
        region = end.open_region(b.regions.register(inbox))
        with a.plane.driving():
            value = put_quickly(a, region)
            k = 0
            with b.plane._turns:  # it reads nothing
                for k in range(count):
                    source = np.full(nbytes, k + 1, np.uint8)
                    if not region.put_now(source, k * nbytes, channel=CHANNEL, value=value + k):
                        break
                    source.fill(0)
            assert 0 < k < count, "more went than two sockets take"
            assert end._quick.stripe < 0
            end.settled()
            limit = deadline()
            while b.wait(0, CHANNEL, value + k - 1) != 0 and _native.now_ns() < limit:
                a.plane.drive()
        assert (inbox[: k * nbytes].reshape(k, nbytes) == np.arange(1, k + 1, dtype=np.uint8)[:, None]).all()
