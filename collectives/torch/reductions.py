"""What `torch.distributed` reduces with: its `ReduceOp` in our terms, and sparse tensors.

Needs PyTorch; imported by `process_group` alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.torch.tensors import TensorBuffer, tensor_text
from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

REDUCTIONS: Final = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
    "PREMUL_SUM": "sum",
}

_PREMUL_SUM: Final = dist.ReduceOp.PREMUL_SUM


class Reduction(NamedTuple):
    """A reduction by our name. factor: what each rank multiplies its tensor by, a number or a tensor.

    said: its name in torch, as the end of the arguments of a call.
    """

    name: str
    said: str
    factor: Any = None


_REDUCTIONS: Final = [
    (getattr(dist.ReduceOp, name), Reduction(ours, f", {name}"))
    for name, ours in REDUCTIONS.items()
    if name != "PREMUL_SUM"
]


def reduction_of(op: Any) -> Reduction:
    """Return a `ReduceOp` in our terms. Raises `UserError` for one that is not known."""
    for theirs, ours in _REDUCTIONS:
        if op == theirs:
            return ours
    if op == _PREMUL_SUM:
        return Reduction("sum", ", PREMUL_SUM", op.__getstate__()[1])
    raise UserError(f"the backend zbmd has no reduction {op}; it has {', '.join(REDUCTIONS)}")


def all_reduce_sparse(tensor: Any, reduction: Reduction) -> tuple[str, Callable[[Communicator, int], None]]:
    """Return the text of a sparse COO tensor, and an operation that adds it up over all ranks, in place.

    All ranks gather the indices and values of all, whose numbers may differ, and add up those of one index in
    the order of the ranks. Raises `UserError` for another reduction or layout.
    """
    if tensor.layout is not torch.sparse_coo or reduction.name != "sum" or reduction.factor is not None:
        raise UserError(
            f"all_reduce of a tensor with layout {tensor.layout}: expected ReduceOp.SUM of torch.sparse_coo, "
            f"got {reduction.name}; .to_dense() has all reductions"
        )
    given, places_in = tensor.detach().coalesce().cpu(), tensor.sparse_dim()
    count, shape = given.values().shape[0], given.values().shape[1:]
    places = _rows(given.indices().t().contiguous(), count)
    values = _rows(given.values().contiguous(), count)
    text = f"sparse {tensor_text(tensor.dtype, tensor.shape)} with {places_in} sparse dimensions"

    def run(c: Communicator, end_ns: int) -> None:
        all_places = c.all_gather_v(places, deadline_ns=end_ns)
        all_values = c.all_gather_v(values, deadline_ns=end_ns)
        total = len(all_places)
        # Not in inference mode, which would make the tensor one of inference for good, and not into a
        # detached one, which would keep the result for itself: the tensor's own indices are replaced.
        with torch.no_grad():
            indices = _tensor_of(all_places, (total, places_in), torch.int64).t()
            summed = _tensor_of(all_values, (total, *shape), tensor.dtype)
            gathered = torch.sparse_coo_tensor(indices, summed, tensor.shape, check_invariants=False)
            tensor.copy_(gathered.coalesce().to(tensor.device))

    return text, run


def _tensor_of(rows: Any, shape: Any, dtype: Any) -> Any:
    """Return rows of bytes as a tensor."""
    made = torch.empty(shape, dtype=dtype)
    TensorBuffer(made).array.view(np.uint8).reshape(rows.shape)[:] = rows
    return made


def _rows(tensor: Any, count: int) -> Any:
    """Return a tensor's memory as bytes, (count, bytes of a row)."""
    row_bytes = tensor.element_size() * torch.Size(tensor.shape[1:]).numel()
    return TensorBuffer(tensor).array.view(np.uint8).reshape(count, row_bytes)
