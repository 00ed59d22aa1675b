"""The learning rate over a run: linear warm-up, then a cosine to a fraction of the peak."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int, floor: float) -> float:
    """Return the rate of `step` (from 0): up to `peak` in `warmup_steps`, then down to `floor * peak`.

    The last step, `total_steps - 1`, has the lowest rate; any step after it keeps that
    (I. Loshchilov, F. Hutter, "SGDR", 2017, arXiv:1608.03983, without restarts).
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    span = max(1, total_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
