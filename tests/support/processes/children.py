"""The children of a process, as the kernel lists them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def children_of(pid: int | None = None) -> list[int]:
    """Return the children that the threads of a process have, ours by default; none of one that has ended."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid or os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has ended
            found += map(int, listed.read_text().split())
    return found
