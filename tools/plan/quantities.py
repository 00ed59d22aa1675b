"""Quantities as users write them in a plan: `400GB/s`, `70B`, `20%`, `50000h`. Errors name the option."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final, TypeVar

from zbmd.actors.rank.environment import parse_size
from zbmd.transport.clock.deadlines import DAY_S, format_duration, parse_duration
from zbmd.transport.errors import UserError

DURATION_S_MAX: Final = 365_000 * DAY_S
"""An MTBF of one accelerator may be long: a thousand years."""
_COUNT: Final = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\d{1,2})?)\s*([kKMBGT]?)")
_COUNTS: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_SIZES: Final = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
ValueT = TypeVar("ValueT")


def given(option: str, parse: Callable[[str], ValueT], text: str) -> ValueT:
    """Return `parse(text)`. Raises `UserError` that names the option."""
    try:
        return parse(text)
    except UserError as error:
        raise UserError(f"{option}: {error}") from None


def duration(text: str) -> float:
    """Return the seconds of a duration such as `4min` or `50000h`. Raises `UserError`."""
    return parse_duration(text, most_s=DURATION_S_MAX)


def size(text: str) -> float:
    """Return the bytes of a size above 0. Raises `UserError`."""
    nbytes = parse_size(text)
    if nbytes < 1:
        raise UserError(f"expected a size above 0, such as 2TiB, got {text!r}")
    return float(nbytes)


def bandwidth(text: str) -> float:
    """Return bytes per second of `400GB/s`, `1.5GiB/s` or `400Gbit/s`. Raises `UserError`."""
    amount, slash, second = text.strip().rpartition("/")
    if slash and second == "s":
        bits = amount.lower().endswith("bit") and not amount.lower().endswith("ibit")
        try:
            return size(f"{amount[:-3]}B") / 8.0 if bits else size(amount)
        except UserError:
            pass  # the error below says what a bandwidth is
    raise UserError(f"expected a bandwidth such as 400GB/s or 400Gbit/s, got {text!r}")


def count(text: str) -> float:
    """Return a number such as `70B`, `1.5T` or `7e9`, at least 1. Raises `UserError`."""
    found = _COUNT.fullmatch(text.strip())
    number = float(found[1]) * _COUNTS[found[2]] if found else 0.0
    if not 1.0 <= number < math.inf:
        raise UserError(f"expected a number of at least 1 such as 70B or 7e9, got {text!r}")
    return number


def fraction(text: str) -> float:
    """Return `20%` or `0.2` as 0.2: above 0, at most 1. Raises `UserError`."""
    bare, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        number = float(bare) / (100.0 if percent else 1.0)
    except ValueError:
        number = math.nan
    if not 0.0 < number <= 1.0:
        raise UserError(f"expected a fraction above 0 and at most 1, such as 20% or 0.2, got {text!r}")
    return number


def shown_s(seconds: float) -> str:
    """Return a duration as `4min` or `5.12s`, in minutes below two hours."""
    if not math.isfinite(seconds):
        return "for ever"
    return f"{seconds / 60:.4g}min" if 3600.0 <= seconds < 7200.0 else format_duration(round(seconds * 1e9))


def shown_bytes(nbytes: float) -> str:
    """Return a size in decimal units, as storage and data sheets count: `2.2 TB`."""
    for unit, one in _SIZES:
        if nbytes >= one:
            return f"{nbytes / one:.4g} {unit}"
    return f"{nbytes:.4g} B"


def shown_share(part: float) -> str:
    """Return a fraction as per cent; a large one as a multiple."""
    if not math.isfinite(part):
        return "without end"
    return f"{part:.1%}" if part < 10.0 else f"{part:,.0f} x"
