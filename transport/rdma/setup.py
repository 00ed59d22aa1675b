"""The messages that set up an RDMA link, over an authenticated TCP link.

The dialer offers its queue pair, the listener answers with its own once that is connected, and the dialer
says that it is ready, once its own is. Sans-I/O; reads untrusted input.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.rdma.credit import CREDITS, MESSAGE_BYTES

FORMAT: Final = 2
GID_BYTES: Final = 16
UNACKNOWLEDGED: Final = 12
"""IBV_WC_RETRY_EXC_ERR of libibverbs."""
NO_RECEIVE: Final = 13
"""IBV_WC_RNR_RETRY_EXC_ERR."""
TIMEOUT: Final = 14
"""Of an acknowledgement: 4.096 us * 2**14 = 67 ms."""
RETRIES: Final = 6
"""Then the peer is lost, after about half a second. 7 would mean for ever."""

_U24 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
_Gid = Annotated[bytes, msgspec.Meta(min_length=GID_BYTES, max_length=GID_BYTES)]


class QueuePairAt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The address of a queue pair, and what it takes."""

    format: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = FORMAT
    gid: _Gid
    lid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    """Of its port; 0 over Ethernet."""
    number: _U24
    first_psn: _U24
    """Of the first packet that it sends."""
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
    """Of its port, as ibv_mtu: 256 << (mtu - 1) bytes."""
    message_bytes: int = MESSAGE_BYTES
    credits: int = CREDITS


class MemoryAt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The address of a segment over RDMA, and its queue pair."""

    at: QueuePairAt
    base: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    """The segment's address in its owner."""
    nbytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
    """Of all of it."""
    arena_offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
    inbox_key: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    arena_key: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


WHY_MAX: Final = 400
"""Characters of a reason."""


class RdmaOffer(msgspec.Struct, frozen=True, array_like=True, tag="rdma-offer", forbid_unknown_fields=True):
    """The dialer's message."""

    at: QueuePairAt
    memory: MemoryAt | None = None
    """Of the dialer, if it gives the link regions."""


class RdmaAnswer(msgspec.Struct, frozen=True, array_like=True, tag="rdma-answer", forbid_unknown_fields=True):
    """The listener's."""

    at: QueuePairAt
    memory: MemoryAt | None = None


class RdmaRefusal(
    msgspec.Struct, frozen=True, array_like=True, tag="rdma-refusal", forbid_unknown_fields=True
):
    """Of who cannot or does not want to, in place of what is due: nothing comes of it."""

    why: Annotated[str, msgspec.Meta(max_length=WHY_MAX)]


class RdmaReady(msgspec.Struct, frozen=True, array_like=True, tag="rdma-ready", forbid_unknown_fields=True):
    """The dialer's second message."""


SETUP_BYTES_MAX: Final = 4 * WHY_MAX + 64
Message = RdmaOffer | RdmaAnswer | RdmaRefusal | RdmaReady
MessageT = TypeVar("MessageT", bound=Message)
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class RdmaRefused(RemoteProtocolError):
    """The peer cannot set up an RDMA link; says why."""


def encode_setup(message: Message) -> bytes:
    """As bytes."""
    return _encode(message)


def decode_setup(data: bytes, kind: type[MessageT], peer: str) -> MessageT:
    """The message of that kind. Raises `RdmaRefused`, and `RemoteProtocolError` on anything else."""
    if len(data) > SETUP_BYTES_MAX:
        raise RemoteProtocolError(f"{peer} sent {len(data)} bytes to set up an RDMA link")
    try:
        message = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"{peer} sent no message that sets up an RDMA link: {error}") from error
    if isinstance(message, RdmaRefusal):
        raise RdmaRefused(f"{peer} refuses an RDMA link: {message.why}")
    if not isinstance(message, kind):
        raise RemoteProtocolError(f"{peer} sent {type(message).__name__} where {kind.__name__} was due")
    return message


def require_fits(at: QueuePairAt, peer: str) -> QueuePairAt:
    """Raise `RemoteProtocolError` unless the peer cuts and counts messages as we do."""
    if (at.format, at.message_bytes, at.credits) != (FORMAT, MESSAGE_BYTES, CREDITS):
        raise RemoteProtocolError(
            f"{peer} has RDMA links of format {at.format} with {at.credits} messages of {at.message_bytes} "
            f"bytes, we of format {FORMAT} with {CREDITS} of {MESSAGE_BYTES}: run one release on both sides"
        )
    return at


def why_broken(status: int) -> str:
    """Describe the fault of the peer that a failed completion reports. status: an ibv_wc_status."""
    tries = RETRIES + 1
    if status == UNACKNOWLEDGED:
        return f"its RDMA device has acknowledged nothing in {tries} tries: it is down or cut off"
    if status == NO_RECEIVE:
        return f"its RDMA device had no buffer for us in {tries} tries: the peer accepts no messages"
    return f"its RDMA connection broke (ibv_wc_status {status})"
