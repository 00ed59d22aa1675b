"""The machine that `sim` times: all that it costs is the simulator's."""

from __future__ import annotations

from zbmd.transport.sim import Send


class RingMachine:
    """Answers each number with the next one, to the next of the ring."""

    def __init__(self, after: str) -> None:
        self._after = after
        self.handled = 0

    def handle(self, event: int, *, now_ns: int) -> list[Send[int]]:
        """Pass it on."""
        self.handled += 1
        return [Send(to=self._after, message=event + 1)]

    def check_invariants(self) -> None:
        """It counts up."""
        assert self.handled >= 0
