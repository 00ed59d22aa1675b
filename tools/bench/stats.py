"""Sans-I/O: the arithmetic of benchmarks. Sizes, order of turns, percentiles, ratios with an interval."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from zbmd.transport.errors import UserError

OURS = "zbmd"
ALONE = "alone"
"""A contender that is no peer: the work of steps without communication."""
SIZE_MAX = 1 << 30
SIZES_MAX = 64
"""More sizes than this in one run are a slip of the keyboard."""
ROUNDS_MAX = 1000
ITERATIONS_MAX = 1_000_000
RESAMPLES = 2000
CONFIDENCE = 0.95
MOVED_BYTES_A_TURN = 256 << 20
ITERATIONS_SMALL = 10_000
ITERATIONS_LEAST = 8

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)


class Ratio(Struct, frozen=True, kw_only=True):
    """One median over another, and the interval that holds it with 95 % certainty.

    The interval is a percentile bootstrap over rounds (Efron 1979): it covers the noise of these rounds,
    nothing of another machine or day.
    """

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """`1.23 (1.20 … 1.27)`; spec: of each number."""
        value, low, high = (format(number, spec or ".2f") for number in (self.value, self.low, self.high))
        return f"{value} ({low} … {high})"


def parse_size(text: str, *, least: int = 1) -> int:
    """Bytes in `8`, `64K`, `16M` or `1GiB`; units are powers of 1024. Raises `UserError`."""
    found = _SIZE.fullmatch(text.strip())
    nbytes = -1 if found is None or len(text) > 20 else int(found[1]) * _UNITS[found[2].lower()]
    if not least <= nbytes <= SIZE_MAX:
        raise UserError(
            f"{text!r} is not a size from {least} to 1G. Write bytes, or a number with K, M or G: 8, 64K."
        )
    return nbytes


def parse_sizes(text: str, *, least: int = 1) -> tuple[int, ...]:
    """Sizes in `8:16M` (doubling), `8:16M:8` (times 8) or `8,1K,1M`, ascending. Raises `UserError`.

    A list may hold any size from `least`; a range begins at 1 or more.
    """
    if ":" not in text:
        return tuple(sorted({parse_size(part, least=least) for part in text.split(",")}))
    first, last, *rest = text.split(":")
    factor = rest[0].strip() if rest else "2"
    if len(rest) > 1 or not factor.isdecimal() or int(factor) < 2:
        raise UserError(
            f"{text!r} is no range of sizes. Write FIRST:LAST or FIRST:LAST:FACTOR, such as 8:16M:8."
        )
    begin, end = parse_size(first), parse_size(last)
    if begin > end:
        raise UserError(f"{text!r} has its larger size first. Write it the other way round: {last}:{first}.")
    sizes = [begin]
    while sizes[-1] * int(factor) <= end:
        sizes.append(sizes[-1] * int(factor))
    if len(sizes) > SIZES_MAX:
        raise UserError(f"{text!r} is {len(sizes)} sizes, at most {SIZES_MAX} are run.")
    return tuple(sizes)


def size_in_words(nbytes: int) -> str:
    """`8`, `64K`, `16M`: the inverse of `parse_size` for powers of 1024, else plain bytes."""
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return str(nbytes)


def iterations_for(nbytes: int) -> int:
    """Return the iterations of a turn: many for small sizes, about 256 MiB in all for large ones."""
    return max(ITERATIONS_LEAST, min(ITERATIONS_SMALL, MOVED_BYTES_A_TURN // nbytes))


def turns(peers: Sequence[str], rounds: int) -> list[tuple[str, ...]]:
    """Return the order of measurement for each round: ours first and last, the peers between, rotated.

    Being first and last makes a drift of the machine cancel in the mean of our two turns, and those two are
    the noise floor: A against A. The rotation gives every peer every place.
    """
    order: list[tuple[str, ...]] = []
    for number in range(rounds):
        start = number % len(peers) if peers else 0
        order.append((OURS, *peers[start:], *peers[:start], OURS))
    return order


def percentile(samples: Sequence[float], part: float) -> float:
    """The smallest sample that at least `part` (0 to 1) of all are not above. `samples` must not be empty."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def median(samples: Sequence[float]) -> float:
    """The median; the mean of the two middle ones of an even number. `samples` must not be empty."""
    return float(np.median(np.asarray(samples)))


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Ratio:
    """The median over rounds of `ours[r] / theirs[r]`, both medians of round r.

    Pairs of one round share what the machine did then, so the noise they share cancels. Both must be
    positive and of one length, at least 1; with one round the interval is that value.
    """
    pairs = np.asarray(ours, np.float64) / np.asarray(theirs, np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(pairs), size=(RESAMPLES, len(pairs)))
    medians: NDArray[np.float64] = np.median(pairs[drawn], axis=1)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(medians, [tail, 100 - tail])
    return Ratio(value=float(np.median(pairs)), low=float(low), high=float(high))


def bandwidth_gbytes_per_s(nbytes: int, time_us: float) -> float:
    """`algbw` of nccl-tests: 10⁹ bytes a second."""
    return nbytes / (time_us * 1e3)
