"""The training job, whose rank 1 has a NaN in an activation; argv: the job's."""

from __future__ import annotations

import os
import sys

import numpy as np

from zbmd.training import __main__ as training
from zbmd.training import ops
from zbmd.training.autograd.tape import Tape, Tensor

original = ops.squared_relu


def poisoned(tape: Tape, x: Tensor) -> Tensor:
    y = original(tape, x)
    y.data[0, 0] = np.nan
    return y


if os.environ["RANK"] == "1":
    ops.squared_relu = poisoned
sys.exit(training.main())
