"""Two ranks, and operations on tensors of more than 2 GiB, whose sizes no 32-bit number holds."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
import torch.distributed as dist

COUNT = (2 << 30) + 12_345


def filled(count: int, value: int) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.uint8)


def check(tensor: torch.Tensor, *values: int) -> None:
    """Look at both ends of each part: there is one for each value."""
    for part, value in zip(tensor.chunk(len(values)), values, strict=True):
        assert (part[0].item(), part[-1].item()) == (value, value)


def all_reduce(rank: int) -> None:
    x = filled(COUNT, rank + 1)
    dist.all_reduce(x)
    check(x, 3)


def broadcast(rank: int) -> None:
    x = filled(COUNT, rank + 1)
    dist.broadcast(x, 1)
    check(x, 2)


def all_gather(rank: int) -> None:
    whole = filled(2 * COUNT, 0)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, filled(COUNT, rank + 1))
    check(whole, 1, 2)


def reduce_scatter(rank: int) -> None:
    part = filled(COUNT // 2, 0)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, filled(COUNT // 2 * 2, rank + 1))
    check(part, 3)


def all_to_all(rank: int) -> None:
    whole = filled(COUNT // 2 * 2, 0)
    dist.all_to_all_single(whole, filled(COUNT // 2 * 2, rank + 1))
    check(whole, 1, 2)


def send(rank: int) -> None:
    x = filled(COUNT, rank + 1)
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    check(x, 1)


def main() -> None:
    """Run them one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    run: Callable[[int], None]
    for run in (all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, send):
        run(dist.get_rank())
        gc.collect()
    print(f"rank {dist.get_rank()} is done", flush=True)
    dist.destroy_process_group()


main()
