"""The reductions that a dtype has, by what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from zbmd.collectives.programs.reductions import REDUCTIONS, reduction_code
from zbmd.transport.errors import UserError


def reductions_of(dtype: np.dtype[Any]) -> list[str]:
    found: list[str] = []
    for op in REDUCTIONS:
        try:
            reduction_code(op, dtype)
        except UserError:
            continue
        found.append(op)
    return found
