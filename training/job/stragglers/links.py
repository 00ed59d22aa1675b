"""Slow links between hosts, pure: all of them together, or the one between two of many hosts.

A rank with a slow link waits for the others as they wait for it, so no rank works longer than its peers. What
is left is the round trips that the kernel measures, beside the wait of whoever waits least.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from zbmd.training.job.stragglers.scores import (
    PAST_MIN,
    QUIET,
    SHIFT,
    STEPS_MIN,
    THRESHOLD,
    Floats,
    lower_median,
)

RECENT: Final = 1 / STEPS_MIN
KNOWN: Final = 1 / 64
"""The weight of the last step in the means of evidence: of late, and while no rank is suspected."""
FAR: Final = 2.0
"""A round trip that is so many times that of other ranks, and more than this in us, blames the link."""
SHARED_MIN_US: Final = 500.0
"""The least usual round trip that links are compared with: load of the hosts alone lengthens one."""
_MORE: Final = THRESHOLD / STEPS_MIN


class Trips(NamedTuple):
    """Round trips of a judged step, of each rank, us; 0 of a rank without links.

    least, most: of its busy connections, by host. own, peer: the addresses of both ends of the longest one,
    as numbers.
    """

    least: Floats
    most: Floats
    own: Floats
    peer: Floats


class Pair(NamedTuple):
    """Two hosts, by their addresses; the lower number comes first."""

    low: float
    high: float


class SlowLinks:
    """Finds slow links that make no rank slower than its peers. Late answers alone blame nothing: a busy host
    answers late. Nor do waits alone, which have other causes.

    All links are slow if the least round trip of every rank is far above what it was. One is slow if both of
    its ends say so: the longest round trip of each is far above what it was, which a link between two zones
    has always been, and has grown by far more than those of other hosts have meanwhile.
    """

    def __init__(self, ranks: int) -> None:
        self._least: Floats = np.zeros(ranks)
        self._most: Floats = np.zeros(ranks)
        self._wait_ns = 0.0
        self._judged = 0
        self.score = 0.0
        """Of all links together, up to `THRESHOLD`."""
        self.pairs: dict[Pair, float] = {}
        """The score of each link that was blamed of late."""
        self.excess_ns = self.excess_of_pairs_ns = self.usual_us = 0.0
        """Of late: the time of a judged step beyond the usual one; and the usual round trip."""

    def take(self, trips: Trips, slow: set[Pair], wait_ns: float, step_ns: float) -> None:
        """Take a judged step. slow: its `slow_pairs`; wait_ns: of whoever waited least."""
        self._judged += 1
        more_ns = wait_ns - self._wait_ns
        far = self._all_are_far(trips.least)
        self.excess_ns += (more_ns * far - self.excess_ns) * RECENT
        self.excess_of_pairs_ns += (more_ns * bool(slow) - self.excess_of_pairs_ns) * RECENT
        if self._judged > PAST_MIN:
            self.score = _moved(self.score, blamed=more_ns * far > SHIFT * step_ns)
            blamed = slow if more_ns > SHIFT * step_ns else set[Pair]()
            scores = {pair: _moved(score, blamed=pair in blamed) for pair, score in self.pairs.items()}
            scores |= {pair: _MORE for pair in blamed if pair not in scores}
            self.pairs = {pair: score for pair, score in sorted(scores.items()) if score > 0}
        if self.score < QUIET and not any(score >= QUIET for score in self.pairs.values()):
            self._learn(trips, wait_ns)

    def slow_pairs(self, trips: Trips) -> set[Pair]:
        """Return the links that both of their ends find slow in this step, and alone."""
        linked = (trips.most > 0) & (self._most > 0)
        more_us = np.where(linked, trips.most - self._most, 0.0)
        grown = linked & (trips.most >= FAR * np.maximum(self._most, SHARED_MIN_US))
        claimed = {
            Pair(*sorted((float(trips.own[place]), float(trips.peer[place]))))
            for place in np.flatnonzero(grown).tolist()
        }
        found: set[Pair] = set()
        for pair in claimed:
            # An end may have a longer one: then that is slow as well, and its growth is at least this one's.
            ends = [more_us[grown & (trips.own == end)] for end in pair]
            others = more_us[linked & ~np.isin(trips.own, pair)]
            if len(others) and all(map(len, ends)):  # else there are two hosts, or one end says nothing
                least = min(float(end.max()) for end in ends)
                if least >= FAR * max(float(lower_median(others)[0]), 0.0):
                    found.add(pair)
        return found

    def ends_of(self, pair: Pair, trips: Trips) -> tuple[int, int]:
        """Return the place of a rank at either end of a link that is slow in this step."""
        low, high = (np.flatnonzero((trips.own == end) & (trips.most > 0)) for end in pair)
        return int(low[np.argmax(trips.most[low])]), int(high[np.argmax(trips.most[high])])

    def _all_are_far(self, least: Floats) -> float:
        """Return from 0 to 1 how far the least round trips of all ranks are above what they were."""
        linked = (least > 0) & (self._least > 0)
        usual = np.maximum(self._least[linked], SHARED_MIN_US)
        far = float(np.clip((least[linked] / usual - FAR) / FAR, 0.0, 1.0).min(initial=1.0))
        return far if linked.sum() > 1 else 0.0

    def _learn(self, trips: Trips, wait_ns: float) -> None:
        weight = max(KNOWN, 1 / self._judged)
        self._least, self._most = (
            np.where(now > 0, np.where(usual > 0, usual + (now - usual) * weight, now), usual)
            for usual, now in ((self._least, trips.least), (self._most, trips.most))
        )
        self._wait_ns += (wait_ns - self._wait_ns) * weight
        self.usual_us = float(np.median(self._least[self._least > 0])) if self._least.any() else 0.0


def _moved(score: float, *, blamed: bool) -> float:
    return min(max(score + (_MORE if blamed else -_MORE), 0.0), THRESHOLD)
