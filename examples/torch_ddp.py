"""DDP over zbmd: a rank dies, training continues. Run it: zbmd-node run -n 3 examples/torch_ddp.py"""
# pyright: basic, reportMissingImports=false

import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zbmd.torch  # noqa: F401 -- registers the backend


def train(steps: int) -> float:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.Generator().manual_seed(dist.get_rank())
    loss = torch.zeros(())
    for step in range(steps):
        if step == steps // 2 and dist.get_rank() == 1 and os.environ["ZBMD_INCARNATION"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(32, 16, generator=batches)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # raises RuntimeError as soon as a rank has ended
        optimizer.step()
    return loss.item()


done = False
while not done:
    dist.init_process_group("zbmd")  # waits for the replacement
    try:
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {train(100):.4f}")
        done = True
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    dist.destroy_process_group()
