"""Compiled programs."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from programs.torch.backend.common import DistributedDataParallel, dist, functional, torch
from programs.torch.backend.operations.common import me, n, same, world
from torch.distributed.fsdp import fully_shard

compiled = torch.compile(backend="aot_eager")


@compiled
def async_op(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x + 1


@compiled
def in_place(x):
    x = x + me
    dist.broadcast(x, 1)
    y = torch.empty(n * x.shape[0])
    dist.all_gather_into_tensor(y, x)
    return y + 1


@compiled
def others(x):
    dist.barrier()
    dist.send(x, (me + 1) % n)
    y = torch.empty_like(x)
    dist.recv(y, (me - 1) % n)
    return functional.all_reduce(y, "sum", world) * 2


same(async_op(torch.ones(3)), n + 1)
same(in_place(torch.zeros(3)), 2)
same(others(torch.ones(3)), 2 * n)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def gradients(made):
    for _ in range(3):
        made.zero_grad()
        made(torch.ones(2, 4) * me).sum().backward()
    return [getattr(p.grad, "full_tensor", p.grad.clone)() for p in made.parameters()]


sharded = model()
for layer in (sharded[0], sharded[2], sharded):
    fully_shard(layer)
eager = gradients(DistributedDataParallel(model()))
for found in (
    gradients(torch.compile(DistributedDataParallel(model()), backend="aot_eager")),
    gradients(torch.compile(sharded, backend="aot_eager")),
):
    for one, other in zip(eager, found, strict=True):
        torch.testing.assert_close(one, other)

print("good")
dist.destroy_process_group()
