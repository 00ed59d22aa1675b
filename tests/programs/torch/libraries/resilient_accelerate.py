# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""A resilient loop of Hugging Face's accelerate, which prepares model and optimizer and leaves the loop."""

import hashlib

import torch
import torch.distributed as dist
from accelerate import Accelerator  # type: ignore[import-not-found,unused-ignore]
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import zbmd.torch

torch.set_num_threads(1)
dist.init_process_group("zbmd")
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
network = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.9)
model, prepared, scheduled = accelerator.prepare(network, optimizer, scheduler)
run = zbmd.torch.resilient(model, optimizer, scheduler)
for inputs, targets in run.batches(DataLoader(data, 4, sampler=DistributedSampler(data)), epochs=2):
    with run.step():
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        run.mean(loss=loss)
        prepared.step()
        scheduled.step()
        prepared.zero_grad()
        rate = optimizer.param_groups[0]["lr"]
        print(f"step {run.steps} rank {dist.get_rank()}: {run.metrics['loss']!r} at {rate!r}", flush=True)
everyone = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
bits = [each.detach().view(torch.int32).tolist() for each in model.parameters()]
digest = hashlib.sha256(repr(bits).encode()).hexdigest()[:16]
print(f"final rank {dist.get_rank()}: {digest} {everyone}", flush=True)
accelerator.end_training()
