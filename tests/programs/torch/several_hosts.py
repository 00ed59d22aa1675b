"""A script of ranks that another launcher has started on several hosts: several_hosts.py [VICTIM].

Twice it makes and destroys its groups. With VICTIM, that rank is killed, and the others say what they hear.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

victim = int(sys.argv[1]) if len(sys.argv) > 1 else -1
torch.set_num_threads(1)
for _ in range(2):
    dist.init_process_group("zbmd")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((300_000,), float(rank + 1))
    dist.all_reduce(x)
    assert x.unique().tolist() == [size * (size + 1) / 2], x
    halves: list[Any] = [dist.new_group(list(range(half, size, 2))) for half in range(2)]
    y = torch.tensor([rank])
    dist.broadcast(y, rank % 2, group=halves[rank % 2])
    assert y.item() == rank % 2
    received = torch.zeros(70_000)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x[:70_000] + rank, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    assert received[-1].item() == x[0].item() + (rank - 1) % size
    dist.barrier()
    if victim < 0:
        print(f"rank {rank} of {size} is done", flush=True)
        dist.destroy_process_group()
        continue
    others, word = [other for other in range(size) if other != victim], torch.zeros(1)
    if rank == victim:  # once all others are out of the barrier
        for other in others:
            dist.recv(word, other)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.send(word, victim)
        dist.all_reduce(x)
    except RuntimeError as error:
        print(f"rank {rank} hears: {str(error).splitlines()[0]}", flush=True)
    break
