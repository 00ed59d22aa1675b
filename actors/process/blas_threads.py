"""One BLAS thread for each rank, by the variables that the common libraries read."""

from __future__ import annotations

import os
from typing import Final

ONE_THREAD_DEFAULTS: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""Ranks share the cores, so a pool of BLAS threads in each would oversubscribe them, and a pool that is
started before a fork makes the fork unsafe. Variables that the user has set take precedence."""


def default_to_one_thread() -> None:
    """Set `ONE_THREAD_DEFAULTS` in this process. Has no effect once numpy is imported."""
    for name, value in ONE_THREAD_DEFAULTS.items():
        os.environ.setdefault(name, value)
