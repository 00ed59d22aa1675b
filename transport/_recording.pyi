from collections.abc import Callable
from typing import Any, Final

RECORD_WEIGHT_BYTES: Final[int]
"""What a record counts for in a buffer, besides its payload: its tuple and numbers."""

class Taking:
    """The hot path of a recorder: what every frame and every record goes through.

    monotonic_ns: the clock that stamps frames; append: where records go.
    """

    now_ns: Callable[[], int]
    _append: Callable[[tuple[Any, ...]], object]
    _taken_bytes: int
    """All that was ever taken, by weight; past `_alarm_bytes` the slow path is asked for room."""
    _alarm_bytes: int
    def __init__(
        self, monotonic_ns: Callable[[], int], append: Callable[[tuple[Any, ...]], object]
    ) -> None: ...
    def frame_in(self, stream: int, frame: bytes, hlc: int) -> None:
        """A whole frame came over a link. hlc: this process's stamp of its receipt."""
    def frame_out(
        self, stream: int, header: bytes, payload: bytes | bytearray | memoryview, hlc: int
    ) -> None:
        """A frame was given to a link. hlc: the stamp in its header."""
    def _take(self, record: tuple[Any, ...], payload_bytes: int = 0) -> None:
        """Append, if there is room."""
    def _make_room(self, weight: int) -> bool:
        """Decide whether a record of `weight`, which is counted already, is taken; set the next alarm.

        Left to subclasses.
        """
