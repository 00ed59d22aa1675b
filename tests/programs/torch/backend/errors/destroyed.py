"""Rank 0 destroys its groups while others wait for it."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from datetime import timedelta

from programs.torch.backend.common import begin, dist, fails, torch

me, n = begin(timeout=timedelta(minutes=5))

other = dist.new_group()
if me == 0:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    late = dist.irecv(torch.ones(1), 1)
    dist.destroy_process_group(other)
    dist.destroy_process_group()
    fails(work.wait, "all_reduce(float32[3], SUM) #1 of default_pg", "this rank destroyed its process group")
    fails(late.wait, "closed")
else:
    fails(lambda: dist.barrier(other), "rank 0 destroyed its process group; barrier() #1 of ")
    fails(lambda: dist.recv(torch.ones(1), 0), "rank 0 destroyed its process group")
    # Over TCP its part of the first may be here already.
    fails(lambda: (dist.all_reduce(torch.ones(3)), dist.barrier()), "rank 0 destroyed its process group")
print("good")
