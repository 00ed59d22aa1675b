"""Tensors that the arena could not hold, many in flight."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from datetime import timedelta

from programs.torch.backend.common import dist, torch

dist.init_process_group("zbmd", timeout=timedelta(minutes=2))
me, other, mib = dist.get_rank(), 1 - dist.get_rank(), 1 << 20  # the arena has 48 MiB
x, out = torch.arange(8 * mib), torch.zeros(8 * mib, dtype=torch.int64)
works = [dist.isend(x + me, other), dist.irecv(out, other)]
for work in works:
    work.wait()
assert torch.equal(out, x + other)
outs = [torch.full((14 * mib,), k + 10 * me, dtype=torch.uint8) for k in range(6)]
ins = [torch.zeros(14 * mib, dtype=torch.uint8) for _ in range(6)]
there = [dist.P2POp(dist.isend, out, other, tag=k) for k, out in enumerate(outs)]
back = [dist.P2POp(dist.irecv, ins[k], other, tag=k) for k in reversed(range(6))]
for work in dist.batch_isend_irecv(there + back):
    work.wait()
assert all((each == k + 10 * other).all() for k, each in enumerate(ins))

# Every collective, of tensors that the arena could not hold; many of them in flight.
x = torch.full((15 * mib,), 1.0 + me)
dist.all_reduce(x)
assert (x == 3).all()
dist.broadcast(x, 1)
outs = [torch.empty(15 * mib) for _ in range(2)]
dist.all_gather(outs, x + me)
assert (outs[1] == 4).all()
dist.gather(x, outs if me == 0 else None)
dist.scatter(x, outs if me == 0 else None)
dist.reduce(x, 1)
out = torch.empty(15 * mib)
dist.reduce_scatter(out, [x, x])
dist.all_to_all(outs, [x, x])
dist.all_to_all_single(torch.empty(30 * mib), torch.ones(30 * mib))
dist.all_gather_into_tensor(torch.empty(30 * mib), x)
objects = [bytes(60 * mib) if me == 0 else b""]
dist.broadcast_object_list(objects)
assert len(objects[0]) == 60 * mib
works = [dist.all_reduce(torch.ones(15 * mib), async_op=True) for _ in range(3)]
works += [dist.isend(x, other), dist.irecv(torch.empty_like(x), other)]
for work in works:
    work.wait()
print("good")
dist.destroy_process_group()
