"""Tensors as numpy arrays over the same memory, for operations on another thread.

Needs PyTorch; imported by `process_group` alone.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")

Array = NDArray[Any]


class TensorBuffer:
    """One tensor: `array` is flat, over its memory, or over a copy if it is not contiguous.

    numbers: of its own dtype, for a reduction; else of bytes, whatever its dtype is. load: it is read. Raises
    `UserError` for tensors that are sparse or not in host memory, and for dtypes that cannot be reduced.
    """

    __slots__ = ("_flat", "_home", "array")

    def __init__(self, tensor: Any, *, numbers: bool = False, load: bool = True) -> None:
        if tensor.layout is not torch.strided:
            raise UserError(
                f"a tensor has layout {tensor.layout}: the backend zbmd takes dense ones (.to_dense())"
            )
        if tensor.device.type != "cpu":
            raise UserError(
                f"a tensor is on {tensor.device}: the backend zbmd takes those in host memory (.cpu())"
            )
        whole = tensor.detach()
        self._home = None if whole.is_contiguous() else whole
        if self._home is not None:
            whole = whole.contiguous() if load else torch.empty(whole.shape, dtype=whole.dtype)
        self._flat = whole
        flat = whole.view(-1)
        self.array: Array = _numbers(flat) if numbers else flat.view(torch.uint8).numpy()

    def bring_home(self) -> None:
        """Write what came into the array to where it belongs."""
        if self._home is not None:
            with torch.inference_mode():
                self._home.copy_(self._flat)


def _numbers(flat: Any) -> Array:
    if flat.dtype is torch.bfloat16:
        try:
            narrow: Any = importlib.import_module("ml_dtypes")
        except ImportError:
            raise UserError("bfloat16 takes ml_dtypes: pip install 'zbmd[bfloat16]'") from None
        return np.asarray(flat.view(torch.int16).numpy().view(narrow.bfloat16))
    try:
        return np.asarray(flat.numpy())
    except TypeError as error:
        raise UserError(f"{flat.dtype} cannot be reduced: {error}") from None
