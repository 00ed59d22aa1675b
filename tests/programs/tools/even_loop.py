"""A resilient loop over DDP whose steps take a rank milliseconds. argv: directory, passes, on_straggler."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import zbmd.torch

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
nn: Any = importlib.import_module("torch.nn")
data: Any = importlib.import_module("torch.utils.data")

WIDTH, BATCH, BATCHES = 256, 128, 64


def main() -> None:
    """Train."""
    out, passes, on_straggler = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    torch.manual_seed(1)
    layers = [each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = zbmd.torch.resilient(model, optimizer, out=out, on_straggler=on_straggler)
    samples = data.TensorDataset(torch.randn(BATCH * BATCHES, WIDTH))
    for (x,) in run.batches(data.DataLoader(samples, BATCH), epochs=int(passes)):
        with run.step():
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            run.mean(loss=loss)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {run.steps} loss {run.metrics['loss']:.4f}", flush=True)
    dist.destroy_process_group()


main()
