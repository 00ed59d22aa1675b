"""An FSDP2 loop in which rank 1 changes one bit: differing/fsdp.py (shard | copy | moment) STEPS.

Of its shard, of the copy that it keeps of rank 0's, or of a moment in that copy, after so many steps.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zbmd.torch
from zbmd.training.torch.ballots import DIGEST_EVERY
from zbmd.transport.errors import UserError

torch.set_num_threads(1)
dist.init_process_group("zbmd")
torch.manual_seed(1)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model: Any = fully_shard(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 6)), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
run = zbmd.torch.resilient(model, optimizer)


def target() -> Any:
    """Return the tensor that is changed."""
    if sys.argv[1] == "shard":
        return model[1].weight._local_tensor.detach()
    shards: Any = run._state.shards
    replica = shards._replica
    copied = replica.updated[2]
    return copied.detach() if sys.argv[1] == "copy" else replica._twin.state[copied]["exp_avg"]


try:
    for _ in range(2 * DIGEST_EVERY):
        if run.steps == int(sys.argv[2]) and dist.get_rank() == 1:
            target().view(torch.int32).view(-1)[0] ^= 1 << 20
        with run.step():
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
except UserError as error:
    print(f"after {run.steps} steps: {error}", flush=True)
