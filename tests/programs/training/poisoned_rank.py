"""A run of `zbmd train` whose rank 1 has a NaN in an activation; argv: its options."""

from __future__ import annotations

import os
import sys

import numpy as np
from support.jobs.by_words import train_by

from zbmd.training import ops
from zbmd.training.autograd.tape import Tape, Tensor

original = ops.squared_relu


def poisoned(tape: Tape, x: Tensor) -> Tensor:
    y = original(tape, x)
    y.data[0, 0] = np.nan
    return y


if os.environ["RANK"] == "1":
    ops.squared_relu = poisoned
train_by(sys.argv[1:])
