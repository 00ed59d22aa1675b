"""Offsets between the clocks of processes, estimated from delays that were seen between them.

As in NTP (RFC 5905, section 8), the smallest delay of either direction bounds the offset of two clocks: half
their difference, wrong by at most half their sum. What no delays connect directly is found by way of others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """The offset of a clock against another: `offset_ns`, give or take `error_ns`.

    seen: how many delays say so, 0 if the two are one clock.
    """

    offset_ns: int
    error_ns: int
    seen: int


@dataclass(slots=True)
class Delay:
    """The smallest delay that was seen in one direction, by the clocks of its two ends, and how many were."""

    smallest_ns: int
    seen: int = 1

    def take(self, delay_ns: int) -> None:
        """Another one was seen."""
        self.smallest_ns = min(self.smallest_ns, delay_ns)
        self.seen += 1


def offset_between(there: Delay | None, back: Delay | None) -> Offset | None:
    """Return the offset of the clock that `there` leads to; None without both: one delay may be an offset."""
    if there is None or back is None:
        return None
    return Offset(
        offset_ns=(there.smallest_ns - back.smallest_ns) // 2,
        error_ns=abs(there.smallest_ns + back.smallest_ns) // 2,
        seen=there.seen + back.seen,
    )


def offsets_from_first(
    count: int, between: Callable[[int, int], Offset | None]
) -> dict[int, tuple[Offset, int | None]]:
    """Return the offset of each of `count` clocks from the first, and the clock by which it was found.

    `between(a, b)`: how far clock b is ahead of clock a, None if that is not known. Clocks that no chain of
    them connects with the first are left out.
    """
    if count == 0:
        return {}
    found: dict[int, tuple[Offset, int | None]] = {0: (Offset(offset_ns=0, error_ns=0, seen=0), None)}
    # Prim's algorithm: the next clock is the one known best, counting the errors on the way to it.
    while True:
        reachable: list[tuple[int, int, Offset, int]] = []
        for known, (so_far, _) in found.items():
            for other in range(count):
                link = None if other in found else between(known, other)
                if link is not None:
                    offset_ns, error_ns = so_far.offset_ns + link.offset_ns, so_far.error_ns + link.error_ns
                    step = Offset(offset_ns=offset_ns, error_ns=error_ns, seen=link.seen)
                    reachable.append((error_ns, other, step, known))
        if not reachable:
            return found
        _, other, best, via = min(reachable, key=lambda candidate: candidate[:2])
        found[other] = best, via
