# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""A loop of Hugging Face's accelerate, over the backend that it is given; rank 0 prints what came of it."""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator  # type: ignore[import-not-found,unused-ignore]
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
loss = torch.zeros(())
for _ in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
losses = accelerator.gather_for_metrics(loss.detach().reshape(1))
everyone = accelerator.gather(torch.tensor([accelerator.process_index]))
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    print(f"{dist.get_backend()} {everyone.tolist()} {losses.tolist()}", flush=True)
accelerator.end_training()
