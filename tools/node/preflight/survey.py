"""The machine of a survey: two rounds of pairs, so that a bad host is named and not a bad pair.

In the first round each host is measured with one other. A host of a fast pair is good. In the second round
each host of a slow pair, and one that was left over, is measured with a good host: what is slow again is that
host; if neither is, the path between the two was. The idea is that of the two rounds in NVIDIA's
nvidia-resiliency-ext and ByteDance's MegaScale.

Pairs are compared with each other, since no speed is right for all networks. A job of two hosts has one pair,
and there only a bound for all networks counts; which of the two is at fault, nothing says.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

ROUND_NS: Final = 8_000_000_000
"""Of the pairs of a round that have not answered then, one host does not."""
SLOW_LINK, SLOW_HOST = 0.3, 0.5
"""Shares of the usual speed, below which a pair or a host is slow."""
TRIP_FACTOR: Final = 8.0
TRIP_MORE_NS: Final = 5_000_000
"""A round trip is slow if it takes so many times the usual one, and so much longer."""
BYTES_PER_S_MIN: Final = 2e6

Pair: TypeAlias = tuple[int, int]
"""Places of two hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Of a pair: the slower direction, and a round trip: three of four take longer."""

    bytes_per_s: float
    trip_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpeed:
    """Of a host by itself: FLOPs a second of its usual processor, and bytes a second of its memory."""

    flops_per_s: float
    memory_per_s: float


# ---- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """These hosts are to be surveyed, by name; places are in this order, those known to be good first.

    speeds: of hosts by themselves, by place; until_ns: what has not answered then does not count as good.
    """

    hosts: tuple[str, ...]
    speeds: Mapping[int, HostSpeed]
    until_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMeasured:
    """A pair has answered. found: its speed, or why it could not be measured."""

    pair: Pair
    found: LinkSpeed | str


Event: TypeAlias = Began | PairMeasured | TimerFired


# ---- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurePairs:
    """Measure these pairs at once; no host is in two of them."""

    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadHost:
    """A host that is not to take part, and why."""

    place: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """The end. notes: what else there is to say; usable: whether any pair of hosts has a good link."""

    bad: tuple[BadHost, ...]
    notes: tuple[str, ...]
    usable: bool = True


Action: TypeAlias = MeasurePairs | SetTimer | Surveyed


class LinkSurvey:
    """See the module. One survey; at most `hosts` + 2 measurements of pairs."""

    def __init__(self) -> None:
        self._hosts: tuple[str, ...] = ()
        self._found: dict[Pair, LinkSpeed | str] = {}
        self._speeds: Mapping[int, HostSpeed] = {}
        self._until_ns = 0
        self._due: list[list[Pair]] = []
        """Measurements to come, of one after the other."""
        self._waits: set[Pair] = set()
        self._first: tuple[Pair, ...] = ()
        self._suspects: dict[int, Pair] = {}
        """Hosts of the second round, and the pair of each there."""
        self._timer_ns: int | None = None
        self.is_over = False

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take an event. Raises `LocalProtocolError` for one that cannot come now."""
        match event:
            case Began(hosts=hosts, speeds=speeds, until_ns=until_ns):
                if self._hosts or len(hosts) < 2:
                    raise LocalProtocolError(
                        f"a survey of {len(hosts)} hosts after one of {len(self._hosts)}"
                    )
                self._hosts, self._speeds, self._until_ns = hosts, speeds, until_ns
                self._first = tuple((place, place + 1) for place in range(0, len(hosts) - 1, 2))
                self._due = [list(self._first)]
            case PairMeasured():
                if event.pair not in self._waits:
                    return []  # too late
                self._waits.discard(event.pair)
                self._found[event.pair] = event.found
            case TimerFired():
                if self._timer_ns is None or now_ns < self._timer_ns:
                    return []
                for pair in self._waits:
                    self._found[pair] = f"no answer in {ROUND_NS // 1_000_000_000} s"
                self._waits.clear()
                if now_ns >= self._until_ns:
                    self._give_up()
        return self._go_on(now_ns)

    def _give_up(self) -> None:
        """Measure no further: time is up."""
        while not self._suspects:
            self._plan_second()
            late = [pair for pairs in self._due for pair in pairs]
            self._found |= {
                pair: "there was no time to measure it" for pair in late if pair not in self._found
            }
            self._due.clear()
            if not late:
                return
        for pair in self._suspects.values():
            self._found.setdefault(pair, "there was no time to measure it")
        self._due.clear()

    def _go_on(self, now_ns: int) -> list[Action]:
        if self._waits or self.is_over:
            return []
        if not self._due and not self._suspects:
            self._plan_second()
        if self._due:
            pairs = tuple(self._due.pop(0))
            self._waits = set(pairs)
            self._timer_ns = min(now_ns + ROUND_NS, self._until_ns)
            return [MeasurePairs(pairs=pairs), SetTimer(at_ns=self._timer_ns)]
        self.is_over, self._timer_ns = True, None
        return [self._verdict()]

    def _plan_second(self) -> None:
        """Each host that is in no fast pair is measured with one that is; a good host with one at a time."""
        slow = self._slow(self._first)
        good = [place for pair in self._first if pair not in slow for place in pair]
        others = [place for place in range(len(self._hosts)) if place not in good]
        if not good:
            if len(self._hosts) == 3 and len(self._first) == 1:  # the third one may be good with one of them
                self._first = (*self._first, (0, 2), (1, 2))
                self._due = [[(0, 2)], [(1, 2)]]
            return
        for number, place in enumerate(others):
            helper = good[number % len(good)]
            self._suspects[place] = min(place, helper), max(place, helper)
            if number % len(good) == 0:
                self._due.append([])
            self._due[-1].append(self._suspects[place])

    def _slow(self, pairs: Sequence[Pair], beside: Sequence[Pair] = ()) -> dict[Pair, str]:
        """Return which of `pairs` are slow, and why, beside the usual speed of `beside`, or of themselves."""
        known = [one for pair in beside or pairs if isinstance(one := self._found[pair], LinkSpeed)]
        usual = statistics.median_high([one.bytes_per_s for one in known]) if known else 0.0
        trip_ns = statistics.median_low([one.trip_ns for one in known]) if known else 0
        slow: dict[Pair, str] = {}
        for pair in pairs:
            found = self._found[pair]
            if isinstance(found, str):
                slow[pair] = found
            elif found.bytes_per_s < BYTES_PER_S_MIN or found.bytes_per_s < SLOW_LINK * usual:
                slow[pair] = f"{found.bytes_per_s / 1e6:,.1f} MB/s, where others have {usual / 1e6:,.1f}"
            elif found.trip_ns > TRIP_FACTOR * trip_ns and found.trip_ns > trip_ns + TRIP_MORE_NS:
                others = f"where others take {trip_ns / 1e6:.1f}"
                slow[pair] = f"a round trip takes {found.trip_ns / 1e6:.1f} ms, {others}"
        return slow

    def _verdict(self) -> Surveyed:
        bad: dict[int, str] = {}
        notes: list[str] = []
        first = self._slow(self._first)
        fast = [pair for pair in self._first if pair not in first]
        second = self._slow(list(self._suspects.values()), fast) if fast else {}
        for place, pair in self._suspects.items():
            if pair in second:
                (helper,) = set(pair) - {place}
                bad[place] = f"its link to {self._hosts[helper]} is bad: {second[pair]}"
        for (one, other), why in first.items():
            if not fast or not {one, other} & bad.keys():
                who = f"{self._hosts[one]} and {self._hosts[other]}"
                rest = "which of them is at fault is not known" if not fast else "with others both are fast"
                notes.append(f"the link between {who} is bad: {why}; {rest}")
        for place, why in self._slow_hosts().items():
            bad.setdefault(place, why)
        named = tuple(BadHost(place=place, reason=bad[place]) for place in sorted(bad))
        return Surveyed(bad=named, notes=tuple(notes), usable=bool(fast))

    def _slow_hosts(self) -> dict[int, str]:
        """Return the hosts that are slower than most; of two, none can be."""
        if len(self._speeds) < 3:
            return {}
        usual_flops = statistics.median([one.flops_per_s for one in self._speeds.values()])
        usual_memory = statistics.median([one.memory_per_s for one in self._speeds.values()])
        found: dict[int, str] = {}
        for place, one in self._speeds.items():
            if one.flops_per_s < SLOW_HOST * usual_flops:
                has = f"{one.flops_per_s / 1e9:,.1f} GFLOP/s"
                found[place] = (
                    f"its processors have {has}, where those of others have {usual_flops / 1e9:,.1f}"
                )
            elif one.memory_per_s < SLOW_HOST * usual_memory:
                has = f"{one.memory_per_s / 1e6:,.0f} MB/s"
                found[place] = f"its memory has {has}, where that of others has {usual_memory / 1e6:,.0f}"
        return found
