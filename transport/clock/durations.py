"""Durations as users write and read them: `500ms`, `2s`, `1.5min`."""

from __future__ import annotations

import re
from typing import Final

from zbmd.transport.errors import UserError

DURATION_S_MAX: Final = 7 * 24 * 3600.0

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s|min|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Seconds in a duration such as `500ms` or `1min`. Raises `UserError`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise UserError(f"{text!r} is not a duration. Write a number and a unit, such as 500ms, 2s or 1min.")
    seconds = float(found[1]) * _SECONDS[found[2]]
    if not 0 < seconds <= DURATION_S_MAX:
        raise UserError(f"a duration of {text} is out of range. Give more than 0 and at most 7 days.")
    return seconds


def format_duration(duration_ns: int) -> str:
    """`duration_ns` with at most four digits, in a unit that `parse_duration` knows: `250ms`, `1.5s`."""
    for unit, unit_ns in (
        ("h", 3600 * 10**9),
        ("min", 60 * 10**9),
        ("s", 10**9),
        ("ms", 10**6),
        ("us", 10**3),
    ):
        if duration_ns >= unit_ns:
            return f"{duration_ns / unit_ns:.4g}{unit}"
    return f"{duration_ns}ns"
