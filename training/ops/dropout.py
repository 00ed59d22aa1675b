"""Dropout whose choices depend on the sample alone."""

from __future__ import annotations

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.rng import Noise, random_run
from zbmd.training.autograd.tape import Tape, Tensor


def dropout(
    tape: Tape,
    x: Tensor,
    *,
    rate: float,
    noise: Noise,
    site: int,
    first_row: int = 0,
    rows: int | None = None,
) -> Tensor:
    """Return `x` with each element zeroed with probability `rate`, the others divided by `1 - rate`.

    x: (samples * T, features), the samples in the order of `noise`; or, with `rows` for samples * T, the run
    of these rows that begins with `first_row`. Which are zeroed depends on seed, step,
    sample, `site` and the element's place in its sample, so the way back draws the same numbers again and
    nothing is kept. N. Srivastava and others, "Dropout", JMLR 15, 2014.
    """
    xp = tape.xp
    least, factor = min(int(rate * 2**32), 2**32 - 1), 1.0 / (1.0 - rate)

    def thinned(values: Array) -> Array:
        features, all_rows = values.shape[1], len(values) if rows is None else rows
        start, each = first_row * features, all_rows // len(noise.samples) * features
        words = random_run(noise, site, each, start, start + values.size, xp=xp)
        kept: Array = values * (words >= least).reshape(values.shape)
        kept *= factor
        return kept

    return tape.record(thinned(x.data), lambda dy: x.accumulate(thinned(dy)))
