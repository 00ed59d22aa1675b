"""A rank under any launcher: some operations, and what it found. Arguments: the init method, if not env://.

A line is written by one call: torchrun starts Python without a buffer, and ranks share a pipe.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch

dist: Any = importlib.import_module("torch.distributed")

torch.set_num_threads(1)


def check() -> None:
    """Reduce, gather, send and receive; and in a sub-group."""
    me, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((1000,), 1.0 + me)
    dist.all_reduce(x)
    assert (x == n * (n + 1) / 2).all(), x[0]
    found: list[object] = [None] * n
    dist.all_gather_object(found, (me, os.getpid()))
    assert [entry[0] for entry in found] == list(range(n)), found  # type: ignore[index]
    if n > 1:
        pair = dist.new_group([0, n - 1])
        if me == 0:
            dist.send(torch.tensor([7.0]), n - 1, group=pair)
        elif me == n - 1:
            y = torch.zeros(1)
            dist.recv(y, 0, group=pair)
            assert y.item() == 7.0
    dist.barrier()


def main() -> None:
    dist.init_process_group(os.environ.get("BACKEND", "zbmd"), *sys.argv[1:])
    check()
    sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()} is good\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
