"""`with run.step()`: the body of one step of a resilient loop."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Protocol

from zbmd.collectives.torch.continuity import CONTINUITY, Standing
from zbmd.training.torch.transfer import Position
from zbmd.transport.errors import UserError


class StepAborted(BaseException):
    """Ends the body of a step that is to be repeated; `with run.step()` takes it."""


class Transacting(Protocol):
    """A run, as its steps see it."""

    def begin(self, then: Position | None = None) -> None:
        """A transaction begins: of a step, unless `then` is the position after it."""
        ...

    def end(self, error: BaseException | None) -> bool:
        """Its body has ended; return whether its error is dealt with."""
        ...


class Step:
    """`with run.step():` the body is one step, which is repeated if a rank is lost before its commit.

    then: of a transaction that is no step, the position after it.
    """

    def __init__(self, run: Transacting, then: Position | None = None) -> None:
        self._run, self._then = run, then

    def __enter__(self) -> None:
        self._run.begin(self._then)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._run.end(error)


def judge_outside(*, is_sharded: bool) -> None:
    """Warn of an optimizer that updates outside of steps. Raises `UserError` for a sharded state."""
    if is_sharded:
        raise UserError("optimizer.step() outside of run.step(): its update would miss the copy of the shard")
    if CONTINUITY.standing is Standing.IN_LOOP:
        warnings.warn(
            "optimizer.step() outside of run.step(): its update is lost on a rank that is replaced",
            RuntimeWarning,
            stacklevel=4,
        )


def warn_of_missing_votes(step: int) -> None:
    """Warn that the last step was committed by others, whose votes did not come here."""
    warnings.warn(
        f"step {step} is the last one, and the ranks that have all votes for it have finished: "
        "run.metrics has the means of the step before, and the ledger ends with that",
        RuntimeWarning,
        stacklevel=4,
    )
