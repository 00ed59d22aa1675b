"""Operators as actors: a kernel on a seat, called by the units of a model, forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zbmd.training.gpt import Operator
from zbmd.training.ml_actors.seat import Seat, SeatedActor


class OperatorActor(SeatedActor):
    """Runs `kernel(tape, …)`, an op as those of `zbmd.training.ops`.

    install: puts it where units find it, for as long as this one lives.
    """

    def __init__(self, seat: Seat[Any], kernel: Operator, install: Callable[[Operator], None]) -> None:
        super().__init__(seat)
        self.kernel = kernel
        self._install = install

    async def ready(self) -> None:
        """Be called by units from now on."""
        self._install(self.kernel)
