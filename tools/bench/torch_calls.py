"""Calls of `torch.distributed` and steps of DDP and FSDP2 over zbmd, beside gloo in the same processes.

Needs PyTorch (`pip install 'zbmd[torch]'`). Everyone has a turn in each round. `send` is half a round trip of
`dist.send` and `dist.recv`; sizes are those of the tensor that a rank gives. A step is of a transformer, and
its size is that of the parameters; both backends must come to the same losses.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import uvloop

from zbmd.actors.cluster.jobs.host import HostConfig
from zbmd.actors.view import OnLoss
from zbmd.tools.bench.peer_catalogue import PeerMissing
from zbmd.tools.bench.result import BenchResult, Contestant, Measurement, new_result
from zbmd.tools.bench.run import rows_of
from zbmd.tools.bench.run_ranks import run_ranks
from zbmd.tools.bench.stats import ALONE, OURS, ROUNDS_MAX, iterations_for, parse_sizes, turns
from zbmd.tools.cli.options import add_sizes, add_turns, listed
from zbmd.transport.errors import UserError
from zbmd.transport.tcp.sockets import free_port

ITERATIONS_MAX: Final = 300
ELEMENT_BYTES: Final = 4
WARM_CALLS: Final = 3
GLOO: Final = "gloo"


class Calls:
    """Make the timed calls of one process group, over tensors of `nbytes`."""

    def __init__(self, group: Any, nbytes: int) -> None:
        torch: Any = importlib.import_module("torch")
        self._dist: Any = importlib.import_module("torch.distributed")
        self._group, self._rank, size = group, self._dist.get_rank(), self._dist.get_world_size()
        self._x = torch.zeros(max(1, nbytes // ELEMENT_BYTES))
        self._rows = torch.zeros(max(size, nbytes // ELEMENT_BYTES // size * size))
        self._received = torch.zeros_like(self._rows)
        self._gathered = torch.zeros(size * self._x.numel())
        self._part = torch.zeros(self._rows.numel() // size)

    def send(self) -> None:
        """A message to the next rank's pair, and its answer; the ranks beyond the second do nothing."""
        send, receive, group = self._dist.send, self._dist.recv, self._group
        if self._rank == 0:
            send(self._x, 1, group=group)
            receive(self._x, 1, group=group)
        elif self._rank == 1:
            receive(self._x, 0, group=group)
            send(self._x, 0, group=group)

    def all_reduce(self) -> None:
        """Reduce a tensor over all ranks."""
        self._dist.all_reduce(self._x, group=self._group)

    def broadcast(self) -> None:
        """Send the first rank's tensor to all."""
        self._dist.broadcast(self._x, 0, group=self._group)

    def reduce_scatter(self) -> None:
        """Reduce rows over all ranks; each keeps its own part."""
        self._dist.reduce_scatter_tensor(self._part, self._rows, group=self._group)

    def all_to_all(self) -> None:
        """Send each rank its rows."""
        self._dist.all_to_all_single(self._received, self._rows, group=self._group)

    def all_gather(self) -> None:
        """Collect the tensors of all ranks."""
        self._dist.all_gather_into_tensor(self._gathered, self._x, group=self._group)


CALLS: Final = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send")
ONE_WAY: Final = ("send",)
"""Timed as a round trip, of which half counts."""


def timed_ns(call: Callable[[], object], iterations: int) -> list[float]:
    """Nanoseconds of each call."""
    took: list[float] = []
    for _ in range(iterations):
        began = time.perf_counter_ns()
        call()
        took.append(float(time.perf_counter_ns() - began))
    return took


def time_calls(
    groups: Mapping[str, Any], call: str, sizes: Sequence[int], rounds: int
) -> Iterator[dict[str, Any]]:
    """Make a call in turns over the group of each contender; yield each turn. All ranks run this."""
    dist: Any = importlib.import_module("torch.distributed")
    peers = [who for who in groups if who != OURS]
    for nbytes in sizes:
        iterations = min(ITERATIONS_MAX, iterations_for(nbytes))
        made = {who: getattr(Calls(group, nbytes), call) for who, group in groups.items()}
        for each in made.values():
            timed_ns(each, WARM_CALLS)
        for order in turns(peers, rounds):
            for who in order:
                dist.barrier()
                ways = 2 if call in ONE_WAY else 1
                took = [each / ways for each in timed_ns(made[who], iterations)]
                yield {"case": call, "size": nbytes, "who": who, "ns": took}


ARENA: Final = "_arena"
DDP: Final = ("ddp", f"ddp{ARENA}")
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

    Every rank trains on random tokens, other ones on each rank. case: of `STEPS`. group: None for a model of
    each rank's own. ours: whether it is zbmd.
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
        if group is None:
            self._model = model
        elif case in DDP:
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
    contenders = {**groups, ALONE: None} if case in DDP else groups
    trainers = {who: Trainer(case, group, model, ours=who == OURS) for who, group in contenders.items()}
    for trainer in trainers.values():
        timed_ns(trainer.step, WARMUP_STEPS)
    losses: dict[str, list[float]] = {who: [] for who in contenders}
    for order in turns([who for who in contenders if who != OURS], rounds):
        for who in order:
            dist.barrier()
            took = timed_ns(trainers[who].step, model.steps)
            losses[who].append(trainers[who].loss)
            yield {"case": case, "size": trainers[who].parameter_bytes, "who": who, "ns": took}
    for peer in peers:
        check_losses(case, losses[OURS], losses[peer])


MODULE: Final = "zbmd.tools.bench.torch_calls"
CASES: Final = (*CALLS, *STEPS)
SIZES_DEFAULT: Final = "4:64M:16"
ROUNDS_DEFAULT: Final = 3
RANKS_MAX: Final = 16
ARENA_BYTES: Final = 256 << 20
RUN_S_MAX: Final = 3600.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark, as it is sent to its ranks: JSON."""

    cases: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int
    peers: tuple[str, ...]
    model: Model


def add_arguments(kind: argparse.ArgumentParser) -> None:
    """Add what says what is timed."""
    add_sizes(kind, SIZES_DEFAULT)
    cases = f"time only: {', '.join(CASES)}"
    kind.add_argument("--cases", action="append", default=[], metavar="CASES", help=cases)
    add_turns(kind, [GLOO], ROUNDS_DEFAULT)
    kind.add_argument("--ranks", type=int, default=2, metavar="N", help="(default: %(default)s)")
    model = Model()
    for name, text in (
        ("width", "of the model in a step"),
        ("layers", "of that model"),
        ("tokens", "of a rank and step"),
        ("steps", "of a turn"),
    ):
        default = getattr(model, name)
        kind.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (%(default)s)")


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return what is asked for. Raises `UserError`."""
    model = Model(**{name: getattr(arguments, name) for name in Model.__struct_fields__})
    model.check()
    if not 1 <= arguments.rounds <= ROUNDS_MAX or not 2 <= arguments.ranks <= RANKS_MAX:
        raise UserError(f"--rounds: 1 to {ROUNDS_MAX}; --ranks: 2 to {RANKS_MAX}")
    return Plan(
        cases=listed("--cases", arguments.cases, CASES) or CASES,
        sizes=tuple(parse_sizes(arguments.sizes)),
        rounds=arguments.rounds,
        peers=listed("--vs", arguments.vs, [GLOO]),
        model=model,
    )


def results(arguments: argparse.Namespace) -> BenchResult:
    """Everyone timed. Raises `UserError`, and `PeerMissing` without PyTorch."""
    plan = plan_of(arguments)
    if importlib.util.find_spec("torch") is None:
        raise PeerMissing("PyTorch is not installed: pip install 'zbmd[torch]'")

    def measure() -> tuple[list[Measurement], list[Contestant]]:
        found = uvloop.run(_run(plan, arguments.ranks))
        version = str(importlib.import_module("torch").__version__)
        command = f"{arguments.ranks} ranks, in the same processes"
        others = (*plan.peers, *([ALONE] if set(plan.cases) & set(DDP) else []))
        return list(rows(found)), [
            Contestant(name=other, version=version, command=command) for other in others
        ]

    return new_result("torch", "shm", plan.rounds, measure)


def rows(found: Sequence[Mapping[str, Any]]) -> Iterator[Measurement]:
    """Yield the measurements of every case and size, ours first, from what rank 0 reported of each turn."""
    samples: dict[tuple[str, int], dict[str, list[list[float]]]] = {}
    for turn in found:
        of_all = samples.setdefault((turn["case"], turn["size"]), defaultdict(list))
        of_all[turn["who"]].append(turn["ns"])
    for (case, nbytes), of_all in samples.items():
        yield from rows_of(case, nbytes, of_all)


async def _run(plan: Plan, ranks: int) -> list[dict[str, Any]]:
    """Return what rank 0 reported of each turn. Raises `UserError` with the last lines if the ranks fail."""
    config = HostConfig(
        target=MODULE,
        is_module=True,
        arguments=(msgspec.json.encode(plan).decode(),),
        world_size=ranks,
        on_loss=OnLoss.STOP,
        arena_bytes=ARENA_BYTES,
        environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"},
    )
    async with asyncio.timeout(RUN_S_MAX):
        return await run_ranks(config)


def be_rank(text: str) -> None:
    """Carry out a plan as one of its ranks; rank 0 prints a line of JSON for each turn."""
    plan = msgspec.json.decode(text, type=Plan)
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    dist.init_process_group(OURS)
    groups = {OURS: dist.group.WORLD, **{peer: dist.new_group(backend=peer) for peer in plan.peers}}
    for case in plan.cases:
        if case in STEPS:
            turns = time_steps(groups, case, plan.model, plan.rounds)
        else:
            turns = time_calls(groups, case, plan.sizes, plan.rounds)
        for turn in turns:
            if dist.get_rank() == 0:
                print(json.dumps(turn), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    be_rank(sys.argv[1])
