"""The reading side: whole records, in order, up to the damage; nothing in a file is trusted.

    for process in open_log(Path("capture")).processes:
        for entry in process.entries():
            print(entry.number, entry.record)

A file that ends inside a block was torn by its writer's death, or is being written: its whole blocks are
read, and that is all. Anything else that is not as `format` says raises `CaptureDamaged`, after all that
stands before it has been given.

`merged` puts the logs of several processes in causal order; `skews` estimates how far their clocks are apart.
"""

from __future__ import annotations

import heapq
import os
import re
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path

import msgspec

from zbmd.transport.capture import format as fmt
from zbmd.transport.capture.errors import CaptureDamaged, CaptureError, NotACapture
from zbmd.transport.capture.files import MarkRange, SegmentIndex, mark_ranges, unpack_index
from zbmd.transport.capture.format import BlockInfo, Origin, SegmentHeader, TornBlock
from zbmd.transport.capture.records import (
    FrameIn,
    FrameOut,
    Mark,
    Record,
    RecordType,
    StreamDeclared,
    decode_records,
)
from zbmd.transport.clock.offsets import Delay, Offset, offset_between, offsets_from_first
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.frames import HEADER_BYTES, unpack_header

# ---- several processes: clock skew, causal order, and filters
#
# Order: by hybrid logical clock, so that what caused something always stands before it; what is concurrent
# stands in the order of the processes' wall clocks, as far as those agree.
#
# Skew: each frame that both ends recorded gives one delay, from the sender's wall clock to the receiver's,
# and delays bound offsets (`zbmd.transport.clock.offsets`). Processes on one monotonic clock need no
# estimate.

SKEW_RECORDS_MAX = 500_000
"""Entries of each log that are searched for frames that reveal the clock's skew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSkew:
    """The offset of a process's wall clock from the reference's: `offset_ns`, give or take `error_ns`.

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
    """A choice of entries; None in a field: all of them.

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

    def takes_block(self, segment: LogSegment, block: BlockInfo) -> bool:
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
    """Estimate by how much each process's wall clock is ahead of the first one's, in the order of `logs`.

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


PROCESSES_MAX = 1 << 16
"""Most process incarnations of one capture."""


class Ending(Enum):
    """The end of a process's log."""

    CLOSED = "closed orderly"
    CUT = "cut off: the process ended without closing it, or still runs"
    TORN = "cut off inside a block: the process ended while it wrote"


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A record and where it is from: `number` counts the records of its process, from 0."""

    log: ProcessLog
    number: int
    wall_ns: int
    """When it was, by its process's own wall clock, ns since 1970."""
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """The position of a step: the number of its MARK record and the block that holds it."""

    step: int
    number: int
    segment: int
    block: BlockInfo


class _File:
    """An open segment. Reads at offsets, so that a file cut while it is read gives short reads, no signal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise NotACapture(f"{path} cannot be read: {error.strerror}.") from None
        status = os.fstat(self._fd)
        self.nbytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise NotACapture(f"{path} is no regular file: name a capture's directory.")

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to `nbytes` bytes from `offset`."""
        parts: list[bytes] = []
        while nbytes and (part := os.pread(self._fd, nbytes, offset)):
            parts.append(part)
            offset += len(part)
            nbytes -= len(part)
        return b"".join(parts)

    def body(self, magic: bytes, body_bytes_max: int) -> tuple[bytes, int]:
        """The body of the header at the file's start, and the offset behind it."""
        fixed = self.read(0, fmt.HEADER_FIXED_BYTES)
        nbytes = fmt.header_bytes(fixed, path=self.path, magic=magic, body_bytes_max=body_bytes_max)
        return fmt.unpack_body(self.read(0, nbytes), path=self.path), nbytes


_header_decoder = msgspec.msgpack.Decoder(SegmentHeader)


class LogSegment:
    """One segment file of a process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _File(path) as file:
            body, self.first_block = file.body(fmt.LOG_MAGIC, fmt.HEADER_BODY_BYTES_MAX)
        try:
            self.header = _header_decoder.decode(body)
        except (ValueError, RecursionError) as error:
            raise CaptureDamaged(
                path, fmt.HEADER_FIXED_BYTES, f"its header cannot be read ({error})"
            ) from None

    @property
    def number(self) -> int:
        """Its place in the log."""
        return self.header.segment

    def blocks(self) -> Iterator[BlockInfo]:
        """Yield the prefix of each whole block. Raises `CaptureDamaged`, or `TornBlock` at the end."""
        with _File(self.path) as file:
            for info, _ in self._prefixes(file, self.first_block):
                if info.end > file.nbytes:
                    raise TornBlock
                yield info

    def records(
        self, start: BlockInfo | None = None, wanted: Callable[[BlockInfo], bool] | None = None
    ) -> Generator[tuple[BlockInfo, list[Record]]]:
        """The records of each block, from the block `start` on; of a block that is not `wanted`, none.

        Raises `CaptureDamaged`, or `TornBlock` at the end.
        """
        decompressor = fmt.new_decompressor()
        with _File(self.path) as file:
            offset = self.first_block if start is None else start.offset
            for info, check in self._prefixes(file, offset):
                if wanted is not None and not wanted(info):
                    if info.end > file.nbytes:
                        raise TornBlock
                    yield info, []
                    continue
                compressed = file.read(info.offset + fmt.BLOCK_PREFIX_BYTES, info.compressed_bytes)
                raw = fmt.decompress(compressed, info, check, decompressor, path=self.path)
                try:
                    yield info, decode_records(raw, info.records)
                except (ValueError, RecursionError) as error:
                    what = f"a block's records cannot be read ({error})"
                    raise CaptureDamaged(self.path, info.offset, what) from None

    def _prefixes(self, file: _File, offset: int) -> Iterator[tuple[BlockInfo, int]]:
        number: int | None = self.header.records_before if offset == self.first_block else None
        while offset < file.nbytes:
            data = file.read(offset, fmt.BLOCK_PREFIX_BYTES)
            info, check = fmt.unpack_prefix(data, path=self.path, offset=offset)
            if number is not None and info.first_record != number:
                what = f"record {number} should follow, but the block begins with {info.first_record}"
                raise CaptureDamaged(self.path, offset, what)
            yield info, check
            number = info.first_record + info.records
            offset = info.end

    @cached_property
    def index(self) -> SegmentIndex:
        """The index of its blocks and steps: from its file, or from the segment if no file fits.

        Of a damaged or torn segment: what it holds before the damage.
        """
        return self._stored_index() or self._made_index()

    def _stored_index(self) -> SegmentIndex | None:
        try:
            with _File(self.path.with_suffix(fmt.INDEX_SUFFIX)) as file:
                body, _ = file.body(fmt.INDEX_MAGIC, fmt.INDEX_BODY_BYTES_MAX)
            index = unpack_index(body)
            nbytes = self.path.stat().st_size
        except (NotACapture, CaptureDamaged, ValueError, RecursionError):
            return None
        fits = (index.origin, index.segment, index.log_bytes) == (self.header.origin, self.number, nbytes)
        return index if fits else None

    def _made_index(self) -> SegmentIndex:
        blocks: list[BlockInfo] = []
        marks: list[MarkRange] = []
        try:
            for info, records in self.records(wanted=lambda info: bool(info.flags & fmt.FLAG_MARKS)):
                steps = [(record.stream, record.step) for record in records if isinstance(record, Mark)]
                marks += mark_ranges(len(blocks), steps)
                blocks.append(info)
        except (TornBlock, CaptureDamaged):
            pass  # what precedes it can be read; reading the records reports the damage
        return SegmentIndex(
            origin=self.header.origin,
            segment=self.number,
            log_bytes=blocks[-1].end if blocks else self.first_block,
            oldest_segment=self.number,
            oldest_record=self.header.records_before,
            blocks=blocks,
            marks=marks,
        )


class ProcessLog:
    """The log of one process incarnation, over all of its segments."""

    def __init__(self, directory: Path, segments: list[LogSegment]) -> None:
        self.path = directory
        self.segments = segments
        self.origin: Origin = segments[0].header.origin

    @property
    def name(self) -> str:
        """`process#incarnation`."""
        return self.origin.name

    @property
    def records_before(self) -> int:
        """Return how many records preceded the first one here.

        Deleted to save disk, or gone from the ring.
        """
        return self.segments[0].header.records_before

    @cached_property
    def ending(self) -> Ending:
        """The way it ends. Raises `CaptureDamaged` if its last segment is damaged."""
        last: BlockInfo | None = None
        try:
            for block in self.segments[-1].blocks():
                last = block
        except TornBlock:
            return Ending.TORN
        return Ending.CLOSED if last is not None and last.flags & fmt.FLAG_ENDS else Ending.CUT

    @cached_property
    def streams(self) -> dict[int, StreamDeclared]:
        """Every stream that is declared before the end or the damage, by its number."""
        found: dict[int, StreamDeclared] = {}
        for segment in self.segments:
            try:
                for _, records in segment.records(wanted=lambda info: bool(info.flags & fmt.FLAG_STREAMS)):
                    for record in records:
                        if isinstance(record, StreamDeclared):
                            found.setdefault(record.stream, record)
            except (TornBlock, CaptureDamaged):
                break  # reading the records reports the damage
        return found

    def find_step(self, step: int, *, stream: int | None = None) -> StepPlace | None:
        """Find where a step begins first, in any stream or in one; None if it is not marked in the log.

        Raises `CaptureDamaged` if the block that should hold it is damaged.
        """
        for segment in self.segments:
            index = segment.index
            for mark in index.marks:
                fits = stream in (None, mark.stream) and mark.step_min <= step <= mark.step_max
                if not fits or mark.block >= len(index.blocks):
                    continue
                block = index.blocks[mark.block]
                number = _find_mark(segment, block, mark.stream, step)
                if number is not None:
                    return StepPlace(step=step, number=number, segment=segment.number, block=block)
        return None

    @property
    def steps(self) -> tuple[int, int] | None:
        """The smallest and the greatest step marked in the log."""
        marks = [mark for segment in self.segments for mark in segment.index.marks]
        if not marks:
            return None
        return min(mark.step_min for mark in marks), max(mark.step_max for mark in marks)

    def entries(
        self, start: StepPlace | None = None, wanted: Callable[[LogSegment, BlockInfo], bool] | None = None
    ) -> Iterator[Entry]:
        """All records in order, from the block of `start` on, without those of blocks that are not `wanted`.

        Raises `CaptureDamaged` where the damage begins, after all records before it.
        """
        number: int | None = None
        for segment in self.segments:
            if start is not None and segment.number < start.segment:
                continue
            before = segment.header.records_before
            if number is not None and before != number:
                what = f"record {number} should follow, but the segment begins with {before}"
                raise CaptureDamaged(segment.path, 0, what)
            number = before
            anchor = segment.header.anchor
            offset_ns = anchor.wall_ns - anchor.monotonic_ns
            at = start.block if start is not None and segment.number == start.segment else None
            asked = None if wanted is None else partial(wanted, segment)
            try:
                for info, records in segment.records(at, asked):
                    for number, record in enumerate(records, info.first_record):
                        yield Entry(self, number, record.at_ns + offset_ns, record)
                    number = info.first_record + info.records
            except TornBlock:
                if segment is not self.segments[-1]:
                    raise CaptureDamaged(
                        segment.path, segment.path.stat().st_size, "its end is missing"
                    ) from None
                return


def _find_mark(segment: LogSegment, block: BlockInfo, stream: int, step: int) -> int | None:
    with closing(segment.records(block)) as blocks:
        try:
            info, records = next(blocks)
        except (StopIteration, TornBlock):
            return None
        for number, record in enumerate(records, info.first_record):
            if isinstance(record, Mark) and (record.stream, record.step) == (stream, step):
                return number
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The logs of all processes. problems: why a process's log could not be opened at all."""

    path: Path
    processes: tuple[ProcessLog, ...]
    problems: tuple[CaptureError, ...] = ()


def open_log(path: Path) -> Capture:
    """Open a capture: its directory, that of one process, or one segment.

    Raises `NotACapture` if there is nothing to read, and the first of its problems if nothing can be read.
    """
    if not path.is_dir():
        if not path.exists():
            raise NotACapture(f"There is no {path}: name the directory that --capture was given.")
        return Capture(path=path, processes=(ProcessLog(path.parent, [LogSegment(path)]),))
    directories = [path] if _segment_paths(path) else sorted(p for p in path.iterdir() if p.is_dir())
    if len(directories) > PROCESSES_MAX:
        raise NotACapture(
            f"{path} has {len(directories)} directories; a capture has {PROCESSES_MAX} at most."
        )
    processes: list[ProcessLog] = []
    problems: list[CaptureError] = []
    for directory in directories:
        paths = _segment_paths(directory)
        try:
            if paths:
                processes.append(_open_process(directory, paths))
        except CaptureError as problem:
            problems.append(problem)
    if not processes and problems:
        raise problems[0]
    if not processes:
        raise NotACapture(f"{path} holds no capture: name the directory that --capture was given.")
    processes.sort(key=lambda process: (_natural(process.origin.process), process.origin.incarnation))
    return Capture(path=path, processes=tuple(processes), problems=tuple(problems))


def _open_process(directory: Path, paths: list[Path]) -> ProcessLog:
    segments: list[LogSegment] = []
    for path in paths:
        try:
            segment = LogSegment(path)
        except CaptureError:
            if segments and path == paths[-1] and path.stat().st_size < fmt.HEADER_FIXED_BYTES:
                break  # its writer died as it began this segment
            raise
        if segment.number != fmt.segment_number(path):
            raise CaptureDamaged(
                path, fmt.HEADER_FIXED_BYTES, f"its name is not that of segment {segment.number}"
            )
        if segments and segment.header.origin != segments[0].header.origin:
            raise CaptureDamaged(
                path, fmt.HEADER_FIXED_BYTES, f"it is of another process than {segments[0].path}"
            )
        segments.append(segment)
    return ProcessLog(directory, segments)


def _segment_paths(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if fmt.segment_number(path) is not None)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts rank2 before rank10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
