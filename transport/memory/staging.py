"""Messages between buffers that no peer can reach: staged in the receiver's inbox, chunk by chunk.

The sender puts a chunk straight from its buffer into the next slot of a ring in the receiver's inbox; the
receiver copies it out meanwhile, and gives the slot back by a notification. So both copy at once, through
memory that stays in the cache, as MPI libraries do in shared memory (Buntinas, Mercier, Gropp: "Data
transfers between processes in an SMP system", ICPP 2006).
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.errors import (
    DeadlineExceeded,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
)
from zbmd.transport.memory._region import ShmRegion, SmallMessages, copy
from zbmd.transport.memory.region import RegionHandle, RemoteRegion, flat_bytes
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native import _native

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES_MIN: Final = 32 << 10
CHUNK_BYTES_MAX: Final = 256 << 10
"""Large enough to make the cost of a notification vanish, small enough for the caches."""
CHUNKS: Final = 8
_LENGTH: Final = struct.Struct("<Q")
_HEAD_BYTES: Final = 64
"""Before each slot: the length of the message that begins in it."""
_STRIDE: Final = _HEAD_BYTES + CHUNK_BYTES_MAX
RING_BYTES: Final = CHUNKS * _STRIDE


def chunk_bytes(nbytes: int) -> int:
    """Return the chunk size for a message of `nbytes`, such that both sides are busy for most of it."""
    return min(CHUNK_BYTES_MAX, max(CHUNK_BYTES_MIN, -(-nbytes // (CHUNKS << 12)) << 12))


class StagedPipe(SmallMessages):
    """Ordered messages between two processes, both ways at once: one thread may send, one receive.

    Both sides make one, exchange `handle`, and `connect`. It uses two of their channels: chunks are notified
    on `channel`, slots given back on `channel` + 1; nobody else may use those between the two.
    """

    def __init__(self, own: Segment, *, channel: int) -> None:
        if not 0 <= channel < _native.CHANNELS - 1:
            raise LocalProtocolError(f"a staged pipe needs channels {channel} and {channel + 1}")
        self._own = own
        self._channel = channel
        self._inbox: NDArray[np.uint8] = own.inbox.empty(RING_BYTES, np.uint8)
        self._slots = [
            self._inbox[begin + _HEAD_BYTES : begin + _STRIDE] for begin in range(0, RING_BYTES, _STRIDE)
        ]
        self.handle: RegionHandle = own.regions.register(self._inbox)
        self._theirs: RemoteRegion | None = None
        self._peer = -1
        self._sending = threading.Lock()
        self._receiving = threading.Lock()

    def connect(self, theirs: RemoteRegion) -> None:
        """Use the peer's ring, opened from the handle of its pipe."""
        if theirs.handle.nbytes != RING_BYTES:
            raise RemoteProtocolError(
                f"the ring of slot {theirs.handle.slot} has {theirs.handle.nbytes} bytes, ours {RING_BYTES}"
            )
        self._theirs = theirs
        self._peer = theirs.handle.slot
        if isinstance(theirs, ShmRegion):
            self._open(self._own, theirs, self._inbox, self._channel, CHUNKS, _HEAD_BYTES, CHUNK_BYTES_MIN)

    def _send(self, src: Buffer | NDArray[Any], deadline_ns: int) -> None:
        view = flat_bytes(src)
        with self._sending:
            self._sends += 1
            try:
                self._send_chunks(view, deadline_ns)
            finally:
                self._sends -= 1

    def _send_chunks(self, view: memoryview, deadline_ns: int) -> None:
        theirs, nbytes, begin = self._connected(), view.nbytes, 0
        step = chunk_bytes(nbytes)
        while True:
            number = self._sent
            if number >= CHUNKS:
                self._wait(self._channel + 1, number - CHUNKS + 1, deadline_ns)
            at = number % CHUNKS * _STRIDE
            if begin == 0:  # notified with the chunk itself: `number` has been notified before
                theirs.put(_LENGTH.pack(nbytes), at, channel=self._channel, value=number)
            chunk = view[begin : begin + step]
            theirs.put(chunk, at + _HEAD_BYTES, channel=self._channel, value=number + 1).wait(deadline_ns)
            self._sent += 1
            begin += step
            if begin >= nbytes:
                return

    def _receive(self, into: Buffer | NDArray[Any], deadline_ns: int) -> None:
        view = flat_bytes(into)
        with self._receiving:
            self._receives += 1
            try:
                self._receive_chunks(view, deadline_ns)
            finally:
                self._receives -= 1

    def _receive_chunks(self, view: memoryview, deadline_ns: int) -> None:
        theirs, nbytes, begin = self._connected(), view.nbytes, 0
        step = chunk_bytes(nbytes)
        while True:
            number = self._received
            self._wait(self._channel, number + 1, deadline_ns)
            if begin == 0:
                self._require_length(number % CHUNKS, nbytes)
            chunk = view[begin : begin + step]
            copy(chunk, self._slots[number % CHUNKS][: chunk.nbytes], nbytes)
            self._received += 1
            theirs.notify(self._channel + 1, self._received)
            begin += step
            if begin >= nbytes:
                return

    def close(self) -> None:
        """Let go of the ring; the peer's memory is kept until its end is certain. Idempotent."""
        self._own.regions.release(self.handle)
        if self._theirs is not None:
            self._theirs.close()

    def _connected(self) -> RemoteRegion:
        if self._theirs is None:
            raise LocalProtocolError("this staged pipe is not connected")
        return self._theirs

    def _require_length(self, slot: int, nbytes: int) -> None:
        (found,) = _LENGTH.unpack_from(self._inbox.data, slot * _STRIDE)
        if found != nbytes:
            raise RemoteProtocolError(
                f"slot {self._peer} sent a message of {found} bytes where {nbytes} were expected"
            )

    def _wait(self, channel: int, value: int, deadline_ns: int) -> None:
        peer = self._peer
        ended = self._own.wait(peer, channel, value, group_mask=1 << peer, deadline_ns=deadline_ns)
        # Chunks are numbered on and on, so behind 2**32 of them comes what looks like another epoch.
        if ended == _native.WAIT_OK or _native.load_cell(self._own.base, peer, channel) >= value:
            return
        if ended == _native.WAIT_ABORTED:
            raise LocalProtocolError(f"channel {channel} was aborted in the middle of a staged message")
        if ended == _native.WAIT_DEADLINE:
            raise DeadlineExceeded(f"slot {peer} did not keep up with a staged message: it may be stopped")
        raise PeerLost(peer, "it ended in the middle of a staged message")
