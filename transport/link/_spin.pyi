from zbmd.transport.link.spin import SpinChoice

WAIT_WEIGHT_LOG2: int
"""Of the mean of the last waits, the last one counts for one in 2**WAIT_WEIGHT_LOG2."""
WAIT_SPINS_MAX: int
"""A wait counts for at most so many of the longest spins: one pause is soon forgotten."""
CORES_CHECK_NS: int
"""For how long it is believed that a processor is spare, or, once it has been so for long, that none is."""
BUSY_CHECK_NS: int
"""For how long it is believed at first that none is: what ran at that moment may have been done at once, and
to park for 50 ms because of it would make thousands of round trips wait for wake-ups. Doubled each time."""

class SpareCore:
    """What `SpareProcessors` is asked at every spin; it has `_runnable`, the look itself, and the bound."""

    _check_at_ns: int
    _busy_for_ns: int
    _spare: bool
    _processors: int
    def spare(self, now_ns: int) -> bool:
        """Whether at most as many threads run or want to as there are processors, ours included."""

class SpinCore:
    """The choices of one reader; see `zbmd.transport.link.spin.SpinPolicy`."""

    choice: SpinChoice
    """The decision when the reader last ran dry."""
    parks: dict[SpinChoice, int]
    """Number of times that the reader parked, by the choice before it: `SPIN` counts spins in vain."""
    _wait_ns: int
    """The mean of the last waits."""
    def _begin(
        self, spin_ns: int, spare: SpareCore, processors: int, choices: tuple[SpinChoice, ...]
    ) -> None:
        """choices: all, in their order. Raises ValueError if there are others than the decisions know."""
    def _choose(self, now_ns: int) -> SpinChoice: ...
    def begins(self, now_ns: int) -> bool:
        """The reader has run dry after a frame: spin?"""
    def goes_on(self, now_ns: int) -> bool:
        """Nothing has come so far: look again? After a False the spin is over, and was in vain."""
    def came(self, now_ns: int) -> None:
        """A frame has come, while it spun or was parked."""
