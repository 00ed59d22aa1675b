"""What PyTorch builds on groups, with its checks of all calls (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import tempfile
from datetime import timedelta

from programs.torch.backend.common import DistributedDataParallel, begin, dist, fails, functional, nn, torch
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

me, n = begin(timeout=timedelta(minutes=5))


assert dist.get_debug_level() == dist.DebugLevel.DETAIL


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def run(model, steps=2):
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()


run(DistributedDataParallel(net()), 12)
run(DistributedDataParallel(net(), static_graph=True))
run(DistributedDataParallel(net(), find_unused_parameters=True, gradient_as_bucket_view=True))
model = DistributedDataParallel(net())
with model.join():
    run(model, 2 + me)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
run(model)
optimizer.step()
run(FullyShardedDataParallel(net(), device_id=torch.device("cpu")))
run(FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True))
sharded = net()
fully_shard(sharded[0])
fully_shard(sharded)
run(sharded)
assert (functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) == n).all()
mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("a",))
dist.all_reduce(torch.ones(1), group=mesh.get_group("a"))
distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
objects = [None] * n
dist.all_gather_object(objects, me)
where = [tempfile.mkdtemp() if me == 0 else None]
dist.broadcast_object_list(where)
save({"a": torch.ones(3)}, checkpoint_id=where[0])
with dist._coalescing_manager(async_ops=True) as many:
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(2))
many.wait()
for more in ({}, {"use_local_synchronization": True}, {"backend": "gloo"}):
    group = dist.new_group(**more)
    dist.all_reduce(torch.ones(1), group=group)
    assert dist.ProcessGroup.unbox(group.boxed()) is not None
fails(lambda: dist.broadcast(torch.ones(1 + me), 0), "broadcast(float32[1], src=0)")
print("good")
dist.destroy_process_group()
