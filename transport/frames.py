"""The frame: a fixed header, then the payload. Every message between processes travels in one.

Layout, little-endian, `HEADER_BYTES` (48) long, the same in every format version up to `version`:

    offset  bytes  field
     0      4      magic "ZBMD"
     4      2      format version
     6      2      flags: the low byte is the sender's layer's, the rest must be 0
     8      4      payload length, bytes
    12      4      group epoch
    16      8      job
    24      8      sender's incarnation
    32      8      hybrid logical clock (see `hlc`)
    40      8      trace id
"""

from __future__ import annotations

import struct

import msgspec

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

FRAME_MAGIC = b"ZBMD"
FORMAT_VERSION = 1
USER_FLAGS_MASK = 0x00FF
"""Flags that the layer above may use as it likes; all other bits are reserved for later versions."""

MAX_FRAME_BYTES = (1 << 20) + (4 << 10)
"""Most bytes of one control frame, header included; what is larger travels as a region. A message that holds
1 MiB of bytes and a few small fields fits."""

_HEADER = struct.Struct("<4sHHIIQQQQ")
HEADER_BYTES = _HEADER.size
MAX_PAYLOAD_BYTES = MAX_FRAME_BYTES - HEADER_BYTES


class MalformedFrame(RemoteProtocolError):
    """The peer sent bytes that are no frame, or one whose header does not fit the connection."""


class OversizedFrame(RemoteProtocolError):
    """The peer announced a frame beyond the bound."""


class WrongFormatVersion(RemoteProtocolError):
    """The peer speaks another format version; `version` is the peer's."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"the peer's frames have format version {version}, ours {FORMAT_VERSION}: "
            "run the same release of zbmd on both sides"
        )
        self.version = version


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A frame's header. Ranges: flags u8 (of the layer above), payload_bytes and epoch u32, the rest u64."""

    payload_bytes: int
    job: int
    incarnation: int
    epoch: int = 0
    hlc: int = 0
    trace_id: int = 0
    flags: int = 0


def pack_header(header: FrameHeader) -> bytes:
    """The header's `HEADER_BYTES` bytes. Raises as `pack_fields`."""
    return pack_fields(
        header.flags,
        header.payload_bytes,
        header.epoch,
        header.job,
        header.incarnation,
        header.hlc,
        header.trace_id,
    )


def pack_fields(
    flags: int, payload_bytes: int, epoch: int, job: int, incarnation: int, hlc: int, trace_id: int
) -> bytes:
    """A header's `HEADER_BYTES` bytes, without the object in between: every frame that is sent needs one.

    Raises `LocalProtocolError` if a field is out of its range or the payload beyond `MAX_PAYLOAD_BYTES`.
    """
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise LocalProtocolError(
            f"a payload of {payload_bytes} bytes does not fit into a control frame "
            f"({MAX_PAYLOAD_BYTES} at most): send it as a region"
        )
    if flags & ~USER_FLAGS_MASK:
        raise LocalProtocolError(f"frame flags {flags:#x} use reserved bits: only {USER_FLAGS_MASK:#x}")
    try:
        return _HEADER.pack(
            FRAME_MAGIC, FORMAT_VERSION, flags, payload_bytes, epoch, job, incarnation, hlc, trace_id
        )
    except struct.error as error:
        fields = f"{payload_bytes=} {epoch=} {job=} {incarnation=} {hlc=} {trace_id=}"
        raise LocalProtocolError(f"a frame's header has a field out of range: {error}: {fields}") from None


def unpack_header(data: bytes | bytearray | memoryview) -> FrameHeader:
    """Read a header from the first `HEADER_BYTES` of `data`, which may come from anybody.

    Raises `MalformedFrame`, `WrongFormatVersion` or `OversizedFrame`.
    """
    if len(data) < HEADER_BYTES:
        raise MalformedFrame(f"a frame of {len(data)} bytes is shorter than its header of {HEADER_BYTES}")
    magic, version, flags, payload_bytes, epoch, job, incarnation, hlc, trace_id = _HEADER.unpack_from(data)
    if magic != FRAME_MAGIC:
        raise MalformedFrame(f"a frame begins with {magic!r}, not with {FRAME_MAGIC!r}: not a zbmd peer")
    if version != FORMAT_VERSION:
        raise WrongFormatVersion(version)
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise OversizedFrame(
            f"a frame announces {payload_bytes} bytes of payload; {MAX_PAYLOAD_BYTES} is the bound"
        )
    if flags & ~USER_FLAGS_MASK:
        raise MalformedFrame(f"a frame has reserved flags set: {flags:#x}")
    return FrameHeader(
        payload_bytes=payload_bytes,
        job=job,
        incarnation=incarnation,
        epoch=epoch,
        hlc=hlc,
        trace_id=trace_id,
        flags=flags,
    )


def unpack_frame(
    data: bytes | bytearray | memoryview, *, job: int, incarnation: int
) -> tuple[FrameHeader, memoryview]:
    """Split one whole frame into its header and a view of its payload (no copy).

    `job` and `incarnation` are what the peer proved at hello: its frames must carry the same. Raises as
    `unpack_header` does, and `MalformedFrame` if the length or the origin is another.
    """
    header = unpack_header(data)
    if len(data) != HEADER_BYTES + header.payload_bytes:
        raise MalformedFrame(
            f"a frame of {len(data)} bytes announces {header.payload_bytes} bytes after its header"
        )
    require_origin(header, job=job, incarnation=incarnation)
    return header, memoryview(data)[HEADER_BYTES:]


def require_origin(header: FrameHeader, *, job: int, incarnation: int) -> None:
    """Raise `MalformedFrame` unless a frame is of the job and incarnation that its peer proved to be."""
    if header.job != job or header.incarnation != incarnation:
        raise MalformedFrame(
            f"a frame of job {header.job:#x} incarnation {header.incarnation} came over the link of "
            f"job {job:#x} incarnation {incarnation}"
        )
