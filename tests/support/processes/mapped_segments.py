"""The segments of ranks that this process maps or has a descriptor of."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def segment_inodes(pid: int | None = None) -> dict[str, set[str]]:
    """Return the segments of each slot that a process, by default this one, maps."""
    inodes: dict[str, set[str]] = {}
    for line in Path(f"/proc/{pid or 'self'}/maps").read_text().splitlines():
        fields = line.split(None, 5)
        if len(fields) > 5 and "zbmd-segment" in fields[5]:
            inodes.setdefault(fields[5].removesuffix(" (deleted)").rpartition("-")[2], set()).add(fields[4])
    return inodes


def mapped_segments(pid: int | None = None) -> dict[str, int]:
    """Return how many segments of each slot a process, by default this one, maps."""
    return {slot: len(found) for slot, found in segment_inodes(pid).items()}


def segment_descriptors() -> int:
    """Return how many descriptors of segments this process has."""
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found += "zbmd-segment" in os.readlink(f"/proc/self/fd/{entry}")
    return found
