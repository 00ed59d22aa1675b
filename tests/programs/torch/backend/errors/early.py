"""Rank 0 ends its script while others wait for it."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from datetime import timedelta

from programs.torch.backend.common import DistributedDataParallel, begin, dist, fails, nn, torch

me, n = begin(timeout=timedelta(minutes=5))

# Each rank but the first learns within the call who has left, and what it is missing in.
group = dist.new_group()
if me:
    dist.all_reduce(torch.ones(1))
    waits = [
        lambda: dist.all_reduce(torch.ones(2, 3)),
        lambda: dist.barrier(group),
        lambda: dist.recv(torch.ones(1), 0),
        lambda: dist.recv(torch.ones(1)),
        lambda: dist.send(torch.ones(1 << 20), 0),
        lambda: DistributedDataParallel(nn.Linear(2, 2)),
        lambda: dist.all_gather_object([None] * n, me),
        dist.new_group,
    ]
    call = "all_reduce(float32[2, 3], SUM) #2 of default_pg"
    fails(waits[0], f"rank 0 finished its script; {call} waits for it")
    for wait in waits[1:]:
        fails(wait, "rank 0", "finished its script")
    print("good")
else:
    dist.all_reduce(torch.ones(1))
    print("good")
