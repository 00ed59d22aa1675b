"""Attach messages: what the sides of a shm link exchange after the hello, with file descriptors.

The dialer offers the link's memory and eventfds, and its own segment if it has one; the listener answers
with its segment, if any. Everything here reads untrusted input.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.link.interface import RING_BYTES_MAX, RING_BYTES_MIN
from zbmd.transport.memory.memfd import map_from_peer, sealed_size
from zbmd.transport.memory.segment import PeerSegment
from zbmd.transport.native._native import MAX_SLOTS, Mapping
from zbmd.transport.shm.link import link_memory_bytes

MESSAGE_BYTES_MAX: Final = 256
OFFER_FDS_MAX: Final = 5
"""Link memory, the dialer's eventfd, the listener's eventfd, the dialer's segment, in one or two files."""
SEGMENT_FDS: Final = (1, 2)


class AttachOffer(msgspec.Struct, frozen=True, array_like=True, tag="offer", forbid_unknown_fields=True):
    """The dialer's message. `slot` is None if it hands over no segment."""

    ring_bytes: int
    slot: int | None


class AttachAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer", forbid_unknown_fields=True):
    """The listener's message. `slot` is None if it hands over no segment."""

    slot: int | None


MessageT = TypeVar("MessageT", AttachOffer, AttachAnswer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """An accepted offer, checked and mapped; the eventfds belong to the caller."""

    ring_bytes: int
    mapping: Mapping
    dialer_wake_fd: int
    listener_wake_fd: int
    segment: PeerSegment | None


def decode(data: bytes, kind: type[MessageT]) -> MessageT:
    """Decode a peer's message. Raises `RemoteProtocolError` on anything that is not one."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise RemoteProtocolError(f"attach: a message over {MESSAGE_BYTES_MAX} bytes")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
        raise RemoteProtocolError(f"attach: {data[:32]!r} is not a valid {kind.__name__}: {error}") from None


def accept_offer(data: bytes, fds: list[int], *, incarnation: int) -> Attached:
    """Check an offer and map what it brought; closes the descriptors that are not returned.

    Raises `RemoteProtocolError` if any of it is not what it should be, and `OutOfMemory` if it cannot be
    mapped for its size; all `fds` are closed then.
    """
    kept: tuple[int, ...] = ()
    try:
        offer = decode(data, AttachOffer)
        if len(fds) - 3 not in _segment_fds(offer.slot):
            raise RemoteProtocolError(f"attach: an offer with {len(fds)} descriptors")
        ring = offer.ring_bytes
        if ring & (ring - 1) or not RING_BYTES_MIN <= ring <= RING_BYTES_MAX:
            raise RemoteProtocolError(f"attach: rings of {ring} bytes are offered")
        nbytes = sealed_size(fds[0])
        if nbytes != link_memory_bytes(ring):
            raise RemoteProtocolError(f"attach: link memory of {nbytes} bytes for rings of {ring}")
        for fd in fds[1:3]:
            _check_eventfd(fd)
        segment = None if offer.slot is None else _attach_segment(fds[3:], offer.slot, incarnation)
        mapping = map_from_peer(fds[0], nbytes, nbytes)
        kept = (fds[1], fds[2])
        return Attached(
            ring_bytes=ring, mapping=mapping, dialer_wake_fd=fds[1], listener_wake_fd=fds[2], segment=segment
        )
    finally:
        close_all(fd for fd in fds if fd not in kept)


def accept_answer(data: bytes, fds: list[int], *, incarnation: int) -> PeerSegment | None:
    """Check an answer and map the listener's segment; closes all `fds`. Raises as `accept_offer`."""
    try:
        answer = decode(data, AttachAnswer)
        if len(fds) not in _segment_fds(answer.slot):
            raise RemoteProtocolError(f"attach: an answer with {len(fds)} descriptors")
        return None if answer.slot is None else _attach_segment(fds, answer.slot, incarnation)
    finally:
        close_all(fds)


def _segment_fds(slot: int | None) -> Sequence[int]:
    """Return how many descriptors of a segment may come."""
    return (0,) if slot is None else SEGMENT_FDS


def _attach_segment(fds: Sequence[int], slot: int, incarnation: int) -> PeerSegment:
    if not 0 <= slot < MAX_SLOTS:
        raise RemoteProtocolError(f"attach: slot {slot} is not in 0..{MAX_SLOTS - 1}")
    segment = PeerSegment.attach(fds, slot=slot)
    if segment.incarnation != incarnation:
        raise RemoteProtocolError(
            f"attach: the segment of slot {slot} says incarnation {segment.incarnation}, hello {incarnation}"
        )
    return segment


def _check_eventfd(fd: int) -> None:
    """A descriptor on which a write could block, or that is something else, is refused."""
    kind = os.readlink(f"/proc/self/fd/{fd}")
    if kind != "anon_inode:[eventfd]" or not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK:
        raise RemoteProtocolError(f"attach: {kind} is not a non-blocking eventfd")


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that came from a peer."""
    for fd in fds:
        os.close(fd)
