"""Large frames of shm links: a payload is copied once, into the sender's arena, and read there by the peer.

Such a block of the arena is lent. The ring carries the frame's header and a record of where the block lies,
as a marked frame (ring.h); the peer has the arena mapped and gets a view of it. When the last view is gone,
the block is brought back by a word in the link's memory, also after the link has ended: what a peer may still
read is not used again before it has brought it back, or its process has ended. What does not fit into the
bounds waits while the peer has blocks that it has not come to yet; else, as what does not fit into the arena,
it is sent through the ring in pieces, so that nobody waits for views that are held.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from typing import Final, NamedTuple

from zbmd.transport.errors import ArenaFull
from zbmd.transport.frames import FrameHeader
from zbmd.transport.memory.arena import ALIGNMENT, Arena
from zbmd.transport.memory.scattered import Scattered
from zbmd.transport.native._native import RING_BLOCKS, RingWriter

BLOCK_BYTES_MIN: Final = 64 << 10
"""A smaller payload goes through the ring: it fits, and a copy more costs less than a block
(`python -m zbmd.tools.lab.bench.transport.frames`)."""
LENT_BYTES_MAX: Final = 8 << 20
"""Most bytes that a process lends to all its peers together."""
LENT_PARTS: Final = 8
"""And at most this part of its arena."""
LINK_PARTS: Final = 4
"""One link gets at most this part of it, so that a peer that returns nothing cannot starve the others."""

BLOCK_RECORD: Final = struct.Struct("<QI")
"""The block's offset from the base of the sender's segment, and its number."""


class BorrowedFrame(NamedTuple):
    """A frame whose payload lies in the peer's arena."""

    header: FrameHeader
    payload: memoryview
    """The peer may still store there: whoever decodes it looks at each byte once, or copies it first."""
    packed: bytes
    """The header as it came."""


class FrameLender:
    """The blocks that a process has lent to its peers: `segment.frame_lender`. For links of any thread."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self.lent_bytes = 0
        """Bytes that peers may read now, or that have not been asked for since."""
        self._lent_bytes_max = min(LENT_BYTES_MAX, arena.capacity_bytes // LENT_PARTS)
        self._ended: list[LinkLoans] = []
        """Of links that have ended; each has something lent, so the bound of bytes is theirs too."""

    @property
    def link_bytes_max(self) -> int:
        """Return how many bytes one link may lend."""
        return self._lent_bytes_max // LINK_PARTS

    def place(self, payload: bytes | Scattered) -> int | None:
        """The payload's offset in a block of its own, or None if there is no room now."""
        nbytes = block_bytes(payload)
        with self._lock:
            if self.lent_bytes + nbytes > self._lent_bytes_max:
                self._collect_ended()
                if self.lent_bytes + nbytes > self._lent_bytes_max:
                    return None
            try:
                offset = self._arena.reserve(nbytes)
            except ArenaFull:
                return None
            self.lent_bytes += nbytes
        pieces = payload.pieces if isinstance(payload, Scattered) else (payload,)
        self._arena.fill(offset, *pieces)
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """A block is ours again."""
        with self._lock:
            self._free(offset, nbytes)

    def keep(self, loans: LinkLoans) -> None:
        """The link of these has ended: they come back in their own time."""
        with self._lock:
            self._ended.append(loans)
            self._collect_ended()

    def collect(self) -> None:
        """Take back what links that have ended have brought back."""
        with self._lock:
            self._collect_ended()

    def _collect_ended(self) -> None:
        for loans in self._ended:
            for offset, nbytes in loans.take_back():
                self._free(offset, nbytes)
        self._ended = [loans for loans in self._ended if loans.lent]

    def _free(self, offset: int, nbytes: int) -> None:
        self._arena.unreserve(offset)
        self.lent_bytes -= nbytes


class LinkLoans:
    """Blocks that one link has lent to its peer. pid: of the peer's process, by the kernel; 0: unknown."""

    def __init__(self, lender: FrameLender, writer: RingWriter, pid: int) -> None:
        self._lender = lender
        self._writer = writer
        self._pid = pid
        self._ended = False
        self._blocks: dict[int, tuple[int, int]] = {}
        """Number of a block that is lent, to its offset and size."""
        self._bytes = 0

    @property
    def lent(self) -> int:
        """Return how many blocks are lent."""
        return len(self._blocks)

    def lend(self, payload: bytes | Scattered) -> bytes | None:
        """Copy a payload to where the peer can read it; the record that says where, or None for no room."""
        for freed in self.take_back():
            self._lender.free(*freed)
        nbytes = block_bytes(payload)
        if len(self._blocks) == RING_BLOCKS or self._bytes + nbytes > self._lender.link_bytes_max:
            return None
        offset = self._lender.place(payload)
        if offset is None:
            return None
        block = next(number for number in range(RING_BLOCKS) if number not in self._blocks)
        self._blocks[block] = offset, nbytes
        self._bytes += nbytes
        self._writer.lend(block)
        return BLOCK_RECORD.pack(offset, block)

    def ask(self) -> bool:
        """Whether to wait for room: a block is on its way to the peer. Then the writer is woken for it.

        If so, try `lend` once more before waiting.
        """
        self._writer.park_for_block()
        return any(self._writer.is_unread(block) for block in self._blocks)

    def take_back(self) -> list[tuple[int, int]]:
        """Return offsets and sizes of the blocks that are ours again; each is returned once."""
        gone = self._ended and process_ended(self._pid)
        back = [block for block in self._blocks if gone or self._writer.is_back(block)]
        freed = [self._blocks.pop(block) for block in back]
        self._bytes -= sum(nbytes for _, nbytes in freed)
        return freed

    def end(self) -> None:
        """The link has ended: nothing is lent any more, and what is, comes back in its own time."""
        self._ended = True
        if self._blocks:
            self._lender.keep(self)


def process_ended(pid: int) -> bool:
    """Whether no thread of a process is left. If its number is used again, whether that of the new one is.

    Returns False if that cannot be found out: the process is of another namespace, no descriptor is left.
    """
    if pid <= 0:
        return False
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(fd)


def block_bytes(payload: bytes | Scattered) -> int:
    """Return how many bytes of the arena a payload takes."""
    return -(-len(payload) // ALIGNMENT) * ALIGNMENT
