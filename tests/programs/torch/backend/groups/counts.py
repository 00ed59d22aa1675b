"""64 groups, and thousands of calls in flight."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from programs.torch.backend.common import dist, torch

dist.init_process_group("zbmd")
me, groups = dist.get_rank(), []
for number in range(64):
    groups.append(dist.new_group())
    x = torch.full((3,), float(number + me))
    dist.all_reduce(x, group=groups[-1])
    assert (x == 2 * number + 1).all(), x
given = [torch.full((2,), float(k)) for k in range(4096)]
works = [dist.all_reduce(x, group=groups[k % 64], async_op=True) for k, x in enumerate(given)]
works += [dist.isend(x, 1 - me, tag=k) for k, x in enumerate(given[:100])]
outs = [torch.empty(2) for _ in range(100)]
works += [dist.irecv(out, 1 - me, tag=k) for k, out in reversed([*enumerate(outs)])]
for work in works:
    work.wait()
assert all((x == 2.0 * k).all() for k, x in enumerate(given))
given = [torch.full((2,), float(k)) for k in range(4096)]
works = [dist.all_reduce(x, async_op=True) for k, x in enumerate(given)]
assert torch.futures.wait_all([work.get_future() for work in works[::2]])
dist.barrier()
assert all((x == 2.0 * k).all() for k, x in enumerate(given))
for group in groups:
    dist.destroy_process_group(group)
dist.all_reduce(x, group=dist.new_group())
print("good")
dist.destroy_process_group()
