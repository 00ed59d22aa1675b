"""Scores of ranks: a sequential test on what each cause costs a rank, in fractions of its typical step.

Two statistics for each cause and rank: the excess over the rank's **own past**, without what all ranks have
in common, and the excess over its **peers**, ranks with equal work. Each runs through a CUSUM (E. S. Page,
"Continuous Inspection Schemes", Biometrika 41, 1954): a sum of log-likelihood ratios for a shift, that starts
again at 0 instead of becoming negative. A sum above `THRESHOLD` is an alarm.

Times of steps have heavy tails, so that every estimate is of order statistics, and one step adds a bounded
amount: no fewer than `STEPS_MIN` slow steps make an alarm, however slow they are. The shift that is looked
for is 10 % of a step, or 1.5 times the noise if that is more: on a noisy machine a rank must be slower to be
named, and the rate of false alarms stays. tests/training/job/stragglers measures both on 10,000 runs.

All functions work on the last two axes (causes, ranks): leading axes are independent runs, for simulation.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SHIFT: Final = 0.095
"""Of a step: log(1.1), the least shift that is looked for."""
NOISE_SHARE: Final = 1.5
"""The shift that is looked for is at least so many times the noise."""
NOISE_MIN: Final = 0.01
THRESHOLD: Final = 16.0
STEPS_MIN: Final = 8
STEP_NS_MIN: Final = 30e6
"""A shorter step counts as this: an event loop that reports, and a page that is missing, cost
milliseconds."""
WINDOW: Final = 128
"""Steps of its past that a rank is compared with."""
PAST_MIN: Final = 16
"""Steps that must be known before anything is judged."""
REFRESH: Final = 8
"""Steps after which the past is evaluated again."""
ACTIVE: Final = 0.02
"""Of a step: one that takes no rank longer is no evidence on a cause: checkpoints and collections are
rare."""
QUIET: Final = THRESHOLD / 3
"""A step enters the past only while no rank's sum is above this."""
PAST, PEERS = 0, 1
"""The two statistics."""
_UPPER: Final = int(0.8413 * WINDOW)
"""Of sorted steps: one standard deviation above the median of a normal distribution."""
CORRELATION_MAX: Final = 0.9


def lower_median(values: Floats) -> Floats:
    """Return the lower median over the last axis, which is kept: of two ranks, the faster one."""
    rank = (values.shape[-1] - 1) // 2
    return np.partition(values, rank, axis=-1)[..., rank : rank + 1]


class Scores:
    """The scores of ranks in one view. shape: (…, causes, ranks). peers: the places of each set of equals."""

    def __init__(self, shape: tuple[int, ...], peers: tuple[tuple[int, ...], ...]) -> None:
        self._peers = [list(each) for each in peers if len(each) > 1]
        self.sums: Floats = np.zeros((2, *shape))
        """(2, …, causes, ranks): the CUSUM of each statistic, up to `THRESHOLD`."""
        self._recent: Floats = np.zeros((2, *shape, STEPS_MIN))
        self._past: Floats = np.zeros((*shape, WINDOW))
        self._count: npt.NDArray[np.int64] = np.zeros((*shape[:-1], 1), np.int64)
        self._median: Floats = np.zeros(shape)
        self._own: Floats = np.ones((*shape[:-2], 1, shape[-1]))
        self._centre: Floats = np.zeros((2, *shape))
        self._noise: Floats = np.full((2, *shape), np.inf)
        self._steps = 0
        self._idle: npt.NDArray[np.int64] = np.zeros((*shape[:-1], 1), np.int64)
        self._gap: npt.NDArray[np.int64] = np.full((*shape[:-1], 1), STEPS_MIN)
        """Steps since a cause cost anyone anything, and the most between two that did while a rank was
        suspected."""

    @property
    def own_ns(self) -> Floats:
        """Return (…, 1, ranks): the time that a rank typically works in a step."""
        return self._own

    @property
    def step_ns(self) -> Floats:
        """Return (…, 1, ranks): what an excess of 1 is: `own_ns`, or `STEP_NS_MIN` if that is more."""
        return np.maximum(self._own, STEP_NS_MIN)

    @property
    def excess(self) -> Floats:
        """Return (2, …, causes, ranks): the median excess of the last `STEPS_MIN` steps, of a step."""
        found: Floats = np.median(self._recent, axis=-1)
        return found

    def take(self, ns: Floats, unrest_ns: Floats | float = 0.0) -> Floats:
        """Take what each cause took each rank in a step, (…, causes, ranks); return `sums`.

        unrest_ns: by so much ranks differ by chance, at least, since other processes take time from all;
        (causes, 1), or the same for all.
        """
        known = self._count >= PAST_MIN
        active = ns.max(axis=-1, keepdims=True) > ACTIVE * self.step_ns.min(axis=-1, keepdims=True)
        if known.any():
            excess = self._excess(ns)
            self._forget(active)
            self._add(excess - self._centre, active & known, unrest_ns)
        quiet = self.sums.max(axis=0).max(axis=-1, keepdims=True) < QUIET
        self._remember(ns, (active & quiet) | ~known)
        self._steps += 1
        if self._steps % REFRESH == 0:
            self._refresh()
        return self.sums

    def _excess(self, ns: Floats) -> Floats:
        """Return both statistics of a step, (2, …, causes, ranks), before they are centred."""
        found = np.zeros((2, *ns.shape))
        past = (ns - self._median) / self.step_ns
        found[PAST] = past - lower_median(past)
        for each in self._peers:
            of_peers, usual = ns[..., each], lower_median(self.step_ns[..., each])
            found[PEERS][..., each] = (of_peers - lower_median(of_peers)) / usual
        return found

    def _add(self, excess: Floats, active: Bools, unrest_ns: Floats | float) -> None:
        noise = np.maximum(self._noise, unrest_ns / self.step_ns)
        shift = np.maximum(SHIFT, NOISE_SHARE * noise)
        most = THRESHOLD / STEPS_MIN
        with np.errstate(invalid="ignore"):
            gain = np.clip(shift / noise**2 * (excess - shift / 2), -most, most)
        gain = np.where(active & np.isfinite(noise), gain, 0.0)
        self.sums = np.clip(self.sums + gain, 0.0, THRESHOLD)
        moved = np.concatenate([self._recent[..., 1:], excess[..., np.newaxis]], axis=-1)
        self._recent = np.where(active[..., np.newaxis], moved, self._recent)

    def _forget(self, active: Bools) -> None:
        """Let a cause go that costs nobody anything any more, after twice the time that was between two
        costs."""
        suspected = self.sums.max(axis=0).max(axis=-1, keepdims=True) > 0
        longest = np.where(active, np.maximum(self._gap, self._idle), self._gap)
        self._gap = np.where(suspected, longest, STEPS_MIN)
        self._idle = np.where(active, 0, self._idle + 1)
        loss = np.where(self._idle > 2 * self._gap, THRESHOLD / STEPS_MIN, 0.0)
        self.sums = np.maximum(0.0, self.sums - loss)

    def _remember(self, ns: Floats, wanted: Bools) -> None:
        place = np.broadcast_to(self._count % WINDOW, ns.shape)[..., np.newaxis]
        old = np.take_along_axis(self._past, place, axis=-1)
        np.put_along_axis(
            self._past, place, np.where(wanted[..., np.newaxis], ns[..., np.newaxis], old), axis=-1
        )
        self._count += wanted

    def _refresh(self) -> None:
        """Evaluate the past: medians, typical steps, and centre and noise of both statistics."""
        valid = np.clip(self._count, 1, WINDOW)[..., np.newaxis]
        places = np.broadcast_to(np.arange(WINDOW) % valid, self._past.shape)
        past = np.take_along_axis(self._past, places, axis=-1)
        self._median = np.median(past, axis=-1)
        self._own = np.maximum(1.0, self._median.sum(axis=-2, keepdims=True))
        every = np.moveaxis(self._excess(np.moveaxis(past, -1, 0)), 1, -1)  # a step is a run of its own
        centre = np.median(every, axis=-1)
        spread = np.partition(every, _UPPER, axis=-1)[..., _UPPER] - centre
        doubt = 1.0 + PAST_MIN / valid[..., 0]  # of an estimate from few steps
        self._noise = np.maximum(NOISE_MIN, spread * doubt * _persistence(every > centre[..., np.newaxis]))
        self._noise[:, self._count[..., 0] < PAST_MIN] = np.inf
        self._centre[PAST] = centre[PAST]


def _persistence(above: Bools) -> Floats:
    """Return by how much noise that lasts over steps spreads a sum of them, beside independent noise.

    above: (…, steps), whether a step was above the median. The correlation of neighbours follows from how
    often both are on one side (the arcsine law of normal values), whatever their tails.
    """
    together = (above[..., 1:] == above[..., :-1]).mean(axis=-1)
    correlation = np.clip(np.sin(np.pi * (together - 0.5)), 0.0, CORRELATION_MAX)
    found: Floats = np.sqrt((1 + correlation) / (1 - correlation))
    return found
