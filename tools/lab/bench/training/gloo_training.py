"""A rank of `bench.training.torch_steps`: steps of DDP and FSDP2 over zbmd and over gloo, in turns, in the
same processes.

`zbmd-node run` starts it: `gloo_training.py ROUNDS STEPS WIDTH LAYERS TOKENS CASE…`. Rank 0 prints a line
of JSON for each turn.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from zbmd.tools.bench.stats import turns

BACKENDS: Final = ("zbmd", "gloo")
WARMUP_STEPS: Final = 3
HEADS: Final = 4
VOCABULARY: Final = 256
LOSS_ERROR_MAX: Final = 1e-4
"""What the order of a sum may make of a loss, relatively."""


class Trainer:
    """A model of `layers` transformer blocks, `width` wide, over one backend.

    Every rank trains on `tokens` random tokens a step, other ones on each rank. case: "ddp" or "fsdp2".
    """

    def __init__(self, case: str, group: Any, *, width: int, layers: int, tokens: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        dist: Any = importlib.import_module("torch.distributed")
        torch, nn = self._torch, self._torch.nn
        torch.manual_seed(0)
        blocks = [
            nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        ]
        model = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))
        self.parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        if case == "ddp":
            parallel: Any = importlib.import_module("torch.nn.parallel")
            self._model = parallel.DistributedDataParallel(model, process_group=group)
        else:
            fsdp: Any = importlib.import_module("torch.distributed.fsdp")
            meshes: Any = importlib.import_module("torch.distributed.device_mesh")
            mesh = meshes.DeviceMesh.from_group(group, "cpu")
            for block in blocks:
                fsdp.fully_shard(block, mesh=mesh)
            self._model = fsdp.fully_shard(model, mesh=mesh)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._batches = torch.Generator().manual_seed(dist.get_rank())
        self._tokens = tokens

    def step(self) -> float:
        """One step; returns this rank's loss."""
        torch = self._torch
        x = torch.randint(VOCABULARY, (1, self._tokens + 1), generator=self._batches)
        said = self._model(x[:, :-1])
        loss = torch.nn.functional.cross_entropy(said.flatten(0, 1), x[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss)


def timed_ms(step: Callable[[], float], steps: int) -> tuple[list[float], float]:
    """Milliseconds of each step, and the last loss."""
    took: list[float] = []
    loss = 0.0
    for _ in range(steps):
        began = time.perf_counter_ns()
        loss = step()
        took.append((time.perf_counter_ns() - began) / 1e6)
    return took, loss


def check_losses(case: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    """The loss after each turn. Raises RuntimeError if they differ.

    After turn k both have made the same steps, from the same weights over the same tokens.
    """
    for turn, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if not abs(one - other) <= LOSS_ERROR_MAX * abs(other):
            raise RuntimeError(f"{case}, turn {turn}: the loss is {one} over zbmd, {other} over gloo")


def main() -> None:
    """Train in turns; see `check_losses`."""
    rounds, steps, width, layers, tokens = map(int, sys.argv[1:6])
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    importlib.import_module("zbmd.torch")
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    groups = {"zbmd": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    for case in sys.argv[6:]:
        trainers = {
            who: Trainer(case, group, width=width, layers=layers, tokens=tokens)
            for who, group in groups.items()
        }
        for trainer in trainers.values():
            timed_ms(trainer.step, WARMUP_STEPS)
        losses: dict[str, list[float]] = {who: [] for who in BACKENDS}
        for order in turns(["gloo"], rounds):
            for who in order:
                dist.barrier()
                took, loss = timed_ms(trainers[who].step, steps)
                losses[who].append(loss)
                if dist.get_rank() == 0:
                    told = {"case": case, "who": who, "ms": took}
                    print(json.dumps({**told, "mib": trainers[who].parameter_bytes / (1 << 20)}), flush=True)
        check_losses(case, losses["zbmd"], losses["gloo"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
