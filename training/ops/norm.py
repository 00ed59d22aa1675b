"""Root-mean-square normalisation (B. Zhang, R. Sennrich, 2019, arXiv:1910.07467)."""

from __future__ import annotations

from zbmd.training.tape import Parameter, Tape, Tensor
from zbmd.training.xp import Array

EPSILON = 1e-5


def rms_norm(tape: Tape, x: Tensor, gain: Parameter) -> Tensor:
    """Return `x / sqrt(mean(x**2) + EPSILON) * gain`, the mean being taken over each row.

    x and result: (rows, features); gain: (features,); one float dtype.
    """
    xp = tape.xp
    features = x.data.shape[1]
    inverse = xp.einsum("rf,rf->r", x.data, x.data)
    inverse *= 1.0 / features
    inverse += EPSILON
    xp.sqrt(inverse, out=inverse)
    xp.reciprocal(inverse, out=inverse)
    unit = x.data * inverse[:, None]
    y = unit * gain.data

    def backward(dy: Array) -> None:
        gain.receive(lambda out: xp.copyto(out, xp.einsum("rf,rf->f", dy, unit)))
        dy *= gain.data
        along = xp.einsum("rf,rf->r", dy, unit)
        along *= 1.0 / features
        # d(unit)/dx is (identity - unit unit^T / features) * inverse; unit is not needed after this.
        xp.multiply(unit, along[:, None], out=unit)
        dy -= unit
        dy *= inverse[:, None]
        x.accumulate(dy)

    return tape.record(y, backward, gain)
