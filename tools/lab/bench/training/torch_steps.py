"""Steps of DDP and FSDP2 over zbmd beside gloo: the same processes, model and tokens, in turns.

    python -m zbmd.tools.lab.bench.training.torch_steps                         2 ranks, 64 tokens a rank and
        step
    python -m zbmd.tools.lab.bench.training.torch_steps --tokens 512 --cases ddp

Takes PyTorch (`pip install 'zbmd[torch]'`). Printed: the time of a step (median and 99th percentile), tokens
a second of all ranks, and our time over gloo's, the median of pairs of one round with its 95 % interval; in
our own row our last turn of a round over our first, the noise. Both backends must come to the same losses.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import uvloop

from zbmd.actors.cluster.jobs.host import HostConfig
from zbmd.actors.process.log import log_to_stderr
from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.view import OnLoss
from zbmd.tools.bench.run import rows_of
from zbmd.tools.bench.stats import OURS, turns
from zbmd.tools.chaos.run_ranks import run_ranks
from zbmd.tools.cli.launch import free_port
from zbmd.tools.cli.options import exit_code_of, script_parser
from zbmd.transport.errors import UserError

# A rank: steps over zbmd and over gloo, in turns, in the same processes.

BACKENDS: Final = ("zbmd", "gloo")
WARMUP_STEPS: Final = 3
HEADS: Final = 4
VOCABULARY: Final = 256
LOSS_ERROR_MAX: Final = 1e-4
"""Relative difference of a loss that the order of a sum may make."""


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


def be_rank(words: Sequence[str]) -> None:
    """Train in turns; see `check_losses`. words: ROUNDS STEPS WIDTH LAYERS TOKENS CASE…

    Rank 0 prints a line of JSON for each turn.
    """
    rounds, steps, width, layers, tokens = map(int, words[:5])
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    importlib.import_module("zbmd.torch")
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    groups = {"zbmd": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    for case in words[5:]:
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


MODULE: Final = "zbmd.tools.lab.bench.training.torch_steps"
CASES: Final = ("ddp", "fsdp2")
ARENA_BYTES: Final = 256 << 20
RUN_S_MAX: Final = 600.0
RANKS_MAX: Final = 16


async def run(arguments: Sequence[str], ranks: int, *, target: str = MODULE) -> list[dict[str, Any]]:
    """Return what rank 0 of the module `target` reported of each turn.

    Raises `UserError` with the last lines if the ranks fail.
    """
    config = HostConfig(
        target=target,
        is_module=True,
        arguments=tuple(arguments),
        world_size=ranks,
        on_loss=OnLoss.STOP,
        arena_bytes=ARENA_BYTES,
        environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"},
    )
    async with asyncio.timeout(RUN_S_MAX):
        return await run_ranks(config)


def table(found: Sequence[Mapping[str, Any]], ranks: int, tokens: int) -> list[str]:
    """Rows a case: ours and gloo's."""
    lines: list[str] = []
    for case in dict.fromkeys(turn["case"] for turn in found):
        mine = [turn for turn in found if turn["case"] == case]
        samples: dict[str, list[list[float]]] = defaultdict(list)
        for turn in mine:
            samples[turn["who"]].append([ms * 1e6 for ms in turn["ms"]])
        lines.append(f"{case}, {ranks} ranks, {tokens} tokens a rank, {mine[0]['mib']:.1f} MiB of parameters")
        lines.append(f"{'':6} {'p50 ms':>9} {'p99 ms':>9} {'tokens/s':>10}  ratio")
        for row in rows_of(case, tokens, samples):
            ratio = "" if row.time_ratio is None else f"{row.time_ratio}{' noise' * (row.who == OURS)}"
            speed = ranks * tokens / (row.time_us_p50 / 1e6)
            times = f"{row.time_us_p50 / 1e3:9.2f} {row.time_us_p99 / 1e3:9.2f} {speed:10,.0f}"
            lines.append(f"{row.who:6} {times}  {ratio}".rstrip())
    return lines


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    if RankEnvironment.read(os.environ) is not None:
        be_rank(sys.argv[1:])
        return 0
    parser = script_parser("lab.bench.training.torch_steps", __doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES, help="(ddp fsdp2)")
    parser.add_argument("--ranks", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of a turn (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="a rank and step (%(default)s)")
    asked = parser.parse_args(argv)
    log_to_stderr()
    numbers = (asked.rounds, asked.steps, asked.width, asked.layers, asked.tokens)
    if min(numbers) < 1 or asked.width % 4 or not 2 <= asked.ranks <= RANKS_MAX:
        raise UserError(f"give positive numbers, a --width divisible by 4, and 2 to {RANKS_MAX} ranks")
    if importlib.util.find_spec("torch") is None:
        raise UserError("PyTorch is not installed: pip install 'zbmd[torch]'")
    found = uvloop.run(run([*map(str, numbers), *asked.cases], asked.ranks))
    print("\n".join(table(found, asked.ranks, asked.tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
