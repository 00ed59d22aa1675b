"""A resilient loop over DDP whose model is on a modelled device; it prints what a killed run must match.

Variables: MODE (plain; exact: with logical shares; momentum; capturable; mirror), OUT, EVERY and RESUME: see
`tests/programs/training/resilient_ddp.py`. LOSES: the rank whose device fails in a step. The device runs what
it is asked late, and raises where nothing orders two accesses of the same bytes: copies of the state beside a
step that writes it, for one.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import importlib
import os
import warnings
from contextlib import nullcontext
from typing import Any

from support.devices.torch_model import DEVICES, get, install, put

import zbmd.torch
from zbmd.transport.cuda.api import DeviceLost

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
nn: Any = importlib.import_module("torch.nn")
functional: Any = importlib.import_module("torch.nn.functional")
parallel: Any = importlib.import_module("torch.nn.parallel")
data: Any = importlib.import_module("torch.utils.data")
distributed: Any = importlib.import_module("torch.utils.data.distributed")

MODE = os.environ.get("MODE", "plain")
EPOCHS = 2


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """Linear layers and a norm, and a buffer that each rank changes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Any) -> Any:
        """Return (n, 4) of (n, 16)."""
        if self.training and MODE != "exact":
            self.seen.add_(x.detach().sum(0))
        return self.body(x)


def on_device(model: Any) -> Any:
    """Return the model with all that it has on the device."""
    for module in model.modules():
        for name, each in module._parameters.items():
            module._parameters[name] = nn.Parameter(put(each.detach()))
        for name, each in module._buffers.items():
            module._buffers[name] = put(each)
    return model


def digest(*values: Any) -> str:
    """Return a digest of the bits of tensors and numbers."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            value = get(value.detach()).contiguous().reshape(-1).view(torch.uint8).tolist()
        elif isinstance(value, dict):
            value = [digest(key, each) for key, each in sorted(value.items(), key=str)]
        elif isinstance(value, list | tuple):
            value = [digest(each) for each in value]
        found.update(repr(value).encode())
    return found.hexdigest()[:16]


def begun(*of: Any) -> Any:
    """Return the run."""
    options: dict[str, Any] = {"exact": MODE == "exact", "mirror": MODE == "mirror"}
    if "OUT" in os.environ:
        every = int(os.environ.get("EVERY", "0"))
        options.update(out=os.environ["OUT"], checkpoint_every=every, resume="RESUME" in os.environ)
    return zbmd.torch.resilient(*of, **options)


def lose_device(steps: int) -> None:
    """Have the device fail under the step that has begun, if this rank is to lose it, for the first time."""
    if steps == 3 and (os.environ.get("LOSES"), os.environ["ZBMD_INCARNATION"]) == (os.environ["RANK"], "1"):
        DEVICES.process.host.failed = DeviceLost("the device has fallen off the bus")


def main() -> None:
    """Train."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    install(seed=dist.get_rank() + 1)
    torch.manual_seed(1)
    model = parallel.DistributedDataParallel(on_device(Net()), broadcast_buffers=False, bucket_cap_mb=0.001)
    if MODE == "momentum":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=MODE == "capturable")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    numbers = torch.Generator().manual_seed(5)
    samples = data.TensorDataset(
        torch.randn(96, 16, generator=numbers), torch.randn(96, 4, generator=numbers)
    )
    loader = data.DataLoader(samples, 8, sampler=distributed.DistributedSampler(samples))
    run = begun(model, optimizer, scheduler)
    log: list[Any] = []
    for x, y in run.batches(loader, epochs=EPOCHS):
        with run.step():
            optimizer.zero_grad()
            loss: Any = None
            for part, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
                with model.no_sync() if part == 0 and MODE != "exact" else nullcontext():
                    loss = functional.mse_loss(model(put(a)), put(b)) / 2
                    loss.backward()
                if MODE == "exact":
                    break
            lose_device(run.steps)
            run.mean(loss=loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            log.append((run.steps, optimizer.param_groups[0]["lr"], run.metrics["loss"]))
    rank = dist.get_rank()
    for entry in log:
        print(f"step {entry[0]} rank {rank}: {digest(entry)}", flush=True)
    final = digest(
        list(model.module.parameters()), list(model.module.buffers()), optimizer.state_dict()["state"]
    )
    print(f"final rank {rank}: {final} {scheduler.last_epoch}", flush=True)
    dist.destroy_process_group()
    DEVICES.process.host.drain()
    assert DEVICES.process.host.failed is None


main()
