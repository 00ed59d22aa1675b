"""Functional collectives, coalesced calls, `block_current_stream`."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from programs.torch.backend.common import dist, functional, torch
from programs.torch.backend.operations.common import me, mine, n, same, total, world

ops, name = torch.ops._c10d_functional, world.group_name
wait = ops.wait_tensor
out = torch.empty(2 * n)
wait(ops.all_gather_into_tensor_out(mine(2), n, name, out=out))
same(out.view(n, 2)[:, 0], torch.arange(n))
out = torch.empty(2)
wait(ops.reduce_scatter_tensor_out(mine(2 * n), "sum", n, name, out=out))
same(out, total)
there, back = (me + 1) % n, (me - 1) % n
x, out = mine(3), torch.empty(3)
for tensor in ops.batch_p2p_ops(["isend", "irecv"], [there, back], [0, 0], [x, out], name):
    wait(tensor)
same(out, back)
out = torch.empty(3)
for tensor in (ops.isend(x, there, 5, name), ops.irecv(out, back, 5, name)):
    wait(tensor)
same(out, back)
same(wait(functional.all_reduce(mine(2), "avg", world)), total / n)
same(wait(functional.all_gather_tensor(mine(2, 2), 1, world))[0], torch.arange(n).repeat_interleave(2))
x = mine(2 * n).requires_grad_()
functional.reduce_scatter_tensor_autograd(x, "sum", 0, world).sum().backward()
same(x.grad, 1)
with dist._coalescing_manager(async_ops=True) as together:
    outs = [torch.empty(3), torch.empty(2, 2)]
    for out in outs:
        dist.reduce_scatter_tensor(out, mine(n * out.shape[0], *out.shape[1:]))
together.wait()
for out in outs:
    same(out, total)
lists = [[torch.empty(3), torch.empty(2, 2)] for _ in range(n)]
dist.all_gather_coalesced(lists, [mine(3), mine(2, 2)])
for rank, tensors in enumerate(lists):
    for tensor in tensors:
        same(tensor, rank)
work = dist.all_reduce(mine(3), async_op=True)
work.block_current_stream()
assert work.is_completed()

print("good")
dist.destroy_process_group()
