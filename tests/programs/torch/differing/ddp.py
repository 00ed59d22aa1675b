"""A DDP loop in which rank 1 changes one bit: differing/ddp.py (parameter | moment) STEPS.

After so many steps.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zbmd.torch
from zbmd.training.torch.ballots import DIGEST_EVERY
from zbmd.transport.errors import UserError

torch.set_num_threads(1)
dist.init_process_group("zbmd")
torch.manual_seed(1)
model = DistributedDataParallel(nn.Linear(4, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
run = zbmd.torch.resilient(model, optimizer)
try:
    for _ in range(2 * DIGEST_EVERY):
        if run.steps == int(sys.argv[2]) and dist.get_rank() == 1:
            weight = model.module.weight
            changed = weight if sys.argv[1] == "parameter" else optimizer.state[weight]["exp_avg_sq"]
            changed.data.view(torch.int32)[0, 0] ^= 1
        with run.step():
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
except UserError as error:
    print(f"after {run.steps} steps: {error}", flush=True)
