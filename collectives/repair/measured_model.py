"""What members of an elastic group have measured of its link, and by what they choose in an epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.cost_model import Model, is_far
from zbmd.collectives.communicator.tuning import agree_on_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The model of a group. `far`: whether it had members on several hosts."""

    model: Model
    far: bool

    def fits(self, hosts: tuple[int, ...]) -> bool:
        """Whether it holds for members on these hosts, too."""
        return self.far == is_far(hosts)


def pinned(c: Communicator, told: Iterable[Measured | None], deadline_ns: int) -> Measured | None:
    """What all members go by in the epoch of `c`: all must call this before any operation.

    told: what each brings along from earlier epochs, in their order, the same on all: the first that was
    measured in a group like this counts, for a link does not change with who is there, and a repair is not
    the time to measure. If nobody knows of one, all measure now, some 10 ms. Raises as `Communicator.tune`.
    """
    found = next((one for one in told if one is not None and one.fits(c.hosts)), None)
    if found is None and c.size > 1:
        found = Measured(model=agree_on_model(c, deadline_ns), far=is_far(c.hosts))
    if found is not None:
        c.model = found.model
    return found
