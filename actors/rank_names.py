"""What the process of a rank is called."""

from __future__ import annotations

import re

_RANK_NAME = re.compile(r"rank(\d{1,3})", re.ASCII)


def child_id(rank: int) -> str:
    """The supervision machine's id, and the process name, of a rank."""
    return f"rank{rank}"


def rank_of(name: str) -> int | None:
    """The rank whose process is called `name`; None if it is no rank's."""
    found = _RANK_NAME.fullmatch(name)
    return int(found[1]) if found is not None else None
