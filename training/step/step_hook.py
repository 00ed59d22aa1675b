"""The hook of a trainer that redundancy implements: it sees each step and takes part in its vote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

VOTE_NUMBERS: Final = 6
"""Length of a vote, which a rank sends together with its share of a step's results; see `StepHook.vote`."""

Vote = NDArray[np.uint64]
"""(VOTE_NUMBERS,)."""


class StepHook(Protocol):
    """Watches steps, to keep a replica of a rank's state. Called on the thread that trains.

    A step calls `all_hold`, `vote`, `voted`, `overwrites`, updates the state, and calls `updated`. If the
    hook `applies_first`, it calls `overwrites`, updates the state beside the one in use, and calls
    `prepared`, `vote`, `updated`, `voted`.
    """

    applies_first: bool
    """Whether the update comes before the vote."""
    is_copied: bool
    """Whether peers read this rank's state once all hold a version."""

    def all_hold(self, version: int) -> None:
        """Note that every rank holds `version` now; no rank changes its state before it has `voted`."""
        ...

    def overwrites(self) -> None:
        """Return once the slot that is not in use may be written: the update does so next."""
        ...

    def prepared(self) -> None:
        """Note that the next version is complete, beside the one in use."""
        ...

    def vote(self) -> Vote:
        """Return numbers for all ranks to see, before the state in use changes. May wait."""
        ...

    def voted(self, votes: Sequence[Vote]) -> None:
        """Take the votes of all ranks, in rank order. An exception ends the step with the state unchanged."""
        ...

    def updated(self, done: Any) -> None:
        """Note that this rank's state is that after the step that reported `done`."""
        ...


class _NoHook(StepHook):
    """The hook of a run without redundancy."""

    applies_first = is_copied = False

    def all_hold(self, version: int) -> None:
        """Do nothing."""

    def overwrites(self) -> None:
        """Do nothing."""

    def prepared(self) -> None:
        """Do nothing."""

    def vote(self) -> Vote:
        """Return zeros."""
        return np.zeros(VOTE_NUMBERS, np.uint64)

    def voted(self, votes: Sequence[Vote]) -> None:
        """Do nothing."""

    def updated(self, done: Any) -> None:
        """Do nothing."""


NO_HOOK: Final = _NoHook()
