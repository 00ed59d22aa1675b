from typing import Any, Final

from numpy.typing import NDArray
from typing_extensions import Buffer

MAX_SLOTS: Final[int]
CHANNELS: Final[int]
FAR_CHANNELS: Final[int]
LINE_BYTES: Final[int]
MAGIC: Final[int]
OFF_MAGIC: Final[int]
OFF_TOTAL: Final[int]
OFF_INBOX: Final[int]
OFF_ARENA: Final[int]
OFF_PID: Final[int]
OFF_INCARNATION: Final[int]
OFF_GOODBYE: Final[int]
OFF_SLOT: Final[int]
OFF_PATIENT: Final[int]
OFF_LOST: Final[int]
OFF_MUTEX: Final[int]
OFF_NOTIFY: Final[int]
OFF_DESCRIPTORS: Final[int]
OFF_END: Final[int]
WAIT_OK: Final[int]
WAIT_LOST: Final[int]
WAIT_ABORTED: Final[int]
WAIT_DEADLINE: Final[int]
RING_HEADER_BYTES: Final[int]
RING_BLOCKS: Final[int]
MADV_HUGEPAGE: Final[int]
MADV_POPULATE_WRITE: Final[int]
HUGE_BYTES: Final[int]

class Mapping:
    """A shared mapping of a memfd, unmapped when the last view of it is gone."""

    def __init__(self, fd: int, nbytes: int, writable_bytes: int, tail_fd: int = -1, tail: int = 0) -> None:
        """Map `nbytes` of `fd`; the first `writable_bytes` are writable. Raises OSError.

        From `tail` on, a multiple of a page, lies what is at the beginning of `tail_fd`, if there is one.

        A mapping as large as a huge page begins at a multiple of `HUGE_BYTES`, so that it can have some.
        """
    def madvise(self, advice: int, offset: int = 0, nbytes: int | None = None) -> None:
        """madvise(2) for [offset, offset + nbytes), by default to the end, without the GIL.

        Raises OSError, and `LocalProtocolError` outside the mapping.
        """
    def prefer_node(self, node: int) -> None:
        """Have missing pages taken from a NUMA node while it has any. Raises OSError."""
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def writable_bytes(self) -> int: ...
    def view(self, offset: int, nbytes: int, *, writable: bool = False) -> memoryview:
        """A view that keeps the mapping alive. Raises LocalProtocolError outside the mapping."""
    def load64(self, offset: int) -> int: ...
    def store64(self, offset: int, value: int) -> None: ...
    def load32(self, offset: int) -> int: ...
    def store32(self, offset: int, value: int) -> None: ...

def now_ns() -> int:
    """CLOCK_MONOTONIC in ns, the clock of every deadline and notice."""

def current_node() -> int:
    """The NUMA node that the calling thread runs on."""

def address_of(buffer: Buffer | NDArray[Any]) -> int:
    """The address of a contiguous buffer's first byte. Raises BufferError if it is not contiguous."""

def load_cell(own_base: int, slot: int, channel: int) -> int: ...
def notify(peer_base: int, our_slot: int, channel: int, value: int) -> None:
    """Publish `value` in the peer's cell of (our slot, channel) and wake the peer if it is parked."""

def wait(
    own_base: int,
    slot: int,
    channel: int,
    value: int,
    *,
    group_mask: int = 0,
    deadline_ns: int = 0,
    spins: int = 0,
) -> int:
    """Wait, without the GIL, until our cell of (slot, channel) holds at least `value`.

    Returns WAIT_OK, or WAIT_LOST when a slot of `group_mask` is lost that had not ended the channel in this
    epoch (by the highest value there is of it), WAIT_ABORTED when the channel is aborted up to `value`,
    WAIT_DEADLINE when CLOCK_MONOTONIC has passed `deadline_ns` (0: none).
    """

def ring(own_base: int) -> None:
    """Wake every thread of the segment's owner that is parked on its doorbell."""

def lost_mask(own_base: int) -> int: ...
def set_lost(own_base: int, slot: int) -> None: ...
def clear_lost(own_base: int, slot: int) -> None: ...
def abort_channel(own_base: int, channel: int, epoch: int) -> None:
    """End our waits on `channel` for any value of `epoch` or before it."""

class RingWriter:
    """The producer's end of a ring at `offset` of `mapping`, `capacity` bytes (a power of two)."""

    def __init__(self, mapping: Mapping, offset: int, capacity: int, peer_event_fd: int) -> None: ...
    def write(self, head: Buffer, body: Buffer, done: int, marked: bool = False) -> int:
        """Write what fits of the frame (u32 length, head, body) from its byte `done`; return the new `done`.

        The frame is complete at 4 + len(head) + len(body). Raises RemoteProtocolError if the reader's
        position is impossible. marked: the reader learns it, see `RingReader.marked`.
        """
    def park(self) -> bool:
        """Ask to be woken once half of the ring is free; False, and not asked, if it is already."""
    def lend(self, block: int) -> None:
        """Block `block` (below RING_BLOCKS) is the reader's from now on."""
    def is_back(self, block: int) -> bool:
        """Whether the reader has brought it back, or will never take it. Also when the link has ended."""
    def is_unread(self, block: int) -> bool:
        """Whether the reader has not come to it yet."""
    def park_for_block(self) -> None:
        """Ask to be woken when a block is taken or brought back; look again after this before you wait."""

class RingReader:
    """The consumer's end of a ring."""

    def __init__(
        self, mapping: Mapping, offset: int, capacity: int, peer_event_fd: int, frame_bytes_max: int
    ) -> None: ...
    def read(self) -> bytes | None:
        """The next whole frame, copied out, or None if it has not arrived yet.

        Raises RemoteProtocolError on a frame over the bound or an impossible writer's position.
        """
    @property
    def marked(self) -> bool:
        """Whether the frame that was read last carries where its payload lies."""
    def take(self, block: int, memory: Mapping, offset: int, nbytes: int) -> memoryview:
        """Bytes of `memory`, read-only, as block `block`, which is brought back with the last view of them.

        Raises LocalProtocolError outside the mapping.
        """
    def done(self) -> None:
        """Tell the writer that no further block will be taken, and wake it no more."""
    @property
    def partial(self) -> bool:
        """Whether bytes of a frame are waiting."""
    def ready(self, look_ns: int = 0) -> bool:
        """Whether bytes have come since the last `read`, or the writer's position is impossible.

        If not, it looks on for `look_ns`, without the GIL.
        """
    def park(self) -> bool:
        """Ask to be woken at the next write; False, and not asked, if there are bytes already."""

class LifeThread:
    """A native thread that holds robust futex words of the process's segment: of slots 0 to `slots` - 1, and
    the node's, the last. Raises `LocalProtocolError` on more slots than there are.
    """

    def __init__(self, mapping: Mapping, slots: int = MAX_SLOTS - 1) -> None: ...
    def leave(self) -> None: ...

class Watch:
    """A native thread that waits for the end of one peer's life thread."""

    def __init__(self, own: Mapping, own_slot: int, peer: Mapping, peer_slot: int, event_fd: int) -> None: ...
    def notice(self) -> tuple[int, bool] | None: ...
    def stop(self) -> None: ...
