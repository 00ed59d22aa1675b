"""A recorded resilient loop over DDP, small and quick: its losses, and its samples, are those of the log.

Variables: OUT (the directory), LOADER (sampler, workers, ragged, each, iterable, stateful, none), WORKERS,
MISSED (the version at which all ranks but 0 act as if they had not seen the votes), EPOCHS, EVERY and SAVE
(after how many steps it is saved, beside them and before all go on), TO, KEEP, KEEP_EVERY and CODEC (where
and how), RESUME, WIDTH (of the model), EXACT (the number of logical shares), AWAITS (a file that the fourth
step waits for). If ZBMD_FAULT has the point `test.paced`, ranks pass it in the step after a checkpoint's pace
is noted.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zbmd.torch
from zbmd.training.checkpoint.pace import parse_every
from zbmd.training.job.records import METRICS_NAME
from zbmd.transport import kill_points

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
nn: Any = importlib.import_module("torch.nn")
data: Any = importlib.import_module("torch.utils.data")
distributed: Any = importlib.import_module("torch.utils.data.distributed")
parallel: Any = importlib.import_module("torch.nn.parallel")

LOADER = os.environ.get("LOADER", "sampler")
EPOCHS, SAMPLES, SIZE = int(os.environ.get("EPOCHS", "2")), 50, 6
WIDTH = int(os.environ.get("WIDTH", "8"))
PACED = kill_points.declare("test.paced", "in a step, when the pace of a checkpoint is noted")


class Streamed(data.IterableDataset):  # type: ignore[misc, name-defined]
    """The samples of this rank, in order."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(dist.get_rank(), SAMPLES - SAMPLES % dist.get_world_size(), dist.get_world_size()):
            yield torch.full((4,), index / SAMPLES)


def loader_of(kind: str) -> Any:
    """Return a loader."""
    samples = data.TensorDataset(torch.arange(SAMPLES * 4.0).view(SAMPLES, 4) / SAMPLES)
    if kind == "iterable":
        return data.DataLoader(Streamed(), SIZE)
    if kind == "each":
        return data.DataLoader(samples, SIZE, shuffle=True)
    sampler = distributed.DistributedSampler(samples)
    if kind == "stateful":
        return importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader(
            samples, SIZE, sampler=sampler, num_workers=int(os.environ.get("WORKERS", "0"))
        )
    return data.DataLoader(
        samples, SIZE, sampler=sampler, num_workers=2 if kind == "workers" else 0, drop_last=kind == "ragged"
    )


def miss_votes(run: Any, version: int) -> None:
    """Have this rank act as if it had not seen the votes for `version`: rank 0, which has, is killed."""
    errors: Any = importlib.import_module("zbmd.collectives.errors")
    vote = run._vote

    def missed(**options: Any) -> Any:
        rows = vote(**options)
        if run.version == version and not missed.__dict__.setdefault("again", False):
            missed.__dict__["again"] = True
            print("as if the votes had not come", flush=True)
            raise errors.OperationAborted("as if the votes had not come")
        return rows

    run._vote = missed


def is_paced() -> dict[str, float]:
    """Return whether the pace of a checkpoint is in the records, if ranks are to die then."""
    if PACED not in os.environ.get(kill_points.FAULT_VARIABLE, ""):
        return {}
    records = Path(os.environ["OUT"]) / METRICS_NAME
    return {"paced": float(records.exists() and "checkpoint_every" in records.read_text())}


def main() -> None:
    """Train."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    torch.manual_seed(1)
    layers = nn.Linear(4, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1)
    model = parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = zbmd.torch.resilient(
        model,
        optimizer,
        out=os.environ["OUT"],
        checkpoint_every=parse_every(os.environ.get("EVERY", "0")),
        checkpoint_to=os.environ.get("TO", ""),
        keep_checkpoints=int(os.environ.get("KEEP", "2")),
        keep_every=int(os.environ.get("KEEP_EVERY", "0")),
        checkpoint_codec=os.environ.get("CODEC", "none"),
        resume="RESUME" in os.environ,
        exact=int(os.environ.get("EXACT", "0")),
    )
    if "SAVE" in os.environ:
        run.every(int(os.environ["SAVE"]), run.save)
    if "MISSED" in os.environ and dist.get_rank() != 0:
        miss_votes(run, int(os.environ["MISSED"]))
    run.every(4, lambda: dist.barrier())

    def step(x: Any) -> None:
        if "AWAITS" in os.environ:
            importlib.import_module("support.jobs.interrupted").interrupted(run.steps)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.mean(loss=loss, rank=dist.get_rank(), **is_paced())
        optimizer.step()
        if run.metrics.get("paced"):
            kill_points.hit(PACED)
        print(f"step {run.steps} rank {dist.get_rank()}: {run.metrics['loss']!r}", flush=True)

    if LOADER == "none":
        while run.steps < 6:
            run.call(step, torch.ones(3, 4))
    else:
        loader = loader_of(LOADER)
        for batch in run.batches(loader, epochs=EPOCHS):
            with run.step():
                step(batch[0] if isinstance(batch, list) else batch)
    bits = [each.detach().view(torch.int32).tolist() for each in model.parameters()]
    print(f"rank {dist.get_rank()} ends with {hashlib.sha256(repr(bits).encode()).hexdigest()[:16]}")
    dist.destroy_process_group()


main()
