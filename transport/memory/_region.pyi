from typing import Any

from numpy.typing import NDArray
from typing_extensions import Buffer

from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native._native import Mapping

class Cells:
    """The notify cells of our own segment: the base of `zbmd.transport.memory.segment.Segment`."""

    def _open_cells(self, mapping: Mapping) -> None: ...
    def _close_cells(self) -> None: ...
    def wait(
        self,
        slot: int,
        channel: int,
        value: int,
        *,
        group_mask: int = 0,
        deadline_ns: int = 0,
        spins: int | None = None,
    ) -> int:
        """Wait, without the GIL, until our cell of (slot, channel) holds at least `value` of its epoch.

        Looks `spins` times, by default as often as has been of use lately, before the thread parks. Returns
        WAIT_OK, or WAIT_LOST when a slot of `group_mask` is lost, WAIT_ABORTED when the channel is aborted up
        to `value` or the cell is of a later epoch, WAIT_DEADLINE when CLOCK_MONOTONIC has passed
        `deadline_ns` (0: none). Raises LocalProtocolError once the segment is closed.
        """

class Deferred:
    """Number of operations on one peer's regions that have been put off."""

    deferred: int
    def defer(self, change: int) -> None: ...
    def submit(
        self, region: ShmRegion, kind: int, buffer: Pinned | None, offset: int, channel: int, value: int
    ) -> Transfer: ...

class Pinned(Buffer):
    """The bytes of somebody's buffer, which can neither move nor go while this lives."""

    def __init__(self, owner: Buffer | NDArray[Any], writable: bool) -> None: ...

class ShmRegion:
    """A peer's region in shared memory: see `zbmd.transport.memory.region.RemoteRegion`."""

    def __init__(
        self, own: Mapping, our_slot: int, peer: Mapping, handle: RegionHandle, queue: Deferred
    ) -> None:
        """Raises RemoteProtocolError if the handle does not fit the peer's mapping."""
    @property
    def handle(self) -> RegionHandle: ...
    def put(self, src: Buffer | NDArray[Any], offset: int = 0, *, channel: int, value: int) -> Transfer: ...
    def get(self, into: Buffer | NDArray[Any], offset: int = 0) -> Transfer: ...
    def notify(self, channel: int, value: int) -> None: ...
    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview: ...
    def perform(self, kind: int, buffer: Pinned | None, offset: int, channel: int, value: int) -> None:
        """Do what was submitted to the queue: for the queue alone."""
    def close(self) -> None: ...

class SmallMessages:
    """The messages of one chunk of a staged pipe: the base of `zbmd.transport.memory.staging.StagedPipe`."""

    _sent: int
    _received: int
    _sends: int
    _receives: int
    """Threads that send, or receive, what is not small, or wait."""
    def _open(
        self,
        own: Cells,
        theirs: ShmRegion,
        ring: NDArray[Any],
        channel: int,
        chunks: int,
        head: int,
        most: int,
    ) -> None:
        """head: bytes of a slot before its message. most: bytes of a message that is small."""
    def send(self, src: Buffer | NDArray[Any], *, deadline_ns: int = 0) -> None:
        """Send one message, of 0 bytes or more; `src` may be reused at once. Blocks, without the GIL, while
        the peer's ring is full.

        Raises `PeerLost`, `DeadlineExceeded` (CLOCK_MONOTONIC has passed `deadline_ns`; 0: none) and
        `LocalProtocolError` on a buffer that is not C-contiguous. After an error the pipe is of no more use:
        a part of the message may have left.
        """

    def receive(self, into: Buffer | NDArray[Any], *, deadline_ns: int = 0) -> None:
        """Fill `into` with the next message, which must have its size. Blocks until it is all there.

        Raises as `send`, and `RemoteProtocolError` on a message of another size.
        """

def copy(into: Buffer | NDArray[Any], src: Buffer | NDArray[Any], whole_bytes: int) -> None:
    """Copy as `put` and `get` do, without the GIL, between C-contiguous buffers of one size.

    whole_bytes: of the message that these are a part of, if `into` is; a large one goes past the caches.
    """

def streamed(source: Buffer) -> bytes:
    """A copy of C-contiguous bytes, made as `stream` does: for what is kept, and so lands in cold memory."""

def stream(into: Buffer | NDArray[Any], src: Buffer | NDArray[Any]) -> None:
    """Copy past the caches, with the GIL, between C-contiguous buffers of one size that do not overlap.

    For what another processor has read and is to read: an ordinary store waits for each line that is in its
    caches (1 MiB: 38 us, and 70 to 470 us with memcpy, by where the two processors are).
    """
