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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import uvloop

from zbmd.actors.cluster.jobs.host import HostConfig
from zbmd.actors.view import OnLoss
from zbmd.tools.bench.peer_catalogue import PeerMissing
from zbmd.tools.bench.result import BenchResult, Contestant, Measurement, new_result
from zbmd.tools.bench.run import rows_of
from zbmd.tools.bench.run_ranks import run_ranks
from zbmd.tools.bench.stats import OURS, ROUNDS_MAX, parse_sizes
from zbmd.tools.bench.torch.calls import CALLS, GLOO, time_calls
from zbmd.tools.bench.torch.steps import STEPS, Model, time_steps
from zbmd.tools.cli.launch import free_port
from zbmd.tools.cli.options import add_sizes, add_turns, listed
from zbmd.transport.errors import UserError

MODULE: Final = "zbmd.tools.bench.torch.benchmark"
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
        return list(rows(found)), [
            Contestant(name=peer, version=version, command=command) for peer in plan.peers
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
