"""An FSDP2 loop that survives the loss of ranks. Needs PyTorch 2.13; zbmd asks for the numbered lines only.

    zbmd-node run --nproc-per-node 4 --preload torch examples/torch_fsdp2_resilient.py

Kill a rank while it runs (`kill -9`): its replacement gets the shard from the next rank, which keeps a copy.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import zbmd.torch  # 1


def main() -> None:
    """Train a small network for 5 passes."""
    dist.init_process_group("zbmd")  # 2
    torch.manual_seed(0)
    x = torch.randn(1_024, 32)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    net = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    model = fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 160)
    loader = DataLoader(data, 16, sampler=DistributedSampler(data))
    run = zbmd.torch.resilient(model, optimizer, scheduler)  # 3
    for inputs, targets in run.batches(loader, epochs=5):  # 4
        with run.step():  # 5
            optimizer.zero_grad()
            parts = [*zip(inputs.chunk(2), targets.chunk(2), strict=True)]
            for number, (some, wanted) in enumerate(parts):
                model.set_requires_gradient_sync(number == len(parts) - 1)
                loss = mse_loss(model(some), wanted) / len(parts)
                loss.backward()
            run.mean(loss=loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    if dist.get_rank() == 0:
        print(f"the run has ended after {run.steps} steps: loss {run.metrics['loss']:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
