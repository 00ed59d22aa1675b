from collections.abc import Callable
from typing import Any, Final

from zbmd.transport.memory.scattered import Scattered

RECORD_WEIGHT_BYTES: Final[int]
"""Weight of a record in a buffer, besides its payload: its tuple and numbers."""
PACKED_FRAME_BYTES_MAX: Final[int]
"""A larger frame, header included, is kept by itself."""

class PackedFrames:
    """Frames that were recorded one after the other, copied into one piece of memory.

    An object for each number and each frame would be kept for as long as the ring remembers it: memory that
    is cold whenever it is used again, and work for the garbage collector.
    """

    records: int
    def __len__(self) -> int: ...
    def unfold(self) -> list[tuple[Any, ...]]:
        """See `zbmd.transport.capture.records.Folded`."""

class Taking:
    """The hot path of a recorder: what every frame and every record goes through.

    monotonic_ns: the clock that stamps frames; append: where records go.
    """

    now_ns: Callable[[], int]
    _append: Callable[[tuple[Any, ...]], object]
    _taken_bytes: int
    """All that was ever taken, by weight; past `_alarm_bytes` the slow path is asked for room."""
    _taken_records: int
    """The number of those records."""
    _alarm_bytes: int
    _packs: bool
    """Whether small frames are packed: what takes records out must not do so before they are complete."""
    def __init__(
        self, monotonic_ns: Callable[[], int], append: Callable[[tuple[Any, ...]], object]
    ) -> None: ...
    def frame_in(self, stream: int, frame: bytes, hlc: int) -> None:
        """A whole frame came over a link. hlc: this process's stamp of its receipt."""
    def long_frame_in(self, stream: int, header: bytes, payload: Scattered, hlc: int) -> None:
        """As `frame_in`; the pieces are kept by reference."""
    def frame_out(
        self, stream: int, header: bytes, payload: bytes | bytearray | memoryview | Scattered, hlc: int
    ) -> None:
        """A frame was given to a link. hlc: the stamp in its header. Pieces are kept by reference."""
    def _take(self, record: tuple[Any, ...], payload_bytes: int = 0) -> None:
        """Append, if there is room."""
    def _break_run(self) -> None:
        """Pack nothing any more into what the last frames are in."""
    def _make_room(self, weight: int) -> bool:
        """Decide whether a record of `weight`, which is counted already, is taken; set the next alarm.

        Left to subclasses.
        """
