"""The files of a log: what stands where, and how to tell a whole file from a damaged one.

A capture is a directory with one directory a process incarnation, `<process>#<incarnation>/`. In it lie
segments `NNNNNN.zlog`, each with its index `NNNNNN.zidx` once it is complete. A segment is a chain of
Zstandard frames (RFC 8878), so that `zstd -dc < 000000.zlog` gives its MessagePack stream: what is ours
stands in *skippable* frames, which every Zstandard decoder passes over.

    segment  := header block*
    header   := skippable frame: magic "ZBMDZLOG", version u16, reserved u16, body bytes u32,
                XXH3-64 of the body u64, body (MessagePack map, `SegmentHeader`)
    block    := skippable frame (`_BLOCK`): what the block holds, XXH3-64 of the compressed records,
                XXH3-64 of this frame; then one Zstandard frame: the records
    index    := one skippable frame as the header's, magic "ZBMDZIDX"

All integers are little-endian. A block is written by one call, so a process that dies leaves whole blocks and
at most a torn one behind them; the frame's own checksum tells a torn block from a damaged one.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash
import zstandard

from zbmd.transport.capture.errors import CaptureDamaged, NotACapture

FORMAT_VERSION = 2
"""2: machines' states are among the records."""
FORMATS_READ = (1, 2)
LOG_MAGIC = b"ZBMDZLOG"
INDEX_MAGIC = b"ZBMDZIDX"
LOG_SUFFIX = ".zlog"
INDEX_SUFFIX = ".zidx"

HEADER_BODY_BYTES_MAX = 1 << 20
INDEX_BODY_BYTES_MAX = 1 << 26
BLOCK_RAW_BYTES_MAX = 4 << 20
"""Most bytes of a block's records, not compressed, and so of one record: a control frame fits."""
BLOCK_COMPRESSED_BYTES_MAX = BLOCK_RAW_BYTES_MAX + (BLOCK_RAW_BYTES_MAX >> 7) + 1024
BLOCK_RECORDS_MAX = 512
"""Most records of one block. Encoding them holds the GIL, for some 20 us; compressing them does not."""
SEGMENTS_MAX = 1_000_000
COMPRESSION_LEVEL = 1

FLAG_MARKS = 1
"""The block holds MARK records."""
FLAG_ENDS = 2
"""The log was closed orderly: the block's last record is the END of stream 0."""
FLAG_STREAMS = 4
"""The block holds STREAM records."""
FLAGS_MASK = FLAG_MARKS | FLAG_ENDS | FLAG_STREAMS

_SKIPPABLE_HEADER = 0x184D2A5A
_SKIPPABLE_BLOCK = 0x184D2A5B
_HEADER = struct.Struct("<II8sHHIQ")
_BLOCK_FIELDS = struct.Struct("<IIIIIIQQQqqQ")
_CHECK = struct.Struct("<Q")
BLOCK_PREFIX_BYTES = _BLOCK_FIELDS.size + _CHECK.size

_SEGMENT_NAME = re.compile(r"(\d{6})\.zlog\Z")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.@-]|\A\.")

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class Anchor(msgspec.Struct, frozen=True, kw_only=True):
    """The two clocks of a process read together: ns since 1970, and monotonic ns."""

    wall_ns: int
    monotonic_ns: int


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The process that wrote a log.

    process, incarnation, job: as in its hello. contracts: "id/version" -> fingerprint. hosts: all of the job,
    this one first. boot_id: processes with the same one share their monotonic clock; empty if unknown.
    """

    process: str
    incarnation: _Natural
    job: _Natural = 0
    pid: _Natural = 0
    boot_id: str = ""
    hosts: tuple[str, ...] = ()
    contracts: dict[str, str] = {}
    release: str = ""

    @property
    def name(self) -> str:
        """The process and its incarnation, as people write them."""
        return f"{self.process}#{self.incarnation}"


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing in a segment. records_before: how many records of this process came before it."""

    origin: Origin
    segment: _Natural
    records_before: _Natural
    anchor: Anchor


class BlockInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The prefix of a block, decoded. offset: of the prefix in the file; first_record: its number."""

    offset: _Natural
    flags: _Natural
    compressed_bytes: _Natural
    raw_bytes: _Natural
    records: _Natural
    first_record: _Natural
    hlc_first: _Natural
    hlc_last: _Natural
    at_ns_min: int
    at_ns_max: int

    @property
    def end(self) -> int:
        """The offset behind the block."""
        return self.offset + BLOCK_PREFIX_BYTES + self.compressed_bytes


class TornBlock(Exception):
    """The file ends inside what is being read: its writer died there, or is writing now."""


# ---- names


def directory_name(process: str, incarnation: int) -> str:
    """The name of an incarnation's directory; what is unsafe in a file name is written as %XX."""
    safe = _UNSAFE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), process)
    return f"{safe}#{incarnation}"


def segment_path(directory: Path, segment: int) -> Path:
    """The location of a segment."""
    return directory / f"{segment:06}{LOG_SUFFIX}"


def segment_number(path: Path) -> int | None:
    """The number in a segment's file name; None if it is no such name."""
    match = _SEGMENT_NAME.match(path.name)
    return None if match is None else int(match[1])


# ---- headers and indexes


def pack_header(header: SegmentHeader) -> bytes:
    """The bytes at the start of a segment."""
    return pack_body(LOG_MAGIC, header)


def pack_body(magic: bytes, value: msgspec.Struct) -> bytes:
    """A skippable frame with a magic, a checksum and a MessagePack body."""
    body = msgspec.msgpack.encode(value)
    skipped = _HEADER.size - 8 + len(body)
    check = xxhash.xxh3_64_intdigest(body)
    return _HEADER.pack(_SKIPPABLE_HEADER, skipped, magic, FORMAT_VERSION, 0, len(body), check) + body


def header_bytes(data: bytes, *, path: Path, magic: bytes, body_bytes_max: int) -> int:
    """Return the size of the header at the start of `data`, bytes; `data` holds at least its fixed part.

    Raises `NotACapture` for anything that is no such header, or one of another format version.
    """
    if len(data) < _HEADER.size:
        raise NotACapture(
            f"{path} is no capture of zbmd: it has {len(data)} bytes. Name a capture's directory."
        )
    skippable, skipped, found, version, _, body_bytes, _ = _HEADER.unpack_from(data)
    if skippable != _SKIPPABLE_HEADER or found != magic:
        raise NotACapture(
            f"{path} is no capture of zbmd: it begins with {data[8:16]!r}, not with {magic!r}. "
            "Name the directory that --capture was given."
        )
    if version not in FORMATS_READ:
        raise NotACapture(
            f"{path} has format {version}, and this release of zbmd reads formats {FORMATS_READ}. "
            "Read it with the release that wrote it."
        )
    if body_bytes > body_bytes_max or skipped != _HEADER.size - 8 + body_bytes:
        raise CaptureDamaged(path, 4, f"its header announces {body_bytes} bytes")
    return _HEADER.size + int(body_bytes)


HEADER_FIXED_BYTES = _HEADER.size


def unpack_body(data: bytes, *, path: Path) -> bytes:
    """The MessagePack body of a header whose size was found by `header_bytes`. Raises `CaptureDamaged`."""
    *_, body_bytes, check = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if len(body) != body_bytes:
        raise CaptureDamaged(path, _HEADER.size, f"its header ends after {len(body)} of {body_bytes} bytes")
    if xxhash.xxh3_64_intdigest(body) != check:
        raise CaptureDamaged(path, _HEADER.size, "its header's checksum is wrong")
    return body


# ---- blocks


def pack_block(compressed: bytes, raw_bytes: int, info: BlockInfo) -> tuple[bytes, BlockInfo]:
    """The bytes of a block at `info.offset`, and its description with both sizes filled in.

    compressed: one Zstandard frame that tells its size; raw_bytes: that size. Raises `struct.error` if a
    number in `info` is out of its range.
    """
    info = msgspec.structs.replace(info, compressed_bytes=len(compressed), raw_bytes=raw_bytes)
    fields = _BLOCK_FIELDS.pack(
        _SKIPPABLE_BLOCK,
        BLOCK_PREFIX_BYTES - 8,
        info.flags,
        info.compressed_bytes,
        info.raw_bytes,
        info.records,
        info.first_record,
        info.hlc_first,
        info.hlc_last,
        info.at_ns_min,
        info.at_ns_max,
        xxhash.xxh3_64_intdigest(compressed),
    )
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields)) + compressed, info


def unpack_prefix(data: bytes, *, path: Path, offset: int) -> tuple[BlockInfo, int]:
    """The description of the block at `offset`, and the checksum of its compressed records.

    Raises `TornBlock` if `data` ends inside the prefix, `CaptureDamaged` if it is no prefix or a damaged one.
    """
    if len(data) < BLOCK_PREFIX_BYTES:
        raise TornBlock
    fields = data[: _BLOCK_FIELDS.size]
    skippable, skipped, flags, compressed, raw, records, first, hlc_first, hlc_last, at_min, at_max, check = (
        _BLOCK_FIELDS.unpack(fields)
    )
    if (
        skippable != _SKIPPABLE_BLOCK
        or skipped != BLOCK_PREFIX_BYTES - 8
        or _CHECK.unpack_from(data, _BLOCK_FIELDS.size)[0] != xxhash.xxh3_64_intdigest(fields)
    ):
        raise CaptureDamaged(path, offset, "no block begins here, or its prefix is damaged")
    if (
        flags & ~FLAGS_MASK
        or compressed > BLOCK_COMPRESSED_BYTES_MAX
        or raw > BLOCK_RAW_BYTES_MAX
        or not 1 <= records <= BLOCK_RECORDS_MAX
    ):
        raise CaptureDamaged(
            path, offset, f"a block announces {records} records in {raw} bytes, flags {flags:#x}"
        )
    info = BlockInfo(offset, flags, compressed, raw, records, first, hlc_first, hlc_last, at_min, at_max)
    return info, check


def decompress(
    compressed: bytes, info: BlockInfo, check: int, decompressor: zstandard.ZstdDecompressor, *, path: Path
) -> bytes:
    """A block's MessagePack stream.

    Raises `TornBlock` if `compressed` is shorter than announced, `CaptureDamaged` if it is something else.
    """
    if len(compressed) < info.compressed_bytes:
        raise TornBlock
    if xxhash.xxh3_64_intdigest(compressed) != check:
        raise CaptureDamaged(path, info.offset, "a block's checksum is wrong")
    try:
        # Asked first: the library would make room for whatever size the frame announces.
        if zstandard.get_frame_parameters(compressed).content_size != info.raw_bytes:
            raise CaptureDamaged(
                path, info.offset, "a block's Zstandard frame has another size than announced"
            )
        return decompressor.decompress(compressed, max_output_size=info.raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CaptureDamaged(path, info.offset, f"a block does not decompress ({error})") from None


def new_compressor() -> zstandard.ZstdCompressor:
    """One for all blocks of a writer; not to be shared by threads."""
    return zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_content_size=True)


def new_decompressor() -> zstandard.ZstdDecompressor:
    """One for all blocks of a reader, bounded in the memory that it takes."""
    return zstandard.ZstdDecompressor(max_window_size=BLOCK_RAW_BYTES_MAX)
