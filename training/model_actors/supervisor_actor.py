"""The supervisor of a model's actors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbmd.actors.core.signals import Down
from zbmd.actors.supervision.events import BackOff, Strategy
from zbmd.actors.supervision.supervisor import ChildSpec, Supervisor
from zbmd.training.model_actors.slot import Seat, SeatedActor

INTENSITY = 32
PERIOD_S = 10.0
BACK_OFF = BackOff(first_ns=5_000_000, max_ns=2_000_000_000)


class SupervisorActor(Supervisor):
    """Restarts seated actors: at once after a first failure, then after a back-off that its seed decides.

    When the outermost one ends, all seats below it are closed: who waits for a next life learns that there
    will be none.
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        intensity: int = INTENSITY,
        period_s: float = PERIOD_S,
        back_off: BackOff | None = BACK_OFF,
    ) -> None:
        super().__init__(children, strategy, intensity, period_s, back_off)
        self.seats = tuple(seats_of(children))

    async def started(self) -> None:
        """Start all children."""
        cell = self._running_cell()
        if cell.parent is None:
            cell.watch(self._close_seats)
        await super().started()

    def _close_seats(self, down: Down) -> None:
        for seat in self.seats:
            seat.close(str(down.reason))


def seats_of(children: Sequence[ChildSpec]) -> Iterator[Seat[SeatedActor]]:
    """The seats of these children and of those below them."""
    for child in children:
        if issubclass(child.actor, SupervisorActor):
            yield from seats_of(child.args[0])
        elif issubclass(child.actor, SeatedActor):
            yield child.args[0]
