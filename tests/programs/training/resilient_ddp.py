"""A resilient loop over DDP, which prints for each rank what a killed run must have in common with another.

Variables: MODE (plain, static, unused, views, scaler, workers, tail, every, momentum); OUT, the directory of
the run, EVERY and SAVE, after how many steps it is saved beside them and before all go on, and RESUME.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import warnings
from contextlib import nullcontext
from typing import Any

import zbmd.torch

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
nn: Any = importlib.import_module("torch.nn")
functional: Any = importlib.import_module("torch.nn.functional")
parallel: Any = importlib.import_module("torch.nn.parallel")
data: Any = importlib.import_module("torch.utils.data")
distributed: Any = importlib.import_module("torch.utils.data.distributed")

MODE = os.environ.get("MODE", "plain")
WIDTH = int(os.environ.get("WIDTH", "64"))
EPOCHS = 3


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """Linear layers, BatchNorm and dropout; one layer that only some modes use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, 4),
        )
        if MODE == "unused":
            self.never = nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        """Return (n, 4) of (n, 16)."""
        return self.body(x)


class Numbered(data.Dataset):  # type: ignore[misc, name-defined]
    """Samples with their numbers."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(96, 16, generator=numbers), torch.randn(96, 4, generator=numbers)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any, int]:
        return self.x[index], self.y[index], index


def digest(*values: Any) -> str:
    """Return a digest of the bits of tensors and numbers."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())

    add(values)
    return found.hexdigest()[:16]


def wrapped() -> tuple[Any, Any]:
    """Return the model and its optimizer."""
    model = parallel.DistributedDataParallel(
        Net(),
        bucket_cap_mb=0.02,
        static_graph=MODE == "static",
        find_unused_parameters=MODE == "unused",
        gradient_as_bucket_view=MODE == "views",
    )
    if MODE == "momentum":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer


def check_prologue() -> None:
    """A small result from before the loop is the same on a replacement."""
    told = [f"run {dist.get_rank()}"]
    dist.broadcast_object_list(told, 0)
    assert told == ["run 0"], told


def begun(*of: Any) -> Any:
    """Return the run, which is saved if there is a directory."""
    if "OUT" not in os.environ:
        return zbmd.torch.resilient(*of)
    every = int(os.environ.get("EVERY", "0"))
    run = zbmd.torch.resilient(
        *of, out=os.environ["OUT"], checkpoint_every=every, resume="RESUME" in os.environ
    )
    if "SAVE" in os.environ:
        run.every(int(os.environ["SAVE"]), run.save)
    return run


def begin_again() -> None:
    """Make other groups: the loop has ended with its own."""
    dist.init_process_group("zbmd")
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1, 2]))
    dist.destroy_process_group()


def interrupt(steps: int) -> None:
    """Do what a test asks for in the middle of a step."""
    if {"AWAITS", "STOPS"} & os.environ.keys():
        importlib.import_module("support.jobs.interrupted").interrupted(steps)


def main() -> None:
    """Train."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    torch.manual_seed(1)
    check_prologue()
    pair = dist.new_group([0, 1])
    model, optimizer = wrapped()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    scaler = torch.amp.GradScaler("cpu", enabled=MODE == "scaler", init_scale=2.0**40, growth_interval=3)
    samples = Numbered()
    loader = data.DataLoader(
        samples,
        8,
        sampler=distributed.DistributedSampler(samples),
        num_workers=2 if MODE == "workers" else 0,
    )
    run = begun(model, optimizer, scheduler, scaler)
    log: list[Any] = []
    evaluated: list[float] = []

    def evaluate() -> None:
        with torch.no_grad():
            model.eval()
            total = functional.mse_loss(model.module(samples.x), samples.y)
            model.train()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        evaluated.append(total.item())

    run.every(3, evaluate)
    loss = torch.zeros(())
    for x, y, numbers in run.batches(loader, epochs=EPOCHS):
        with run.step():
            interrupt(run.steps)
            optimizer.zero_grad()
            if MODE == "changed":
                x.mul_(0.5)
            for part, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
                with model.no_sync() if part == 0 and MODE != "static" else nullcontext():
                    loss = functional.mse_loss(model(a), b) / 2
                    scaler.scale(loss).backward()
            run.mean(loss=loss)
            scaler.unscale_(optimizer)
            if dist.get_rank() < 2:
                norm = torch.ones(1)
                dist.all_reduce(norm, group=pair)
                assert norm.item() == 2.0
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            if MODE == "tail":
                mine = loss.detach().clone()
                dist.all_reduce(mine, op=dist.ReduceOp.AVG)
            log.append(
                (run.steps, tuple(numbers.tolist()), optimizer.param_groups[0]["lr"], run.metrics["loss"])
            )
    final = digest(
        list(model.module.parameters()), list(model.module.buffers()), optimizer.state_dict()["state"]
    )
    rank = dist.get_rank()
    for entry in log:
        print(f"step {entry[0]} rank {rank}: {digest(entry)}", flush=True)
    print(f"final rank {rank}: {final} {scaler.get_scale()} {scheduler.last_epoch}", flush=True)
    times = len(evaluated) if len(log) == run.steps else ""
    print(f"evaluated rank {rank}: {digest(evaluated[-1:])} {times}")
    dist.destroy_process_group()
    if MODE == "tail":
        begin_again()


main()
