"""Thousands of calls in flight, and as many groups as there can be."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from datetime import timedelta

from programs.torch.backend.common import begin, dist, fails, functional, torch

me, n = begin(timeout=timedelta(minutes=5))


COUNT = 5000
given = [torch.full((4,), float(k)) for k in range(COUNT)]
summed = [functional.all_reduce(x, "sum", dist.group.WORLD) for x in given]
assert all((functional.wait_tensor(x) == 2.0 * k).all() for k, x in enumerate(summed))
works = [dist.all_reduce(x, async_op=True) for x in given]
futures = [work.get_future() for work in works[::2]]
del works
torch.futures.wait_all(futures)
dist.barrier()
assert all((x == 2.0 * k).all() for k, x in enumerate(given))
x = torch.ones(2)
there = [dist.isend(torch.full((2,), float(k)), 1 - me, tag=k) for k in range(COUNT)]
back = [torch.empty(2) for _ in range(COUNT)]
for work in there + [dist.irecv(out, 1 - me, tag=k) for k, out in enumerate(back)]:
    work.wait()
assert all(out[0] == k for k, out in enumerate(back))

# As many groups at once as there can be; one more says so; closed ones can be had again at once.
kept = []
fails(lambda: [kept.append(dist.new_group()) for _ in range(99)], "process groups", "destroy")
assert len(kept) == 71
for _ in range(2):
    for group in kept:
        dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)
    kept = [dist.new_group() for _ in range(71)]
print("good")
