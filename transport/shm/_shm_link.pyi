import asyncio

from zbmd.transport.link._link import LinkCore
from zbmd.transport.link._spin import SpinCore
from zbmd.transport.memory.frame_loans import BorrowedFrame
from zbmd.transport.memory.scattered import Scattered
from zbmd.transport.native._native import RingReader, RingWriter

class ShmCore(LinkCore):
    """The hot path of a shm link. `ShmLink` has the rest: `_lent`, `_has_room_soon` and `_borrowed`."""

    _writer: RingWriter
    _reader: RingReader
    _policy: SpinCore
    _loop: asyncio.AbstractEventLoop
    _spinning: bool
    _dry: bool
    """Whether no frame has come since the reader last parked or began to spin."""
    def _begin_rings(
        self,
        writer: RingWriter,
        reader: RingReader,
        policy: SpinCore,
        *,
        look_ns: int,
        lends_from_bytes: int,
        lends: bool,
    ) -> None:
        """look_ns: how long one look lasts; lends_from_bytes: which payloads are lent, if any."""
    def _push(self, header: bytes, payload: bytes | Scattered) -> bool:
        """See `zbmd.transport.link.base.LinkSide`."""
    def _next_frame(self) -> bytes | BorrowedFrame | None:
        """See `zbmd.transport.link.base.LinkSide`."""
    def _park(self) -> bool:
        """See `zbmd.transport.link.base.LinkSide`."""
    def _spin(self) -> None:
        """Look again, on a turn of the loop."""
