"""Who goes along with a training step: what a trainer tells, and asks, so that a state outlives its rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

VOTE_NUMBERS: Final = 4
"""What a rank says beside its part of a step's results, so many u64; see `StepWatch.vote`."""

Vote = NDArray[np.uint64]
"""(VOTE_NUMBERS,)."""


class StepWatch(Protocol):
    """Who goes along with a step: the mirror of another rank's state. Called on the thread that trains."""

    def all_hold(self, version: int) -> None:
        """Every rank holds `version` now, and none changes its state before it has `voted`."""
        ...

    def vote(self) -> Vote:
        """Something for all ranks to see, before any state changes. May wait."""
        ...

    def voted(self, votes: Sequence[Vote]) -> None:
        """All ranks' votes, in their order; what it raises, ends the step with nothing changed."""
        ...

    def updated(self, done: Any) -> None:
        """This rank's state is that behind the step that reported `done`."""
        ...


class _Alone(StepWatch):
    """Nobody goes along."""

    def all_hold(self, version: int) -> None:
        """Nothing to do."""

    def vote(self) -> Vote:
        """Nothing to say."""
        return np.zeros(VOTE_NUMBERS, np.uint64)

    def voted(self, votes: Sequence[Vote]) -> None:
        """Nothing to do."""

    def updated(self, done: Any) -> None:
        """Nothing to do."""


ALONE: Final = _Alone()
