"""Operators that fail on request, forwards or backwards, before or in the middle of their work."""

from __future__ import annotations

from dataclasses import fields
from random import Random

from zbmd.tools.chaos.soak_operators import FlakyTape
from zbmd.training.autograd.tape import Tape, Tensor
from zbmd.training.model.gpt import Operator, Operators


class Broken(RuntimeError):
    """The error of a flaky operator."""


class Flaky:
    """Fails each op with probability `share`, seeded, at most `failures_max` times; then never again.

    only: what fails, such as "linear, backwards"; empty: anything.
    """

    def __init__(self, seed: int, *, share: float, failures_max: int, only: str = "") -> None:
        self._random = Random(seed)
        self._share = share
        self._left = failures_max
        self._only = only
        self.failed: list[str] = []

    def around(self, operators: Operators) -> Operators:
        """The same operators, which fail."""
        return Operators(
            **{f.name: self._wrapped(f.name, getattr(operators, f.name)) for f in fields(Operators)}
        )

    def fail(self, what: str) -> None:
        """Raise `Broken`, or not."""
        if self._left and self._only in ("", what) and self._random.random() < self._share:
            self._left -= 1
            self.failed.append(what)
            raise Broken(what)

    def _wrapped(self, name: str, kernel: Operator) -> Operator:
        def run(tape: Tape, *args: object, **options: object) -> Tensor:
            self.fail(f"{name}, before")
            made = kernel(FlakyTape(tape, lambda when: self.fail(f"{name}, {when}")), *args, **options)
            self.fail(f"{name}, recorded")
            return made

        return run
