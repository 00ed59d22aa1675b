"""Every operation of `torch.distributed` with tensors somewhere, to be compared with those of the host.

`place` puts a tensor where an operation is to find it. The tests run these over a modelled device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

Place: TypeAlias = Callable[[Any], Any]
DTYPES: Final = (
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "complex64"),
    "float8_e4m3fn",
)


def mine(*shape: int, dtype: Any = torch.float32) -> Any:
    """Return small numbers of this rank's own, on the host."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, device="cpu").reshape(shape) % 5 + dist.get_rank()).to(dtype)


def reductions(place: Place, count: int, dtype: Any) -> list[Any]:
    """Return the results of all operations that reduce."""
    n = dist.get_world_size()
    x, y, z = (place(mine(count, dtype=dtype)) for _ in range(3))
    dist.all_reduce(x)
    dist.all_reduce(y, op=dist.ReduceOp.SUM if dtype.is_complex else dist.ReduceOp.MAX)
    dist.reduce(z, 1)
    out, outs = (place(torch.zeros(count, device="cpu").to(dtype)) for _ in range(2))
    dist.reduce_scatter_tensor(out, place(mine(n * count, dtype=dtype)))
    dist.reduce_scatter(outs, [place(mine(count, dtype=dtype)) for _ in range(n)])
    several = [place(mine(count, dtype=dtype)), place(mine(3, dtype=dtype))]
    dist.all_reduce_coalesced(several)
    return [x, y, z, out, outs, *several]


def moves(place: Place, count: int, dtype: Any) -> list[Any]:
    """Return the results of all operations that move."""
    me, n = dist.get_rank(), dist.get_world_size()

    def empty(size: int) -> Any:
        return place(torch.zeros(size, device="cpu").to(dtype))

    x, root = place(mine(count, dtype=dtype)), place(mine(count, dtype=dtype))
    dist.broadcast(root, 1)
    whole = empty(n * count)
    dist.all_gather_into_tensor(whole, x)
    rows = [empty(count) for _ in range(n)]
    dist.all_gather(rows, x)
    at_root = [empty(count) for _ in range(n)] if me == n - 1 else None
    dist.gather(x, at_root, dst=n - 1)
    own = empty(count)
    dist.scatter(own, [place(mine(count, dtype=dtype)) for _ in range(n)] if me == 0 else None, src=0)
    even, uneven = empty(n * count), empty(sum(rank + 1 for rank in range(n)))
    dist.all_to_all_single(even, place(mine(n * count, dtype=dtype)))
    splits = [rank + 1 for rank in range(n)], [me + 1] * n
    dist.all_to_all_single(uneven, place(mine(n * (me + 1), dtype=dtype)), *splits)
    parts = [empty(rank + 1) for rank in range(n)]
    dist.all_to_all(parts, [place(mine(me + 1, dtype=dtype)) for _ in range(n)])
    return [root, whole, *rows, *(at_root or []), own, even, uneven, *parts]


def strides_and_factors(place: Place) -> list[Any]:
    """Return the results of operations on tensors with gaps, and of those with a factor."""
    turned, scaled = place(mine(6, 5).T), place(mine(9))
    dist.all_reduce(turned, op=dist.ReduceOp.AVG)
    dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(2.0))
    out = place(mine(3, 4) if dist.get_rank() == 0 else torch.zeros(4, 3, device="cpu").T)
    dist.broadcast(out, 0)
    return [turned, scaled, out]


def compare(place: Place, look: Place, large: int) -> int:
    """Compare all of them with the same on the host, bit by bit; return how many results there were.

    large: elements that take several pieces. look: brings a result to the host. Raises `ValueError`.
    """
    compared = 0

    def same(run: Callable[[Place], Sequence[Any]], what: object) -> None:
        nonlocal compared
        there, here = run(place), run(lambda x: x.clone())
        for number, (a, b) in enumerate(zip(there, here, strict=True)):
            found, compared = look(a), compared + 1
            bits = [each.contiguous().view(torch.uint8) for each in (found, b)]
            if found.dtype != b.dtype or not torch.equal(*bits):
                raise ValueError(f"result {number} of {what}: {found}, and on the host {b}")

    for name in DTYPES:
        dtype = getattr(torch, name)
        same(partial(reductions, count=37, dtype=dtype), f"reductions of {name}")
        same(partial(moves, count=37, dtype=dtype), f"moves of {name}")
    same(lambda at: reductions(at, large, torch.int32), "large reductions")
    same(lambda at: moves(at, large, torch.float32), "large moves")
    same(lambda at: moves(at, 0, torch.float32), "moves of nothing")
    same(strides_and_factors, "strides and factors")
    return compared
