"""Tensors in the arena: shapes, room, and errors."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from programs.torch.backend.arena.common import fails, lies_in_arena, me, n, net, room, staged
from programs.torch.backend.common import DistributedDataParallel, dist, torch

import zbmd.torch

narrow = zbmd.torch.empty([4, 3], dtype=torch.bfloat16)
for tensor in (zbmd.torch.empty(4, 3), zbmd.torch.empty((4, 3)), narrow):
    assert tensor.shape == (4, 3) and tensor.is_contiguous() and lies_in_arena(tensor)
assert zbmd.torch.empty(0).shape == (0,) and zbmd.torch.empty(()).shape == ()
assert zbmd.torch.empty(3, dtype=torch.complex64).dtype is torch.complex64
x, y = zbmd.torch.empty(1 << 18).fill_(me), torch.full((1 << 18,), float(me))
before = staged()
dist.all_reduce(x, dist.ReduceOp.MAX)
assert staged() == before and (x == n - 1).all()
used = room().used_bytes
views = [zbmd.torch.empty(1 << 18)[5:] for _ in range(2)]
assert room().used_bytes == used + 2 * 4 * (1 << 18)
del views
assert room().used_bytes == used
fails(lambda: zbmd.torch.empty(1 << 40), "no room for", "--arena")
fails(lambda: zbmd.torch.use_arena(net()), "expected DistributedDataParallel or a module with fully_shard")
fails(lambda: zbmd.torch.use_arena(DistributedDataParallel(net())), "gradient_as_bucket_view=True")
gloo = dist.new_group(backend="gloo")
gloo = DistributedDataParallel(net(), process_group=gloo, gradient_as_bucket_view=True)
fails(lambda: zbmd.torch.use_arena(gloo), "of another backend")
print("good")
