"""Loops that cannot have logical shares, and what the error of each says."""

from __future__ import annotations

import importlib
from typing import Any

import zbmd.torch
from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
nn: Any = importlib.import_module("torch.nn")
parallel: Any = importlib.import_module("torch.nn.parallel")
data: Any = importlib.import_module("torch.utils.data")
distributed: Any = importlib.import_module("torch.utils.data.distributed")


def tell(name: str, model: Any, exact: int = 4) -> None:
    """Print the error of a loop."""
    try:
        zbmd.torch.resilient(model, torch.optim.SGD(model.parameters(), lr=0.1), exact=exact)
    except UserError as error:
        print(f"{name}: {error}", flush=True)
    else:
        raise AssertionError(f"{name} was not refused")


def tell_steps(name: str, loader: Any) -> None:
    """Print the error of steps of a loop whose model has running statistics."""
    try:
        for (x,) in run.batches(loader):
            with run.step():
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
    except UserError as error:
        print(f"{name}: {error}", flush=True)


dist.init_process_group("zbmd")
tell("plain", nn.Linear(4, 4))
tell("static", parallel.DistributedDataParallel(nn.Linear(4, 4), static_graph=True))
tell("many", parallel.DistributedDataParallel(nn.Linear(4, 4)), exact=1)
model = parallel.DistributedDataParallel(nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = zbmd.torch.resilient(model, optimizer, exact=4)
samples = data.TensorDataset(torch.randn(16, 4))
tell_steps("in order", data.DataLoader(samples, 2))
tell_steps("statistics", data.DataLoader(samples, 2, sampler=distributed.DistributedSampler(samples)))
dist.destroy_process_group()
