"""A resilient loop over FSDP2, which prints for each rank what a killed run must have in common with another.

Variables: MODE (plain, fused, momentum, mixed, kept, hybrid, scaler, every, unseen), or some, joined by +;
OUT, the directory of the run, EVERY and SAVE, after how many steps it is saved beside them and before all go
on, and RESUME; EPOCHS; WHOLE.
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
functional: Any = importlib.import_module("torch.nn.functional")
fsdp: Any = importlib.import_module("torch.distributed.fsdp")
meshes: Any = importlib.import_module("torch.distributed.device_mesh")
data: Any = importlib.import_module("torch.utils.data")
distributed: Any = importlib.import_module("torch.utils.data.distributed")

MODES = set(os.environ.get("MODE", "plain").split("+"))
EPOCHS = int(os.environ.get("EPOCHS", "2"))


class Block(nn.Module):  # type: ignore[misc, name-defined]
    """Two layers, of sizes that no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 8_003 if "fused" in MODES else 22  # some are sent as large messages are
        self.a, self.b = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        """Return the shape of `x`."""
        return x + self.drop(self.b(functional.gelu(self.a(x))))


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """Blocks; the last layer has one row, so most ranks have nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(10) for _ in range(2)])
        self.norm = nn.LayerNorm(10) if "mixed" in MODES else nn.BatchNorm1d(10)
        self.frozen = nn.Linear(10, 10)
        self.frozen.requires_grad_(False)
        self.out = nn.Linear(10, 1)

    def forward(self, x: Any) -> Any:
        """Return (n, 1) of (n, 10)."""
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(self.frozen(x)))


def digest(*values: Any) -> str:
    """Return a digest of the bits of tensors and numbers, of DTensors those of their shards."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        value = getattr(value, "_local_tensor", value)
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


def sharded() -> Any:
    """Return the model."""
    options: dict[str, Any] = {}
    if "mixed" in MODES:
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if "kept" in MODES:
        options["reshard_after_forward"] = False
    size = dist.get_world_size()
    if "hybrid" in MODES:
        options["mesh"] = meshes.init_device_mesh(
            "cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")
        )
    else:
        options["mesh"] = meshes.init_device_mesh("cpu", (size,))
    net = Net()
    for block in net.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(net, **options)


def optimizer_of(model: Any) -> Any:
    """Return an optimizer with two groups of parameters."""
    biases = [each for name, each in model.named_parameters() if each.requires_grad and "bias" in name]
    others = [each for name, each in model.named_parameters() if each.requires_grad and "bias" not in name]
    groups = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
    if "momentum" in MODES:
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, foreach="fused" not in MODES)
    if "fused" in MODES:
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)
    return torch.optim.AdamW(groups, lr=1e-2, foreach=True)


def miss_a_vote(run: Any) -> None:
    """Have rank 0 act as if it had not seen the votes of version 5, when rank 1, which has, is killed."""
    errors: Any = importlib.import_module("zbmd.collectives.errors")
    vote = run._vote

    def missed(**options: Any) -> Any:
        rows = vote(**options)
        if run.version == 5 and os.environ["ZBMD_INCARNATION"] == "1":
            print("as if the votes had not come", flush=True)
            raise errors.OperationAborted("as if the votes had not come")
        return rows

    if dist.get_rank() == 0:
        run._vote = missed


def saving() -> dict[str, Any]:
    """Return the options of a run that is saved."""
    if "OUT" not in os.environ:
        return {}
    every = int(os.environ.get("EVERY", "0"))
    return {"out": os.environ["OUT"], "checkpoint_every": every, "resume": "RESUME" in os.environ}


def tell_whole(when: str, model: Any, optimizer: Any) -> None:
    """Print a digest of all shards together, with their moments, if WHOLE is set."""
    if "WHOLE" not in os.environ:
        return
    whole = [
        value.full_tensor() if hasattr(value, "full_tensor") else value
        for each in model.parameters()
        for value in (each, *(moment for _, moment in sorted(optimizer.state.get(each, {}).items())))
    ]
    print(f"{when} with {digest(whole)}", flush=True)


def main() -> None:
    """Train."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    torch.manual_seed(1)
    model = sharded()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in MODES, init_scale=2.0**126, growth_interval=3)
    numbers = torch.Generator().manual_seed(5)
    samples = data.TensorDataset(torch.randn(96, 10, generator=numbers), torch.arange(96))
    loader = data.DataLoader(samples, 8, sampler=distributed.DistributedSampler(samples))
    run = zbmd.torch.resilient(model, optimizer, scheduler, scaler, **saving())
    if "SAVE" in os.environ:
        run.every(int(os.environ["SAVE"]), run.save)
    tell_whole("begins", model, optimizer)
    if "unseen" in MODES:
        miss_a_vote(run)
    log: list[Any] = []

    def evaluate() -> None:
        with torch.no_grad():
            model.eval()
            model(samples.tensors[0])  # leaves the root's parameters whole
            model.train()

    if "every" in MODES:
        run.every(2, evaluate)
    loss = torch.zeros(())
    for x, index in run.batches(loader, epochs=EPOCHS):
        with run.step():
            if {"AWAITS", "STOPS"} & os.environ.keys():
                importlib.import_module("support.jobs.interrupted").interrupted(run.steps)
            optimizer.zero_grad()
            for part, (a, b) in enumerate(
                zip(x.chunk(2), x.sin().sum(1, keepdim=True).chunk(2), strict=True)
            ):
                model.set_requires_gradient_sync(part == 1)
                loss = functional.mse_loss(model(a).float(), b) / 2
                scaler.scale(loss).backward()
            run.mean(loss=loss)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            rate = optimizer.param_groups[0]["lr"]
            log.append((run.steps, tuple(index.tolist()), rate, run.metrics["loss"], scaler.get_scale()))
    rank = dist.get_rank()
    for module in model.modules():
        if hasattr(module, "reshard"):  # a loss after the last evaluation has done so
            module.reshard()
    state = [optimizer.state.get(each, {}) for each in model.parameters()]
    final = digest(list(model.parameters()), list(model.buffers()), state)
    tell_whole("ends", model, optimizer)
    for entry in log:
        print(f"step {entry[0]} rank {rank}: {digest(entry)}", flush=True)
    print(f"final rank {rank}: {final} {scaler.get_scale()} {scheduler.last_epoch}", flush=True)
    dist.destroy_process_group()


main()
