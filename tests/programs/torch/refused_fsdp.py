"""Try what a resilient loop over FSDP2 refuses before its first step; rank 0 prints the errors."""

from __future__ import annotations

import importlib
from typing import Any

import zbmd.torch
from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
nn: Any = importlib.import_module("torch.nn")
fsdp: Any = importlib.import_module("torch.distributed.fsdp")
tensors: Any = importlib.import_module("torch.distributed.tensor")
meshes: Any = importlib.import_module("torch.distributed.device_mesh")


class Scaled(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """Divides by the norm of all gradients, over all ranks."""

    def step(self, closure: Any = None) -> Any:
        """Update."""
        total = torch.ones(1)
        dist.all_reduce(total)
        return super().step(closure)


class Normed(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Takes a norm of each parameter, which is one of all shards."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def step(self, closure: Any = None) -> None:
        """Update."""
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad / (1.0 + each.grad.norm()), alpha=group["lr"])


class Counting(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """Counts outside of its state."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        """Update."""
        self.calls = self.calls + 1
        return super().step(closure)


def tell(name: str, model: Any, *optimizers: Any) -> None:
    """Print the error of a loop."""
    try:
        zbmd.torch.resilient(model, [*optimizers])
    except UserError as error:
        if dist.get_rank() == 0:
            print(f"{name}: {error}", flush=True)
    else:
        raise AssertionError(f"{name} was not refused")


def main() -> None:
    """Try them."""
    dist.init_process_group("zbmd")
    mesh = meshes.init_device_mesh("cpu", (dist.get_world_size(),))
    model = fsdp.fully_shard(nn.Linear(8, 8), mesh=mesh)
    own = list(model.parameters())
    tell("scaled", model, Scaled(own, lr=0.1))
    tell("normed", model, Normed(own))
    tell("counting", model, Counting(own, lr=0.1))
    tell("closure", model, torch.optim.LBFGS(own))
    tell("two", model, torch.optim.SGD(own[:1], lr=0.1), torch.optim.SGD(own[1:], lr=0.1))
    other = nn.Linear(8, 8)
    other.weight = nn.Parameter(tensors.distribute_tensor(other.weight.detach(), mesh, [tensors.Shard(0)]))
    tell("tensor parallel", other, torch.optim.SGD(other.parameters(), lr=0.1))
    dist.destroy_process_group()


main()
