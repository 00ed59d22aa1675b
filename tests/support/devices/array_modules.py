"""An array module that is not numpy itself: with it ops go the general way, and not by numpy's kernels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np


class Witness(ModuleType):
    """numpy, except that it keeps the names asked of it and refuses what only numpy takes."""

    def __init__(self) -> None:
        super().__init__("witness")
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        if name == "einsum":
            return lambda subscripts, *operands: np.einsum(subscripts, *operands)
        return getattr(np, name)
