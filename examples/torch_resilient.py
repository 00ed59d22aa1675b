"""A DDP loop that survives the loss of ranks. Needs PyTorch; the numbered lines are all that zbmd asks for.

    zbmd-node run --nproc-per-node 4 --preload torch examples/torch_resilient.py

Kill a rank while it runs (`kill -9`): the others repeat the step with its replacement, and the
last line stays the same.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import zbmd.torch  # 1


def main() -> None:
    """Train a small network for 10 passes."""
    dist.init_process_group("zbmd")  # 2
    torch.manual_seed(0)
    x = torch.randn(4_096, 32)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 640)
    loader = DataLoader(data, 16, sampler=DistributedSampler(data))

    def report() -> None:
        if dist.get_rank() == 0:
            print(f"step {run.steps}: loss {run.metrics['loss']:.4f}", flush=True)

    run = zbmd.torch.resilient(model, optimizer, scheduler)  # 3
    run.every(100, report)
    for inputs, targets in run.batches(loader, epochs=10):  # 4
        with run.step():  # 5
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            run.mean(loss=loss)
            optimizer.step()
            scheduler.step()
    if dist.get_rank() == 0:
        print(f"the run has ended: loss {run.metrics['loss']:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
