"""Steps of DDP and FSDP2, made by the ranks of a job over zbmd and over gloo in turns.

The same processes, model and tokens; both must come to the same losses. In `ddp_arena` and `fsdp2_arena` the
buffers of ours lie in the arena (`zbmd.torch.use_arena`); gradients of DDP are views of its buckets for both.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from zbmd.tools.bench.stats import OURS, turns
from zbmd.tools.bench.torch.calls import timed_ns
from zbmd.transport.errors import UserError

ARENA: Final = "_arena"
STEPS: Final = ("ddp", "fsdp2", f"ddp{ARENA}", f"fsdp2{ARENA}")
WARMUP_STEPS: Final = 3
HEADS: Final = 4
VOCABULARY: Final = 256
LOSS_ERROR_MAX: Final = 1e-4
"""Relative difference of a loss that the order of a sum may make."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The model, and how long a turn is: blocks of a transformer, tokens of a rank and step, steps."""

    width: int = 256
    layers: int = 4
    tokens: int = 64
    steps: int = 10

    def check(self) -> None:
        """Raise `UserError` unless it can be made."""
        if min(self.width, self.layers, self.tokens, self.steps) < 1 or self.width % HEADS:
            raise UserError(f"give positive numbers, and a --width divisible by {HEADS}")


class Trainer:
    """A model of transformer blocks over one backend.

    Every rank trains on random tokens, other ones on each rank. case: of `STEPS`. ours: whether it is zbmd.
    """

    def __init__(self, case: str, group: Any, model_of: Model, *, ours: bool) -> None:
        self._torch: Any = importlib.import_module("torch")
        dist: Any = importlib.import_module("torch.distributed")
        torch, nn = self._torch, self._torch.nn
        width, layers, tokens = model_of.width, model_of.layers, model_of.tokens
        torch.manual_seed(0)
        blocks = [
            nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        ]
        model = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))
        self.parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        if case.removesuffix(ARENA) == "ddp":
            parallel: Any = importlib.import_module("torch.nn.parallel")
            self._model = parallel.DistributedDataParallel(
                model, process_group=group, gradient_as_bucket_view=case.endswith(ARENA)
            )
        else:
            fsdp: Any = importlib.import_module("torch.distributed.fsdp")
            meshes: Any = importlib.import_module("torch.distributed.device_mesh")
            mesh = meshes.DeviceMesh.from_group(group, "cpu")
            for block in blocks:
                fsdp.fully_shard(block, mesh=mesh)
            self._model = fsdp.fully_shard(model, mesh=mesh)
        if ours and case.endswith(ARENA):
            importlib.import_module("zbmd.collectives.torch.memory").use_arena(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._batches = torch.Generator().manual_seed(dist.get_rank())
        self._tokens = tokens
        self.loss = 0.0
        """Of this rank, in the last step."""

    def step(self) -> None:
        """Make a step."""
        torch = self._torch
        x = torch.randint(VOCABULARY, (1, self._tokens + 1), generator=self._batches)
        said = self._model(x[:, :-1])
        loss = torch.nn.functional.cross_entropy(said.flatten(0, 1), x[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.loss = float(loss)


def check_losses(case: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    """The loss after each turn. Raises RuntimeError if they differ.

    After turn k both have made the same steps, from the same weights over the same tokens.
    """
    for turn, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if not abs(one - other) <= LOSS_ERROR_MAX * abs(other):
            raise RuntimeError(f"{case}, turn {turn}: the loss is {one} over zbmd, {other} over the peer")


def time_steps(groups: Mapping[str, Any], case: str, model: Model, rounds: int) -> Iterator[dict[str, Any]]:
    """Train in turns over the group of each contender; yield each turn. All ranks run this.

    Raises RuntimeError if the losses differ.
    """
    dist: Any = importlib.import_module("torch.distributed")
    peers = [who for who in groups if who != OURS]
    trainers = {who: Trainer(case, group, model, ours=who == OURS) for who, group in groups.items()}
    for trainer in trainers.values():
        timed_ns(trainer.step, WARMUP_STEPS)
    losses: dict[str, list[float]] = {who: [] for who in groups}
    for order in turns(peers, rounds):
        for who in order:
            dist.barrier()
            took = timed_ns(trainers[who].step, model.steps)
            losses[who].append(trainers[who].loss)
            yield {"case": case, "size": trainers[who].parameter_bytes, "who": who, "ns": took}
    for peer in peers:
        check_losses(case, losses[OURS], losses[peer])
