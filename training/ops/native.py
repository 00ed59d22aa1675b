"""Choose between native kernels, for numpy arrays, and the general formula."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.array_module import Array
from zbmd.training.native import _kernels


def has_kernels(xp: ModuleType, *arrays: Array) -> bool:
    """Return whether `zbmd.training.native._kernels` computes on `arrays`, of the array module `xp`."""
    return xp is np and _kernels.fits(*arrays)


def as_indices(indices: Array) -> npt.NDArray[np.int64]:
    """Return integers of any dtype in the form that the kernels take."""
    return np.ascontiguousarray(indices, dtype=np.int64)
