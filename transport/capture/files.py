"""The writing side of a log's files: blocks, rotation, and the bound on the disk."""

from __future__ import annotations

import base64
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from time import sleep as real_sleep
from typing import Annotated

import msgspec

from zbmd.transport.capture import format as fmt
from zbmd.transport.capture.codec import encode_batch
from zbmd.transport.capture.errors import CaptureError, CaptureExists, CaptureMismatch, NotACapture
from zbmd.transport.capture.records import PROCESS_STREAM, RawRecord, RecordType, Taken
from zbmd.transport.errors import LocalProtocolError

# The index of a segment: its blocks, and which steps begin in which of them.
#
# It is written when the segment is complete and is only a short cut: one that is missing, damaged or of
# another file is made again from the segment, whose block prefixes say all of it but the steps.

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class MarkRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The steps of one stream that begin in one block: the smallest and the greatest."""

    block: _Natural
    stream: _Natural
    step_min: _Natural
    step_max: _Natural


class SegmentIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a segment.

    log_bytes: the size of the segment that it describes. oldest_segment, oldest_record: the first ones kept
    when it was written; what came before was deleted to stay within the bound of the disk.
    """

    origin: fmt.Origin
    segment: _Natural
    log_bytes: _Natural
    oldest_segment: _Natural
    oldest_record: _Natural
    blocks: list[fmt.BlockInfo]
    marks: list[MarkRange]

    def pack(self) -> bytes:
        """The bytes of the index file."""
        return fmt.pack_body(fmt.INDEX_MAGIC, self)


_decoder = msgspec.msgpack.Decoder(SegmentIndex)


def unpack_index(body: bytes) -> SegmentIndex:
    """The index in a body whose checksum was right. Raises `ValueError` or `RecursionError` if it is none."""
    return _decoder.decode(body)


def mark_ranges(block: int, marks: Iterable[tuple[int, int]]) -> list[MarkRange]:
    """The ranges of the `(stream, step)` pairs that begin in the block with this number."""
    steps: dict[int, tuple[int, int]] = {}
    for stream, step in marks:
        low, high = steps.get(stream, (step, step))
        steps[stream] = (min(low, step), max(high, step))
    return [MarkRange(block, stream, low, high) for stream, (low, high) in steps.items()]


STREAM, MARK, END, LOST = (
    int(RecordType.STREAM),
    int(RecordType.MARK),
    int(RecordType.END),
    int(RecordType.LOST),
)
_kind = itemgetter(0)
_at_ns = itemgetter(2)
SEGMENT_BYTES_MIN = 1 << 12
UNFOLDED_AT_ONCE = 16
"""Encoding what was taken folded holds the GIL, for some 5 us each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    """The bounds on one process's files. A segment is closed by whichever of its two bounds comes first."""

    segment_bytes: int = 64 << 20
    segment_age_ns: int = 600_000_000_000
    disk_bytes: int = 1 << 30
    """All segments and indexes together, but for one block: the oldest segments are deleted beyond it."""

    def __post_init__(self) -> None:
        if self.segment_bytes < SEGMENT_BYTES_MIN or self.disk_bytes < 2 * self.segment_bytes:
            raise LocalProtocolError(
                f"segments of {self.segment_bytes} bytes and {self.disk_bytes} in all: a segment needs "
                f"{SEGMENT_BYTES_MIN}, and the disk's bound must hold two segments"
            )
        if self.segment_age_ns <= 0:
            raise LocalProtocolError(f"a segment's age of {self.segment_age_ns} ns must be positive")


@dataclass(slots=True)
class _OpenSegment:
    number: int
    path: Path
    fd: int
    begun_ns: int
    nbytes: int = 0
    blocks: list[fmt.BlockInfo] = field(default_factory=list[fmt.BlockInfo])
    marks: list[MarkRange] = field(default_factory=list[MarkRange])


class LogFiles:
    """The files of one process incarnation, in a directory of their own below `directory`.

    records_before: how many records of the process are not in this log, before its first. on_segment:
    receives the number of each segment that begins. Not thread-safe. Raises `CaptureExists` if that
    incarnation's directory is there already, `CaptureError` if it cannot be made. Any method raises `OSError`
    when the disk fails; what was whole stays whole.
    """

    def __init__(
        self,
        directory: Path,
        origin: fmt.Origin,
        limits: DiskLimits,
        anchor: Callable[[], fmt.Anchor],
        *,
        records_before: int = 0,
        on_segment: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.path = directory / fmt.directory_name(origin.process, origin.incarnation)
        self.records = records_before
        self.changing = threading.Lock()
        """Held while a file is opened or closed: a fork takes it, so that the child knows which."""
        self._origin = origin
        self._limits = limits
        self._anchor = anchor
        self._on_segment = on_segment
        self._compressor = fmt.new_compressor()
        self._streams: dict[int, RawRecord] = {}
        self._closed: list[tuple[int, int, int]] = []  # number, bytes with the index, records before it
        self._closed_bytes = 0
        self._last_ns = 0
        self._last_hlc = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        except FileExistsError:
            raise CaptureExists(
                f"{self.path} exists already: give this run a capture directory of its own"
            ) from None
        except OSError as error:
            raise CaptureError(f"Cannot capture into {directory}: {error.strerror}") from error
        self._segment: _OpenSegment | None = None
        self._open(0)

    def write(self, taken: Sequence[Taken]) -> None:
        """Append records, in order; `anchor` is read when a segment begins."""
        records = self.unfolded(taken)
        for start in range(0, len(records), fmt.BLOCK_RECORDS_MAX):
            self._rotate_if_due()
            self._write_block(records[start : start + fmt.BLOCK_RECORDS_MAX])

    def unfolded(self, taken: Sequence[Taken]) -> list[RawRecord]:
        """The records; of what cannot be encoded, one that says so."""
        records: list[RawRecord] = []
        folded = 0
        for one in taken:
            if isinstance(one, tuple):
                records.append(one)
                continue
            folded += 1
            if not folded % UNFOLDED_AT_ONCE:
                real_sleep(0)  # the recording thread is not to wait for the GIL
            try:
                records += one.unfold()
            except CaptureMismatch as error:
                records.append(self._lost(str(error)))
        return records

    def close(self) -> None:
        """Complete the last segment. Nothing can be written any more."""
        if self._segment is not None:
            self._complete(self._segment)

    def abandon(self) -> None:
        """Close the open file as it is, after a failure of the disk."""
        with self.changing:
            self.forget()

    def forget(self) -> None:
        """Close this process's descriptor of the open file; for a forked child."""
        segment, self._segment = self._segment, None
        if segment is not None:
            os.close(segment.fd)

    # ---- segments

    def _open(self, number: int) -> _OpenSegment:
        if number >= fmt.SEGMENTS_MAX:
            raise OSError(0, f"{fmt.SEGMENTS_MAX} segments have been written")
        anchor = self._anchor()
        header = fmt.SegmentHeader(
            origin=self._origin, segment=number, records_before=self.records, anchor=anchor
        )
        path = fmt.segment_path(self.path, number)
        with self.changing:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
            segment = self._segment = _OpenSegment(number, path, fd, anchor.monotonic_ns)
        self._append(segment, fmt.pack_header(header))
        return segment

    def _rotate_if_due(self) -> None:
        segment = self._segment
        assert segment is not None, "the log is closed"
        age_ns = self._anchor().monotonic_ns - segment.begun_ns
        if segment.nbytes < self._limits.segment_bytes and age_ns < self._limits.segment_age_ns:
            return
        self._complete(segment)
        self._delete_oldest()
        self._open(segment.number + 1)
        self._on_segment(segment.number + 1)
        again = [declared_again(s, self._last_ns, self._last_hlc) for s in self._streams.values()]
        for start in range(0, len(again), fmt.BLOCK_RECORDS_MAX):
            self._write_block(again[start : start + fmt.BLOCK_RECORDS_MAX])

    def _complete(self, segment: _OpenSegment) -> None:
        self.abandon()
        records = sum(block.records for block in segment.blocks)
        kept = [*self._closed, (segment.number, segment.nbytes, self.records - records)]
        index = SegmentIndex(
            origin=self._origin,
            segment=segment.number,
            log_bytes=segment.nbytes,
            oldest_segment=kept[0][0],
            oldest_record=kept[0][2],
            blocks=segment.blocks,
            marks=segment.marks,
        ).pack()
        # Not renamed into place: one that is torn by a crash is made again, and no other file is left over.
        segment.path.with_suffix(fmt.INDEX_SUFFIX).write_bytes(index)
        nbytes = segment.nbytes + len(index)
        self._closed.append((segment.number, nbytes, self.records - records))
        self._closed_bytes += nbytes

    def _delete_oldest(self) -> None:
        room = self._limits.disk_bytes - self._limits.segment_bytes
        while self._closed and self._closed_bytes > room:
            number, nbytes, _ = self._closed.pop(0)
            path = fmt.segment_path(self.path, number)
            # The log first: an index alone says nothing, a log alone is whole.
            path.unlink(missing_ok=True)
            path.with_suffix(fmt.INDEX_SUFFIX).unlink(missing_ok=True)
            self._closed_bytes -= nbytes

    # ---- blocks

    def _write_block(self, records: Sequence[RawRecord]) -> None:
        """Write one block; records that do not fit into one, or into none, are found by halving."""
        why = f"over the bound of {fmt.BLOCK_RAW_BYTES_MAX} bytes"
        try:
            raw = encode_batch(records)
            if len(raw) <= fmt.BLOCK_RAW_BYTES_MAX:
                self._append_block(records, raw)
                return
        except (CaptureMismatch, struct.error) as error:
            why = str(error)
        if len(records) == 1:
            self._write_block([self._lost(f"a record of kind {records[0][0]}: {why}")])
            return
        half = len(records) // 2
        self._write_block(records[:half])
        self._write_block(records[half:])

    def _append_block(self, records: Sequence[RawRecord], raw: bytes) -> None:
        segment = self._segment
        assert segment is not None, "the log is closed"
        kinds = set(map(_kind, records))
        flags = (fmt.FLAG_MARKS if MARK in kinds else 0) | (fmt.FLAG_STREAMS if STREAM in kinds else 0)
        if END in kinds and records[-1][:2] == (END, PROCESS_STREAM):
            flags |= fmt.FLAG_ENDS
        times_ns = list(map(_at_ns, records))
        info = fmt.BlockInfo(
            offset=segment.nbytes,
            flags=flags,
            compressed_bytes=0,
            raw_bytes=0,
            records=len(records),
            first_record=self.records,
            hlc_first=records[0][3],
            hlc_last=records[-1][3],
            at_ns_min=min(times_ns),
            at_ns_max=max(times_ns),
        )
        data, info = fmt.pack_block(self._compressor.compress(raw), len(raw), info)
        self._append(segment, data)
        if flags & fmt.FLAG_MARKS:
            steps = [(record[1], record[4]) for record in records if record[0] == MARK]
            segment.marks += mark_ranges(len(segment.blocks), steps)
        segment.blocks.append(info)
        self.records += info.records
        self._last_ns, self._last_hlc = info.at_ns_max, info.hlc_last
        if STREAM in kinds or END in kinds:
            self._follow_streams(records)

    def _lost(self, why: str) -> RawRecord:
        return (LOST, PROCESS_STREAM, self._last_ns, self._last_hlc, 1, why)

    def _follow_streams(self, records: Sequence[RawRecord]) -> None:
        for record in records:
            if record[0] == STREAM:
                self._streams[record[1]] = record
            elif record[0] == END:
                self._streams.pop(record[1], None)

    def _append(self, segment: _OpenSegment, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(segment.fd, view) :]
        except OSError:
            os.ftruncate(segment.fd, segment.nbytes)
            raise
        segment.nbytes += len(data)


def declared_again(stream: RawRecord, at_ns: int, hlc: int) -> RawRecord:
    """A STREAM record for a file in which the stream does not begin."""
    return (*stream[:2], at_ns, hlc, *stream[4:-1], True)


# A capture as text, to be kept beside a test: a line `# path` for each file, then its bytes in base64.

LINE_CHARS = 100
TEXT_CHARS_MAX = 64 << 20
_PATH = re.compile(r"[A-Za-z0-9_.#@-]+(/[A-Za-z0-9_#@-][A-Za-z0-9_.#@-]*)*\.zlog")


def capture_to_text(directory: Path) -> str:
    """Return the capture in `directory` as text, without its indexes, which are made again from the logs."""
    lines: list[str] = []
    for file in sorted(directory.rglob("*.zlog")):
        text = base64.b64encode(file.read_bytes()).decode()
        lines.append(f"# {file.relative_to(directory).as_posix()}")
        lines += [text[start : start + LINE_CHARS] for start in range(0, len(text), LINE_CHARS)]
    return "\n".join(lines) + "\n"


def text_to_capture(text: str, directory: Path) -> None:
    """Write the capture that `text` holds into `directory`. Raises `NotACapture` if it holds none."""
    for path, data in _files(text):
        if not _PATH.fullmatch(path) or ".." in path:
            raise NotACapture(
                f"the text names a file {path!r}, which no capture has: was it changed by hand?"
            )
        file = directory / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        except OSError as error:  # a name too long, say, or one that is a file and a directory
            raise NotACapture(f"{file} cannot be written: {error.strerror}") from error


def _files(text: str) -> Iterator[tuple[str, bytes]]:
    if len(text) > TEXT_CHARS_MAX:
        raise NotACapture(f"the text has {len(text)} characters; {TEXT_CHARS_MAX} are the bound")
    path = ""
    for is_name, lines in groupby(text.splitlines(), key=lambda line: line.startswith("# ")):
        if is_name:
            path = list(lines)[-1][2:]
            continue
        try:
            data = base64.b64decode("".join(lines), validate=True)
        except ValueError as error:  # binascii.Error, or text that is not ASCII
            raise NotACapture(f"the text of {path or 'a file without a name'} is damaged: {error}") from None
        yield path, data
