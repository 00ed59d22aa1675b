"""A small resilient loop whose ops are profiled in every second step. Its last line is a digest of its state.

Variables: MODE (ddp or fsdp), OUT, EVERY (the steps from one that is sampled to the next; absent:
ZBMD_TRAIN_PROFILE_OPS says it).
"""

from __future__ import annotations

import hashlib
import importlib
import os
import warnings
from typing import Any

import zbmd.torch

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
nn: Any = importlib.import_module("torch.nn")
fsdp: Any = importlib.import_module("torch.distributed.fsdp")

MODE = os.environ["MODE"]
BATCH, WIDTH, HIDDEN, STEPS = 8, 16, 32, 6


def parallel(model: Any) -> Any:
    """Return the model as all ranks train it."""
    if MODE == "fsdp":
        return fsdp.fully_shard(model)
    return nn.parallel.DistributedDataParallel(model)


def main() -> None:
    """Train."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    torch.manual_seed(1)
    model = parallel(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = os.environ.get("EVERY")
    run = zbmd.torch.resilient(
        model, optimizer, out=os.environ["OUT"], profile_ops=None if every is None else int(every)
    )
    x = torch.linspace(-1.0, 1.0, BATCH * WIDTH).view(BATCH, WIDTH) * (1 + dist.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    while run.steps < STEPS:
        run.call(step)
    parts = [getattr(each, "_local_tensor", each).detach() for each in model.parameters()]
    bits = [part.contiguous().view(torch.int32).tolist() for part in parts]
    print(f"rank {dist.get_rank()} ends with {hashlib.sha256(repr(bits).encode()).hexdigest()[:16]}")
    dist.destroy_process_group()


main()
