"""The sequential test in simulation: how often it names a rank that is not slow, and how soon one that is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from zbmd.training.job.stragglers.scores import PAST_MIN, STEPS_MIN, THRESHOLD, Floats, Scores

STEP_NS = 100e6
SLOW_FROM = 104


class Found(NamedTuple):
    """first: (runs, ranks), the step at which each rank was named first; -1 if it was not."""

    first: Floats

    @property
    def false_alarms(self) -> float:
        """The part of runs in which any rank but the first was named, or the first one too soon."""
        too_soon = (self.first[:, 0] >= 0) & (self.first[:, 0] < SLOW_FROM)
        return float(((self.first[:, 1:] >= 0).any(axis=1) | too_soon).mean())

    def delays(self, percentile: float) -> float:
        """Steps from the first slow one until the first rank was named; of those named only."""
        found = self.first[:, 0] - SLOW_FROM + 1
        return float(np.percentile(np.where(found > 0, found, np.inf), percentile))


def simulated(*, runs: int, ranks: int, steps: int, noise: float, slow: float, lasting: float = 0.0) -> Found:
    """Steps with noise of Student's t with 3 degrees of freedom, whose tails are heavy; all ranks share some.

    noise: of a step, by its scale; slow: by which part the first rank is slower; lasting: the correlation of
    noise that lasts over steps.
    """
    draw = np.random.default_rng(1)
    scores = Scores((runs, 1, ranks), (tuple(range(ranks)),))
    first, before = np.full((runs, ranks), -1.0), np.zeros((runs, 1, ranks))
    for step in range(steps):
        fresh = draw.standard_t(3, (runs, 1, ranks)) * noise
        before = lasting * before + np.sqrt(1 - lasting**2) * fresh
        together = 0.1 * draw.standard_normal((runs, 1, 1))
        ns = STEP_NS * np.maximum(0.2, 1 + before + together)
        if step >= SLOW_FROM:
            ns[:, :, 0] += slow * STEP_NS
        alarm = scores.take(ns).max(axis=0)[:, 0] >= THRESHOLD
        first[alarm & (first < 0)] = step
    return Found(first)


@pytest.mark.slow
def test_of_ten_thousand_quiet_runs_with_heavy_tails_few_name_anyone() -> None:
    found = simulated(runs=10_000, ranks=2, steps=200, noise=0.05, slow=0.0)
    assert (found.first >= 0).any(axis=1).mean() <= 1e-3


def test_noise_that_lasts_over_steps_names_few() -> None:
    found = simulated(runs=300, ranks=4, steps=160, noise=0.05, slow=0.0, lasting=0.5)
    assert (found.first >= 0).any(axis=1).mean() <= 0.05


@pytest.mark.parametrize(("ranks", "noise", "half", "most"), [(2, 0.01, 10, 14), (4, 0.02, 12, 20)])
def test_a_rank_that_is_ten_percent_slower_is_named_within_twenty_steps(
    ranks: int, noise: float, half: int, most: int
) -> None:
    found = simulated(runs=300, ranks=ranks, steps=160, noise=noise, slow=0.1)
    assert (found.delays(50) <= half, found.delays(95) <= most) == (True, True), (
        found.delays(50),
        found.delays(95),
    )
    assert found.delays(0) >= STEPS_MIN - 2 and found.false_alarms == 0.0


def test_on_a_noisy_machine_a_rank_must_be_slower_to_be_named() -> None:
    found = simulated(runs=200, ranks=4, steps=180, noise=0.1, slow=0.6)
    assert found.delays(95) <= 40 and found.false_alarms <= 0.01


def test_a_rank_that_is_slow_from_its_first_step_is_slow_beside_its_peers() -> None:
    draw, scores = np.random.default_rng(2), Scores((1, 3), ((0, 1, 2),))
    for _ in range(PAST_MIN + 4 * STEPS_MIN):
        scores.take(STEP_NS * (np.array([[1.0, 1.2, 1.0]]) + 0.01 * draw.standard_normal((1, 3))))
    assert (scores.sums[1, 0] >= THRESHOLD).tolist() == [False, True, False]
    assert scores.sums[0].max() < THRESHOLD, "it was no faster before"


def test_rare_costs_count_by_the_steps_that_have_them() -> None:
    scores = Scores((2, 2), ((0, 1),))
    for step in range(600):
        rare = 0.5 * STEP_NS if step % 10 == 0 else 0.0
        late = rare if step > 300 else 0.0
        scores.take(np.array([[STEP_NS, STEP_NS], [rare, rare + late]]))
    assert scores.sums[0, 1].tolist() == [0.0, THRESHOLD]
