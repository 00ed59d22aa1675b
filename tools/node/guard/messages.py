"""Messages of the guards of one host to the one that supervises its ranks (`Reported`), and its answer.

A packet on a Unix socket is one message.
"""

from __future__ import annotations

from typing import Final, TypeAlias, TypeVar

import msgspec

from zbmd.transport.errors import RemoteProtocolError

PACKET_BYTES_MAX: Final = 1024
CODE_MAX: Final = 255


class Here(msgspec.Struct, frozen=True, array_like=True, tag="here", kw_only=True):
    """A guard is here, for this rank of its host."""

    local_rank: int


class Signalled(msgspec.Struct, frozen=True, array_like=True, tag="signalled", kw_only=True):
    """The guard has received a signal, for its rank."""

    number: int


class RankEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended", kw_only=True):
    """The rank of the guard has ended for good; code: what the guard is to exit with."""

    code: int


Reported: TypeAlias = Here | Signalled
MessageT = TypeVar("MessageT")

_reported_decoder: msgspec.msgpack.Decoder[Reported] = msgspec.msgpack.Decoder(Reported)
_ended_decoder = msgspec.msgpack.Decoder(RankEnded)
encode = msgspec.msgpack.Encoder().encode


def decode_reported(packet: bytes) -> Reported:
    """Decode what a guard sent. Raises `RemoteProtocolError`."""
    reported = _decoded(_reported_decoder, packet)
    value = reported.local_rank if isinstance(reported, Here) else reported.number
    if value < 0:
        raise RemoteProtocolError(f"a guard of this host sent {reported}: expected 0 or more")
    return reported


def decode_ended(packet: bytes) -> RankEnded:
    """Decode what the guard that supervises the ranks sent. Raises `RemoteProtocolError`."""
    ended = _decoded(_ended_decoder, packet)
    if not 0 <= ended.code <= CODE_MAX:
        raise RemoteProtocolError(f"the guard of local rank 0 sent {ended}: expected 0 to {CODE_MAX}")
    return ended


def _decoded(decoder: msgspec.msgpack.Decoder[MessageT], packet: bytes) -> MessageT:
    if len(packet) > PACKET_BYTES_MAX:
        raise RemoteProtocolError(f"a guard sent {len(packet)} bytes: at most {PACKET_BYTES_MAX}")
    try:
        return decoder.decode(packet)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a guard of this host sent no message of a guard: {error}") from error
