from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final

from zbmd.collectives.flight._flight import FlightRing

CATEGORIES: Final[tuple[str, ...]]
"""The categories of a step's time, by their numbers; the remainder is idle."""
PER_UNIT: Final[tuple[int, int, int]]
"""The categories whose time is known for each unit of the model: forward, backward, recompute."""
RECORD_BYTES: Final[int]
UNITS_MAX: Final[int]
GROUPS_MAX: Final[int]
TRACK_STEP: Final[int]
TRACK_OPERATION: Final[int]
TRACK_OP: Final[int]

EndedStep = tuple[
    int,
    int,
    int,
    list[int],
    list[tuple[list[int], list[int]]],
    tuple[int, int, int] | None,
]
"""(step, begin ns, end ns, ns of each category, (ns, passes) of each unit for each of PER_UNIT, overlap).

overlap: how long operations of the followed groups were under way, how long of that the rank waited for
communication, and how long it was at work beside them; None if there were too many to tell.
"""

class SpanRecorder:
    """The spans of one rank's steps, for one thread at a time; times in ns of CLOCK_MONOTONIC.

    A span's own time is without that of the spans within it. `buffer`: what the latest records are kept in,
    writable: a u64, how many there have been, and room for records of `RECORD_BYTES`. units: of the model.
    """

    units: int
    names: list[str]
    """The operations and ops that records have named so far, by number."""
    groups: int

    def __init__(self, buffer: object, units: int) -> None: ...
    def release(self) -> None:
        """Let go of the buffer. Raises `LocalProtocolError` while a span is open."""
    def recording(self) -> AbstractContextManager[None]:
        """The spans of the thread that enters it are recorded here, while it is in it."""
    def add(self, category: int, begin_ns: int, end_ns: int) -> None:
        """A span of another thread, while none is open; what lies before the last one's end is cut off."""
    def op(self, name: str, unit: int, begin_ns: int, end_ns: int, own_ns: int) -> None:
        """Record a call of an op of `unit` (-1: none), on a track of its own: it counts for no category."""
    def follow(self, ring: FlightRing) -> int:
        """Take along the operations of a group from now on; its number here, -1 if there were too many."""
    def forget(self, group: int) -> None:
        """Follow a group no longer."""
    def begin_step(self, number: int, at_ns: int = 0) -> EndedStep | None:
        """Begin a step, now or at `at_ns`: the one before ends there, and is returned.

        Raises `LocalProtocolError` while a span is open.
        """
    def end_step(self, at_ns: int = 0) -> EndedStep | None:
        """End the step, and begin none."""

class Span:
    """A context manager: its time, but for that of spans within, is of `category`.

    It is recorded where the thread's `SpanRecorder.recording` says, if anywhere. `span[n]` is that of the
    model's unit n; without, the unit is that of the span around it.
    """

    category: int
    unit: int

    def __init__(self, category: int, unit: int = -1) -> None: ...
    def __getitem__(self, unit: int) -> Span: ...
    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

FORWARD: Final[Span]
BACKWARD: Final[Span]
RECOMPUTE: Final[Span]
OPTIMIZER: Final[Span]
GRAD_CLIP: Final[Span]
DATA: Final[Span]
TRANSFER: Final[Span]
COMM: Final[Span]
BUBBLE: Final[Span]
CHECKPOINT: Final[Span]
EVALUATE: Final[Span]
DIGEST: Final[Span]
SAMPLE_GEN: Final[Span]
