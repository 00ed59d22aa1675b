"""One thread a rank in the libraries that would start a pool of them."""

from __future__ import annotations

import os
from typing import Final

ONE_THREAD_DEFAULTS: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""Ranks share the cores: a pool of BLAS threads in each would fight over them, and one made before the fork
makes the fork unsafe. What the user has set stays."""


def default_to_one_thread() -> None:
    """Set them for this process. Before numpy is imported, or it has no effect."""
    for name, value in ONE_THREAD_DEFAULTS.items():
        os.environ.setdefault(name, value)
