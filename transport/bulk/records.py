"""Sans-I/O: the records of the bulk stream, their fixed header, and what is wrong with a bad one.

A connection of the bulk stream (a *stripe*) carries records in both directions. Each is a header of
`HEADER_BYTES` bytes, its tag if the stripe is protected by a MAC, and, where `nbytes` says so, a payload
followed by a tag of its own. Fields that a kind does not use are zero, so one record has one encoding.

    PUT       a fragment of a put: payload to `at + offset` of a region of the receiver
    NOTIFY    a put without bytes
    GET       asks for `total` bytes at `at` of a region of the receiver, behind the first `value` puts
    DATA      a fragment of the answer to a GET
    REFUSAL   the answer to a GET that cannot be served; the payload says why
    ACK       the first `value` puts have arrived and are published, but for those that were refused before
    PUT_REFUSAL  a put is refused, and not published; the payload says why
    ERROR     the sender ends the connection; the payload says why
    GOODBYE   nothing more comes on this stripe
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias, assert_never

from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.native._native import CHANNELS

FRAGMENT_BYTES_MAX: Final = 1 << 24
"""The longest payload of one record."""
FRAGMENTS_MAX: Final = 1 << 20
"""Fragments of one transfer: bounds what the receiver notes about it to 128 KiB."""
TEXT_BYTES_MAX: Final = 512
"""The longest reason in a REFUSAL or ERROR."""
PUTS_AHEAD_MAX: Final = 1 << 10
"""Most puts and notifications in flight beyond the last that is acknowledged."""
GETS_MAX: Final = 256
"""Gets of one side that are asked and not answered."""

# kind, writable, channel, fragment_bytes, sequence, transfer, nbytes, total, offset, value, at,
# region offset, region nbytes, incarnation, slot, zero
_HEADER: Final = struct.Struct("<BBHI10QII")
HEADER_BYTES: Final = _HEADER.size


class BulkError(RemoteProtocolError):
    """A peer broke the bulk protocol, or somebody on the way did: its connections are ended."""


class Forged(BulkError):
    """A header or payload does not match its tag: it was changed, repeated, left out or reordered."""


class OutOfSequence(BulkError):
    """A record was repeated, left out or reordered, on a stripe without a MAC."""


class Malformed(BulkError):
    """A record that no correct peer sends."""


class _Kind(IntEnum):
    PUT = 1
    NOTIFY = 2
    GET = 3
    DATA = 4
    REFUSAL = 5
    ACK = 6
    ERROR = 7
    GOODBYE = 8
    PUT_REFUSAL = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """One fragment of a put. transfer: its number in the order of all puts of its sender, from 0."""

    transfer: int
    handle: RegionHandle
    at: int
    """Offset of the whole put in the region, bytes."""
    total: int
    """Bytes of the whole put."""
    fragment_bytes: int
    """All fragments have this length, but the last, which may be shorter."""
    offset: int
    """Offset of this fragment in the put; a multiple of `fragment_bytes`."""
    nbytes: int
    channel: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """A put without bytes; numbered among the puts."""

    transfer: int
    channel: int
    value: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """Asks for bytes of a region. transfer: a number of the asker's choice, fresh on this connection."""

    transfer: int
    handle: RegionHandle
    at: int
    total: int
    after: int
    """Number of puts of the requester that precede it: it must see their bytes."""
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """One fragment of the answer to the `Get` of the same number; fields as in `Put`."""

    transfer: int
    total: int
    fragment_bytes: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRefusal:
    """The `Get` of this number cannot be served. The payload is a text of `nbytes` bytes."""

    transfer: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRefusal:
    """The put of this number is not published. The payload is a text of `nbytes` bytes."""

    transfer: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """That many puts, counted from the first, are in place and their cells are set, or were refused."""

    puts: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """The sender has found a fault and ends the connection. The payload is a text of `nbytes` bytes."""

    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The last record of its stripe."""

    nbytes: int = 0


Record: TypeAlias = Put | Notify | Get | Data | TransferRefusal | PutRefusal | Ack | Error | Goodbye

_NO_REGION: Final = RegionHandle(slot=0, incarnation=0, offset=0, nbytes=0, writable=False)


def encode(record: Record, sequence: int) -> bytes:
    """The `HEADER_BYTES` bytes of a record that is the `sequence`th (u64) of its stripe and direction."""
    match record:
        case Put():
            return _pack(
                _Kind.PUT, sequence, record.handle, channel=record.channel,
                fragment_bytes=record.fragment_bytes, transfer=record.transfer, nbytes=record.nbytes,
                total=record.total, offset=record.offset, value=record.value, at=record.at,
            )  # fmt: skip
        case Notify():
            return _pack(
                _Kind.NOTIFY, sequence,
                channel=record.channel, transfer=record.transfer, value=record.value,
            )  # fmt: skip
        case Get():
            return _pack(
                _Kind.GET, sequence, record.handle,
                transfer=record.transfer, total=record.total, value=record.after, at=record.at,
            )  # fmt: skip
        case Data():
            return _pack(
                _Kind.DATA, sequence, fragment_bytes=record.fragment_bytes, transfer=record.transfer,
                nbytes=record.nbytes, total=record.total, offset=record.offset,
            )  # fmt: skip
        case TransferRefusal():
            return _pack(_Kind.REFUSAL, sequence, transfer=record.transfer, nbytes=record.nbytes)
        case PutRefusal():
            return _pack(_Kind.PUT_REFUSAL, sequence, transfer=record.transfer, nbytes=record.nbytes)
        case Ack():
            return _pack(_Kind.ACK, sequence, value=record.puts)
        case Error():
            return _pack(_Kind.ERROR, sequence, nbytes=record.nbytes)
        case Goodbye():
            return _pack(_Kind.GOODBYE, sequence)
        case _:
            assert_never(record)


def _pack(
    kind: _Kind,
    sequence: int,
    handle: RegionHandle = _NO_REGION,
    *,
    channel: int = 0,
    fragment_bytes: int = 0,
    transfer: int = 0,
    nbytes: int = 0,
    total: int = 0,
    offset: int = 0,
    value: int = 0,
    at: int = 0,
) -> bytes:
    return _HEADER.pack(
        kind, handle.writable, channel, fragment_bytes, sequence, transfer, nbytes, total, offset, value, at,
        handle.offset, handle.nbytes, handle.incarnation, handle.slot, 0,
    )  # fmt: skip


def decode(header: bytes | bytearray, sequence: int) -> Record:
    """The record in `HEADER_BYTES` bytes, whose tag, if there is one, has been found right.

    Raises `OutOfSequence` if it is not the `sequence`th, and `Malformed` on anything that `encode` does not
    make or that no transfer can hold. Whether the region exists is for its owner to find out.
    """
    (
        kind, writable, channel, fragment_bytes, number, transfer, nbytes, total, offset, value, at,
        region_offset, region_nbytes, incarnation, slot, _,
    ) = _HEADER.unpack(header)  # fmt: skip
    if number != sequence:
        raise OutOfSequence(f"record {number} of a stripe came where record {sequence} was due")
    handle = RegionHandle(
        slot=slot,
        incarnation=incarnation,
        offset=region_offset,
        nbytes=region_nbytes,
        writable=bool(writable),
    )
    record: Record
    match kind:
        case _Kind.PUT:
            record = Put(
                transfer=transfer, handle=handle, at=at, total=total, fragment_bytes=fragment_bytes,
                offset=offset, nbytes=nbytes, channel=channel, value=value,
            )  # fmt: skip
            _check_range(at, total, region_nbytes)
            _check_fragment(record)
        case _Kind.NOTIFY:
            record = Notify(transfer=transfer, channel=channel, value=value)
        case _Kind.GET:
            record = Get(transfer=transfer, handle=handle, at=at, total=total, after=value)
            _check_range(at, total, region_nbytes)
        case _Kind.DATA:
            record = Data(
                transfer=transfer, total=total, fragment_bytes=fragment_bytes, offset=offset, nbytes=nbytes
            )
            _check_fragment(record)
        case _Kind.REFUSAL:
            record = TransferRefusal(transfer=transfer, nbytes=_text_bytes(nbytes))
        case _Kind.PUT_REFUSAL:
            record = PutRefusal(transfer=transfer, nbytes=_text_bytes(nbytes))
        case _Kind.ACK:
            record = Ack(puts=value)
        case _Kind.ERROR:
            record = Error(nbytes=_text_bytes(nbytes))
        case _Kind.GOODBYE:
            record = Goodbye()
        case _:
            raise Malformed(f"a record of unknown kind {kind}")
    if channel >= CHANNELS:
        raise Malformed(f"a {_Kind(kind).name} record names channel {channel} of {CHANNELS}")
    if encode(record, sequence) != header:
        raise Malformed(f"a {_Kind(kind).name} record sets fields that it does not have")
    return record


def _check_range(at: int, total: int, region_nbytes: int) -> None:
    if at + total > region_nbytes:
        raise Malformed(f"bytes {at}+{total} are outside a region of {region_nbytes}")


def _check_fragment(fragment: Put | Data) -> None:
    size, offset, total = fragment.fragment_bytes, fragment.offset, fragment.total
    if not 0 < size <= FRAGMENT_BYTES_MAX or total > size * FRAGMENTS_MAX:
        raise Malformed(f"a transfer of {total} bytes in fragments of {size}")
    if offset % size or (offset >= total and offset) or fragment.nbytes != min(size, total - offset):
        raise Malformed(f"bytes {offset}+{fragment.nbytes} are no fragment of {total} bytes cut by {size}")


def _text_bytes(nbytes: int) -> int:
    if not 0 < nbytes <= TEXT_BYTES_MAX:
        raise Malformed(f"a reason of {nbytes} bytes; 1..{TEXT_BYTES_MAX} are allowed")
    return nbytes
