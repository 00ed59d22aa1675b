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


class Hoarding(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """Communicates, and keeps tensors where nobody looks."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.kept = {"mean": torch.zeros(3)}

    def step(self, closure: Any = None) -> Any:
        """Update."""
        dist.all_reduce(self.kept["mean"])
        return super().step(closure)


class Hidden(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """Has its parameters twice."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.others = parameters

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def step(self, closure: Any = None) -> None:
        """Update."""
        for each in self.others:
            each.sub_(0.1)


class Late(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """Communicates once its momentum is old, which two steps of a copy do not show."""

    def step(self, closure: Any = None) -> Any:
        """Update."""
        for each in self.param_groups[0]["params"]:
            state = self.state[each]
            state["age"] = state.get("age", 0) + 1
            if state["age"] == 3:
                dist.all_reduce(torch.ones(1))
        return super().step(closure)


def tell(name: str, model: Any, *optimizers: Any) -> None:
    """Print the error of a loop."""
    try:
        run = zbmd.torch.resilient(model, [*optimizers])
        while run.steps < 3:
            with run.step():
                model(torch.ones(2, 8)).sum().backward()
                optimizers[0].step()
    except (UserError, RuntimeError) as error:
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
    tell("attribute", model, Hoarding(own, lr=0.1))
    tell("outside", model, Hidden(own, lr=0.1))
    other = nn.Linear(8, 8)
    other.weight = nn.Parameter(tensors.distribute_tensor(other.weight.detach(), mesh, [tensors.Shard(0)]))
    tell("tensor parallel", other, torch.optim.SGD(other.parameters(), lr=0.1))
    tell("late", model, Late(own, lr=0.1))  # the last one: its loop has begun
    dist.destroy_process_group()


main()
