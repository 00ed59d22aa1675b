"""A resilient DDP loop whose only operations are those of the backward pass, and its votes."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zbmd.torch

torch.set_num_threads(1)
dist.init_process_group("zbmd")
torch.manual_seed(1)
model = DistributedDataParallel(nn.Linear(4, 3))
optimizer = torch.optim.AdamW(model.parameters())
run = zbmd.torch.resilient(model, optimizer)


def step(x: Any) -> None:
    """Make a step."""
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


while run.steps < 6:
    run.call(step, torch.ones(2, 4))
print(f"rank {dist.get_rank()} ends with {model.module.weight.sum().item()!r}", flush=True)
