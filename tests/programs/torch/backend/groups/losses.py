"""Losses of DDP and FSDP2 are those of gloo. Argument: a path for the stores of the groups."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import sys

from programs.torch.backend.common import DistributedDataParallel, dist, nn, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# The end of a gloo group joins a thread with the GIL, for which that thread may wait (PyTorch 2.13): none is
# ended before it has had the GIL, in what ours does behind it.
KEPT = []


def losses(backend, sharded):
    dist.init_process_group(
        backend,
        init_method=f"file://{sys.argv[1]}-{backend}-{sharded}",
        rank=int(os.environ["RANK"]),
        world_size=2,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.Generator().manual_seed(dist.get_rank())
    told = []
    for _ in range(8):
        x, y = torch.randn(8, 16, generator=batches), torch.randn(8, 4, generator=batches)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    if backend == "gloo":
        KEPT.append((model, dist.group.WORLD))
    dist.destroy_process_group()
    return told


for sharded in (False, True):
    theirs, ours = losses("gloo", sharded), losses("zbmd", sharded)
    assert ours == theirs and len(set(ours)) == 8, (sharded, ours, theirs)
print("good")
