"""The number of points of a program at which a rank can be killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zbmd.collectives.execution.plan import Plan, plan_of


def points_of(run_ranks: Callable[..., list[Any]], operation: Callable[[Any], object], n: int) -> list[int]:
    """Of each rank, from an undisturbed run; operation: what a process does, a program at its end."""

    def body(p: Any) -> int:
        plans: list[Plan] = []

        def remember(*asked: Any) -> Plan:
            plans.append(plan_of(*asked))
            return plans[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("zbmd.collectives.communicator.planning.plan_of", remember)
            operation(p)
        return plans[-1].kill_points

    return run_ranks(n, body)
