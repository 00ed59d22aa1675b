"""A resilient loop whose optimizers communicate in `step()`, which prints what a killed run must match.

Variable MODE: what the model is (ddp, fsdp, hybrid) and its optimizers (normed; muon: two of them; cornered:
one with a state whose shape follows from the number of ranks), joined by +; exact: with logical shares. OUT:
the directory of its records; then it tells the whole state that it ends with.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from typing import Any

import zbmd.torch
from zbmd.transport import kill_points as faults

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
nn: Any = importlib.import_module("torch.nn")
fsdp: Any = importlib.import_module("torch.distributed.fsdp")
meshes: Any = importlib.import_module("torch.distributed.device_mesh")
parallel: Any = importlib.import_module("torch.nn.parallel")
data: Any = importlib.import_module("torch.utils.data")
distributed: Any = importlib.import_module("torch.utils.data.distributed")

MODES = set(os.environ.get("MODE", "fsdp+normed").split("+"))
BEFORE = faults.declare("test.before_reduce", "when step() has written, before its all-reduce")
AFTER = faults.declare("test.after_reduce", "when its all-reduce is done, and not all is written")


def local(tensor: Any) -> Any:
    """Return this rank's part of a tensor."""
    return getattr(tensor, "_local_tensor", tensor)


class Normed(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """Scales updates by a norm over all ranks, and counts in an attribute."""

    calls = 0

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def step(self, closure: Any = None) -> Any:
        """Update."""
        total = torch.zeros(())
        self.calls = self.calls + 1
        updated = [each for group in self.param_groups for each in group["params"]]
        for each in updated:
            total += local(each.grad).square().sum()
            local(each).mul_(1 - 1e-3)  # which is to be undone if the step is repeated
        faults.hit(BEFORE)
        dist.all_reduce(total)
        faults.hit(AFTER)
        for each in updated:
            local(each.grad).div_(1 + total.sqrt() / self.calls)
            seen = self.state[each].setdefault("seen", torch.zeros_like(local(each)))
            seen.add_(local(each.grad).abs())
        return super().step(closure)


class Cornered(Normed):
    """Keeps a number of each rank."""

    def step(self, closure: Any = None) -> Any:
        """Update."""
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each].setdefault("of ranks", torch.zeros(dist.get_world_size(), 3))
        return super().step(closure)


class Muon(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Moves matrices by the orthogonal part of their momentum, which each rank has as a shard."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def step(self, closure: Any = None) -> None:
        """Update."""
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                momentum = state.setdefault("momentum", torch.zeros_like(each))
                momentum.mul_(0.9).add_(each.grad)
                faults.hit(BEFORE)
                whole = momentum.full_tensor() if hasattr(momentum, "full_tensor") else momentum
                faults.hit(AFTER)
                x = whole / (whole.norm() + 1e-6)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                begin = local_begin(each)
                local(each).sub_(x[begin : begin + len(local(each))], alpha=group["lr"])


def local_begin(parameter: Any) -> int:
    """Return the first row that this rank has of a parameter."""
    if not hasattr(parameter, "device_mesh"):
        return 0
    mesh = parameter.device_mesh
    ranks, at = mesh.size(mesh.ndim - 1), mesh.get_coordinate()[-1]
    first: int = min(len(parameter), at * -(-len(parameter) // ranks))
    return first


def built() -> tuple[Any, list[Any]]:
    """Return the model and its optimizers."""
    norm = nn.LayerNorm(7) if "exact" in MODES else nn.BatchNorm1d(7)
    net = nn.Sequential(nn.Linear(10, 7), nn.GELU(), norm, nn.Linear(7, 5))
    if "ddp" in MODES:
        model = parallel.DistributedDataParallel(net)
    else:
        size = dist.get_world_size()
        shape, names = ((size,), None) if "fsdp" in MODES else ((2, size // 2), ("replicate", "shard"))
        model = fsdp.fully_shard(net, mesh=meshes.init_device_mesh("cpu", shape, mesh_dim_names=names))
    every = [*model.parameters()]
    torch.optim.SGD([torch.zeros(1)])  # from now on its step() calls hooks, inside that of Normed, too
    if "cornered" in MODES:
        return model, [Cornered(every, lr=0.05)]
    if "normed" in MODES:
        return model, [Normed(every, lr=0.05, momentum=0.9)]
    matrices, others = ([each for each in every if (each.dim() == 2) is wanted] for wanted in (True, False))
    return model, [Muon(matrices), torch.optim.AdamW(others, lr=1e-2)]


def digest(*values: Any) -> str:
    """Return a digest of tensors and numbers."""
    found = hashlib.sha256()
    for value in values:
        is_tensor = isinstance(value, torch.Tensor)
        found.update(repr(local(value).detach().tolist() if is_tensor else value).encode())
    return found.hexdigest()[:16]


def tell_whole(optimizers: list[Any]) -> None:
    """Print a digest of all shards together, with their moments, if the loop is recorded."""
    if "OUT" not in os.environ:
        return
    whole = [
        whole_of(value, each)
        for optimizer in optimizers
        for each in (parameter for group in optimizer.param_groups for parameter in group["params"])
        for value in (each, *(moment for _, moment in sorted(optimizer.state[each].items())))
    ]
    calls = [getattr(each, "calls", 0) for each in optimizers]
    print(f"ends with {digest(*whole, calls)}", flush=True)


def whole_of(value: Any, parameter: Any) -> Any:
    """Return what all ranks have of a moment."""
    if not hasattr(parameter, "device_mesh") or not isinstance(value, torch.Tensor) or not value.dim():
        return value
    if not hasattr(value, "full_tensor"):
        value = type(parameter.data).from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return value.full_tensor()


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    torch.manual_seed(1)
    model, optimizers = built()
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    numbers = torch.Generator().manual_seed(5)
    samples = data.TensorDataset(torch.randn(96, 10, generator=numbers), torch.arange(96))
    loader = data.DataLoader(samples, 8, sampler=distributed.DistributedSampler(samples))
    run = zbmd.torch.resilient(
        model,
        optimizers,
        *schedulers,
        mirror="ddp" in MODES,
        out=os.environ.get("OUT"),
        exact="exact" in MODES,
    )
    log: list[Any] = []
    for x, index in run.batches(loader, epochs=2):
        with run.step():
            for each in optimizers:
                each.zero_grad()
            loss = (model(x) - x[:, :5].sin()).square().mean()
            loss.backward()
            run.mean(loss=loss)
            for each in optimizers:
                each.step()
            for each in schedulers:
                each.step()
            log.append((run.steps, tuple(index.tolist()), run.metrics["loss"]))
    tell_whole(optimizers)
    rank, calls = dist.get_rank(), [getattr(each, "calls", 0) for each in optimizers]
    moments = [
        value
        for optimizer in optimizers
        for each in (parameter for group in optimizer.param_groups for parameter in group["params"])
        for _, value in sorted(optimizer.state[each].items())
    ]
    for entry in log:
        print(f"step {entry[0]} rank {rank}: {digest(*entry)}", flush=True)
    kinds = [hasattr(value, "device_mesh") for value in moments]
    final = digest(*model.parameters(), *model.buffers(), *moments, calls, kinds)
    print(f"final rank {rank}: {final} {schedulers[0].get_last_lr()}", flush=True)
    dist.destroy_process_group()


main()
