# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Tensor parallelism, a pipeline and checkpoints of PyTorch, over the backend that it is given.

Rank 0 prints a line for each. Needs two ranks. argv: the backend, and a directory for checkpoints.
"""

import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()


def say(name: str, value: float) -> None:
    if rank == 0:
        print(f"{name} {value}", flush=True)


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


mesh = init_device_mesh("cpu", (size,))
x = torch.arange(32.0).reshape(4, 8) / 32
plain: Any = mlp()
divided: Any = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
(divided(x) ** 2).sum().backward()
(plain(x) ** 2).sum().backward()
whole = divided[0].weight.grad.full_tensor()
torch.testing.assert_close(whole, plain[0].weight.grad)
say("tensor parallel", whole.double().sum().item())

layers = mlp()
stage = PipelineStage(
    nn.Sequential(layers[0], layers[1]) if rank == 0 else layers[2], rank, 2, torch.device("cpu")
)
losses = []
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
given = {"target": torch.zeros(4, 8), "losses": losses} if rank else {}
schedule.step(*([] if rank else [x]), **given)
assert (layers[0].weight.grad is None) == (rank == 1)
total = torch.stack(losses).sum() if rank else torch.zeros(())
dist.all_reduce(total)
say("pipeline", total.item())

model: Any = fully_shard(mlp(), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model(x).sum().backward()
optimizer.step()
state = {"model": model.state_dict()}
checkpoint.save(state, checkpoint_id=f"{sys.argv[2]}/now")
behind: Any = dist.new_group(backend=sys.argv[1])
future = checkpoint.async_save(state, checkpoint_id=f"{sys.argv[2]}/later", process_group=behind)
future.result()
for name in ("now", "later"):
    again: Any = fully_shard(mlp(), mesh=mesh)
    loaded = {"model": again.state_dict()}
    checkpoint.load(loaded, checkpoint_id=f"{sys.argv[2]}/{name}")
    again.load_state_dict(loaded["model"])
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
say("checkpoints", sum(p.full_tensor().double().sum().item() for p in model.parameters()))
dist.destroy_process_group()
