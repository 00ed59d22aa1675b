"""`with run.step()`: the body of one step of a resilient loop."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol


class StepAborted(BaseException):
    """Ends the body of a step that is to be repeated; `with run.step()` takes it."""


class Transacting(Protocol):
    """A run, as its steps see it."""

    def begin(self) -> None:
        """A transaction begins."""
        ...

    def end(self, error: BaseException | None) -> bool:
        """Its body has ended; return whether its error is dealt with."""
        ...


class Step:
    """`with run.step():` the body is one step, which is repeated if a rank is lost before its commit."""

    def __init__(self, run: Transacting) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._run.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._run.end(error)
