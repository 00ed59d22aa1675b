"""Three ranks with stores of their own: groups made many times, of all and of some, over one store."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import sys
from datetime import timedelta
from typing import Any

import torch
from programs.torch.launched import check

dist: Any = importlib.import_module("torch.distributed")

torch.set_num_threads(1)
me, port, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, 3, is_master=me == 0, timeout=timedelta(seconds=120))


def begin(some_store: object, rank: int, size: int) -> None:
    """Make the default group of these ranks, and use it."""
    dist.init_process_group("zbmd", store=some_store, rank=rank, world_size=size)
    x = torch.ones(10)
    dist.all_reduce(x)
    assert (x == size).all()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)


for _ in range(20):  # one store, and one process of each rank
    begin(store, me, 3)
    dist.destroy_process_group()
if me != 2:  # two of them, in the other order: another job
    begin(dist.PrefixStore("two", store), 1 - me, 2)
    dist.destroy_process_group()
begin(dist.HashStore(), 0, 1)  # each alone
dist.destroy_process_group()
begin(dist.FileStore(path, 3), me, 3)
check()
dist.destroy_process_group()
store.add("done", 1)
if me == 0:
    while store.add("done", 0) < 3:
        pass
print(f"rank {me} is good")
