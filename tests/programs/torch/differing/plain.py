"""A loop over a model without DDP: differing/plain.py (reduced | seeds | gradients | collective).

seeds: ranks make other models. gradients: nobody reduces them. collective: rank 0 alone makes one.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import zbmd.torch
from zbmd.transport.errors import ZbmdError

torch.set_num_threads(1)
dist.init_process_group("zbmd")
torch.manual_seed(dist.get_rank() if sys.argv[1] == "seeds" else 1)
model = nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters())
run = zbmd.torch.resilient(model, optimizer, seed=1)
try:
    while run.steps < 4:
        with run.step():
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()  # the random numbers of a step are a rank's own
            for parameter in model.parameters():
                if sys.argv[1] in ("reduced", "collective"):
                    dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            if sys.argv[1] == "collective" and run.steps == 2 and dist.get_rank() == 0:
                dist.broadcast(torch.ones(3), 0)
            optimizer.step()
    print(f"{run.steps} steps", flush=True)
except (ZbmdError, RuntimeError) as error:
    print(f"after {run.steps} steps: {error}", flush=True)
