"""Prints the variables that torchrun sets too."""

from __future__ import annotations

import os

VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
print(*(os.environ[name] for name in VARIABLES), flush=True)
