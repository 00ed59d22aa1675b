"""The learning rate over a run: linear warm-up, then decay to a fraction of the peak along a curve."""

from __future__ import annotations

import math
from typing import Literal, assert_never, get_args

Curve = Literal["cosine", "linear", "wsd", "constant"]
CURVES: tuple[Curve, ...] = get_args(Curve)
WSD_DECAY = 0.2
"""The fraction of the steps after warm-up in which a WSD schedule decays."""


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    floor: float,
    curve: Curve = "cosine",
) -> float:
    """Return the rate of `step` (from 0): rising to `peak` in `warmup_steps`, then falling to `floor * peak`.

    The last step, `total_steps - 1`, has the lowest rate; later steps keep it. `cosine`: I. Loshchilov, F.
    Hutter, "SGDR", 2017, arXiv:1608.03983, without restarts; `linear`; `wsd`: at the peak, with a linear
    decay over the last `WSD_DECAY` of the steps (S. Hu and others, "MiniCPM", 2024, arXiv:2404.06395);
    `constant`: at the peak to the end.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    span = max(1, total_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    match curve:
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        case "linear":
            left = 1.0 - progress
        case "wsd":
            left = min(1.0, (1.0 - progress) / WSD_DECAY)
        case "constant":
            left = 1.0
        case _:
            assert_never(curve)
    return peak * (floor + (1.0 - floor) * left)
