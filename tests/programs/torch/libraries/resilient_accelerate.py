# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""A resilient loop of Hugging Face's accelerate, which prepares model and optimizer and leaves the loop."""

import hashlib

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration  # type: ignore[import-not-found,unused-ignore]
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zbmd.torch

torch.set_num_threads(1)
dist.init_process_group("zbmd")
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
network = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.9)
loader = DataLoader(data, 4, shuffle=True)
model, prepared, scheduled, batches = accelerator.prepare(network, optimizer, scheduler, loader)
run = zbmd.torch.resilient(model, prepared, scheduled)
for inputs, targets in run.batches(batches, epochs=2):
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
