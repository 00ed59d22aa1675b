from typing import Final

RUNNING: Final[int]
COMPLETE: Final[int]
FAILED: Final[int]

class QuickClock:
    """Monotonic time for who reads it twice in half a microsecond, one thread at a time; see `quick_clock.h`.

    counts: whether the processor's counter can be gone by between readings of the kernel's clock.
    """

    def __init__(self, counts: bool) -> None: ...
    def now_ns(self) -> int:
        """As `zbmd.transport.native._native.now_ns`, within a microsecond; it never goes back."""

class FlightRing:
    """The latest operations of a communicator, `capacity` of them.

    The thread that has the communicator's turn writes it; any thread may read it.
    """

    capacity: int
    begun: int
    """Operations recorded since the ring was made."""

    def __init__(self, capacity: int) -> None: ...
    def number(self, operation: str, algorithm: str) -> int:
        """Return the number that stands for these names in the ring."""
    def begin(self, call: int, sequence: int, nbytes: int, start_ns: int) -> None:
        """An operation begins; `call` is its `number`."""
    def renumber(self, call: int) -> None:
        """The latest operation turned out to be another than it began as."""
    def end(self, state: int, met_ns: int, end_ns: int, error: str = "") -> None:
        """The latest operation has ended."""
    def record(self, number: int) -> tuple[str, str, int, int, int, int, int, int, str]:
        """(operation, algorithm, sequence, nbytes, start, met, end, state, error) of the `number`-th begun.

        Raises IndexError if it is not kept.
        """

def listen(signum: int) -> bool:
    """Have a signal end a `wait`, by native code; False if somebody else has a handler for it.

    Raises OSError.
    """

def leave(signum: int) -> None:
    """Ignore the signal from now on, if `listen` had it."""

def wait() -> None:
    """Wait, without the GIL, for the signal or for `wake`, unless there has been one since the last wait."""

def wake() -> None:
    """End a `wait`."""
