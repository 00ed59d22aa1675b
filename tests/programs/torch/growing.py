"""A recorded loop whose rank 0 waits, each time after two steps, until the job has another number of ranks.

Arguments: ddp, fsdp, or hybrid (replicas of two ranks each), the directory of its records, and the numbers of
ranks to wait in: 1,2. If FIRST is set, whichever rank is 0 waits until a rank of this number or a higher one
has come, and all tell the state that they end with. EXACT: the number of logical shares over DDP. EARLY: the
ranks from FIRST on are killed before they join.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import sys
import threading
import warnings
from typing import Any

import zbmd.torch

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
nn: Any = importlib.import_module("torch.nn")
data: Any = importlib.import_module("torch.utils.data")
distributed: Any = importlib.import_module("torch.utils.data.distributed")
world: Any = importlib.import_module("zbmd.collectives.torch.world").world

KIND, OUT = sys.argv[1:3]
FIRST, EXACT = int(os.environ.get("FIRST", "0")), int(os.environ.get("EXACT", "2"))
SIZES = [int(size) for size in sys.argv[3].split(",")] if len(sys.argv) > 3 else []


class Waits:
    """The places at which rank 0 waits."""

    def __init__(self) -> None:
        self._size = self._begun = 0

    def wait(self, step: int) -> None:
        """Wait before a step, if two have been made with so many ranks."""
        size = dist.get_world_size()
        if size != self._size:
            self._size, self._begun = size, step
        if FIRST:
            self._wait_for_newcomers(step, size)
        elif os.environ["RANK"] == "0" and SIZES and SIZES[0] == size and step >= self._begun + 2:
            SIZES.pop(0)
            print(f"waits in a group of {size}", flush=True)
            until_others_than(members() if len(members()) == size else ())

    def _wait_for_newcomers(self, step: int, size: int) -> None:
        """Wait until they are there, or are lost for good, maybe before they were; losses come first."""
        if step < 2 or dist.get_rank() or newcomers():
            return
        print(f"waits in a group of {size}", flush=True)
        before = members()
        never = threading.Event()
        while members() == before and not newcomers():
            never.wait(0.02)


def newcomers() -> list[int]:
    """Return those of the job's newest view, and those that will not come (back)."""
    latest = world().worker.latest
    return [rank for rank in (*latest.ranks, *latest.lost) if rank >= FIRST]


def members() -> tuple[int, ...]:
    """Return the ranks of the job's newest view."""
    found: tuple[int, ...] = world().worker.latest.ranks
    return found


def until_others_than(ranks: tuple[int, ...]) -> None:
    """Return once the job has other ranks; some of them may have no part in the loop."""
    never = threading.Event()
    while members() == ranks:
        never.wait(0.02)


def model_of(kind: str) -> Any:
    """Return a model; its layers have rows that no number of ranks divides."""
    net = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.1), nn.Linear(9, 1))
    if kind == "ddp":
        return importlib.import_module("torch.nn.parallel").DistributedDataParallel(net)
    fully_shard: Any = importlib.import_module("torch.distributed.fsdp").fully_shard
    options: dict[str, Any] = {}
    if kind == "hybrid":
        meshes: Any = importlib.import_module("torch.distributed.device_mesh")
        shape, names = (dist.get_world_size() // 2, 2), ("replicate", "shard")
        options["mesh"] = meshes.init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(net[0], **options)
    return fully_shard(net, **options)


def tell_whole(model: Any, optimizer: Any) -> None:
    """Print a digest of all parameters and moments, which is the same on all ranks."""
    found = hashlib.sha256()
    for each in model.parameters():
        for value in (each, *(moment for _, moment in sorted(optimizer.state.get(each, {}).items()))):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found.update(repr(whole.detach().tolist()).encode())
    print(f"ends with {found.hexdigest()[:16]}", flush=True)


def main() -> None:
    """Train."""
    if "EARLY" in os.environ and int(os.environ["RANK"]) >= FIRST:
        os.kill(os.getpid(), signal.SIGKILL)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    torch.manual_seed(1)
    model = model_of(KIND)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    run = zbmd.torch.resilient(model, optimizer, scheduler, out=OUT, exact=EXACT if KIND == "ddp" else False)
    numbers = torch.Generator().manual_seed(5)
    samples = data.TensorDataset(torch.randn(40, 4, generator=numbers))
    waits = Waits()
    for (x,) in run.batches(
        data.DataLoader(samples, 4, sampler=distributed.DistributedSampler(samples)), epochs=2
    ):
        waits.wait(run.steps)
        with run.step():
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            run.mean(loss=loss, ranks=dist.get_world_size())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    if FIRST:
        tell_whole(model, optimizer)
    else:
        print(f"ends with {run.metrics['ranks']:g} ranks", flush=True)
    dist.destroy_process_group()


main()
