"""The index of a segment: its blocks, and which steps begin in which of them.

It is written when the segment is complete and is only a short cut: one that is missing, damaged or of another
file is made again from the segment, whose block prefixes say all of it but the steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from zbmd.transport.capture.format import INDEX_MAGIC, BlockInfo, Origin, pack_body

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class MarkRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The steps of one stream that begin in one block: the smallest and the greatest."""

    block: _Natural
    stream: _Natural
    step_min: _Natural
    step_max: _Natural


class SegmentIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment holds.

    log_bytes: the size of the segment that it describes. oldest_segment, oldest_record: the first ones kept
    when it was written; what came before was deleted to stay within the bound of the disk.
    """

    origin: Origin
    segment: _Natural
    log_bytes: _Natural
    oldest_segment: _Natural
    oldest_record: _Natural
    blocks: list[BlockInfo]
    marks: list[MarkRange]

    def pack(self) -> bytes:
        """The bytes of the index file."""
        return pack_body(INDEX_MAGIC, self)


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
