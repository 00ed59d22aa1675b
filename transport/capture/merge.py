"""Logs of several processes as one story: clock skew, causal order, and filters.

Order: by hybrid logical clock, so that what caused something always stands before it; what is concurrent
stands in the order of the processes' wall clocks, as far as those agree.

Skew: each frame that both ends recorded gives one delay, from the sender's wall clock to the receiver's, and
delays bound offsets (`zbmd.transport.clock.offsets`). Processes on one monotonic clock need no estimate.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from zbmd.transport.capture.format import BlockInfo, Origin
from zbmd.transport.capture.reader import Entry, ProcessLog, Segment
from zbmd.transport.capture.records import FrameIn, FrameOut, Mark, RecordType
from zbmd.transport.clock.offsets import Delay, Offset, offset_between, offsets_from_first
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.frames import HEADER_BYTES, unpack_header

SKEW_RECORDS_MAX = 500_000
"""Entries of each log that are searched for frames that reveal the clock's skew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSkew:
    """How far a process's wall clock is ahead of the reference's: `offset_ns`, give or take `error_ns`.

    via: the process by way of which it was found; the reference itself has none. frames: how many it rests
    on, 0 if the two share a clock.
    """

    process: str
    offset_ns: int
    error_ns: int
    via: str
    frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which entries are wanted; None: all of them.

    processes: names such as `rank0`, every incarnation, or `rank0#2`. since_ns, until_ns: by the process's
    own wall clock, ns since 1970, the first included and the last not. steps: from the beginning of the first
    to the end of the last, in processes that mark steps.
    """

    processes: frozenset[str] | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    steps: tuple[int, int] | None = None
    kinds: frozenset[RecordType] | None = None

    def takes_process(self, origin: Origin) -> bool:
        """Whether any record of this process is wanted."""
        return self.processes is None or bool({origin.process, origin.name} & self.processes)

    def takes_block(self, segment: Segment, block: BlockInfo) -> bool:
        """Whether a block may hold what is wanted."""
        anchor = segment.header.anchor
        offset_ns = anchor.wall_ns - anchor.monotonic_ns
        late = self.since_ns is not None and block.at_ns_max + offset_ns < self.since_ns
        early = self.until_ns is not None and block.at_ns_min + offset_ns >= self.until_ns
        return not late and not early

    def takes(self, entry: Entry) -> bool:
        """Whether an entry is wanted, the step apart."""
        return (
            (self.since_ns is None or entry.wall_ns >= self.since_ns)
            and (self.until_ns is None or entry.wall_ns < self.until_ns)
            and (self.kinds is None or entry.record.kind in self.kinds)
        )


def filtered(log: ProcessLog, wanted: Filter) -> Iterator[Entry]:
    """The wanted entries of one process, found by its index. Raises as `ProcessLog.entries`."""
    if not wanted.takes_process(log.origin):
        return
    place = None
    last_step: int | None = None
    if wanted.steps is not None:
        first_step, last_step = wanted.steps
        place = log.find_step(first_step)
        if place is None:
            return
    for entry in log.entries(place, wanted.takes_block):
        if place is not None and entry.number < place.number:
            continue
        if last_step is not None and isinstance(entry.record, Mark) and entry.record.step > last_step:
            return
        if wanted.takes(entry):
            yield entry


def merged(logs: Sequence[ProcessLog], wanted: Filter | None = None) -> Iterator[Entry]:
    """The entries of all logs in causal order.

    Raises `CaptureDamaged` at the first damage that is met, after what is before it in that process.
    """
    wanted = wanted or Filter()
    keyed = [_keyed(index, filtered(log, wanted)) for index, log in enumerate(logs)]
    for _, _, _, entry in heapq.merge(*keyed):
        yield entry


def _keyed(index: int, entries: Iterator[Entry]) -> Iterator[tuple[int, int, int, Entry]]:
    latest = 0
    for order, entry in zip(count(), entries, strict=False):
        # What a broken file says must not put a process's records into another order than its own.
        latest = max(latest, entry.record.hlc)
        yield latest, index, order, entry


def skews(logs: Sequence[ProcessLog]) -> list[ClockSkew]:
    """How far each process's wall clock is ahead of the first one's, in the order of `logs`.

    Those that no chain of recorded frames connects with it are left out. Damaged logs tell what they can.
    Raises as `ProcessLog.entries`.
    """
    delays = _delays(logs)
    found = offsets_from_first(len(logs), lambda known, other: _between(logs, known, other, delays))
    return [
        ClockSkew(
            process=logs[index].name,
            offset_ns=offset.offset_ns,
            error_ns=offset.error_ns,
            via="" if via is None else logs[via].name,
            frames=offset.seen,
        )
        for index, (offset, via) in sorted(found.items())
    ]


def _between(
    logs: Sequence[ProcessLog], known: int, other: int, delays: dict[tuple[int, int], Delay]
) -> Offset | None:
    """Offset of `other`'s wall clock against that of `known`."""
    a, b = logs[known], logs[other]
    if a.origin.boot_id and a.origin.boot_id == b.origin.boot_id:
        anchor_a, anchor_b = a.segments[0].header.anchor, b.segments[0].header.anchor
        a_ns = anchor_a.wall_ns - anchor_a.monotonic_ns
        return Offset(offset_ns=anchor_b.wall_ns - anchor_b.monotonic_ns - a_ns, error_ns=0, seen=0)
    return offset_between(delays.get((known, other)), delays.get((other, known)))


def _delays(logs: Sequence[ProcessLog]) -> dict[tuple[int, int], Delay]:
    """The smallest delay by wall clocks, by sender and receiver, of the frames that both recorded."""
    senders = {(log.origin.process, log.origin.incarnation): index for index, log in enumerate(logs)}
    sent: dict[tuple[int, bytes], int] = {}
    for index, log in enumerate(logs):
        for entry in islice(log.entries(), SKEW_RECORDS_MAX):
            if isinstance(entry.record, FrameOut):
                sent[index, entry.record.header] = entry.wall_ns
    delays: dict[tuple[int, int], Delay] = {}
    for index, log in enumerate(logs):
        for entry in islice(log.entries(), SKEW_RECORDS_MAX):
            sender = _sender(log, entry, senders)
            if sender is None or not isinstance(entry.record, FrameIn):
                continue
            sent_ns = sent.get((sender, entry.record.frame[:HEADER_BYTES]))
            if sent_ns is None:
                continue
            delay_ns = entry.wall_ns - sent_ns
            known = delays.get((sender, index))
            if known is None:
                delays[sender, index] = Delay(delay_ns)
            else:
                known.take(delay_ns)
    return delays


def _sender(log: ProcessLog, entry: Entry, senders: dict[tuple[str, int], int]) -> int | None:
    """Return the log that the sender of a received frame wrote, or None."""
    if not isinstance(entry.record, FrameIn):
        return None
    stream = log.streams.get(entry.record.stream)
    try:
        incarnation = unpack_header(entry.record.frame).incarnation
    except RemoteProtocolError:
        return None
    process = stream.name.rpartition("#")[0] if stream is not None else ""
    return senders.get((process, incarnation))
