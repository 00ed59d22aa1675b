"""Steps of DDP and FSDP2 over zbmd beside gloo: the same processes, model and tokens, in turns.

    python -m zbmd.tools.lab.bench.training.torch_steps                         2 ranks, 64 tokens a rank and
        step
    python -m zbmd.tools.lab.bench.training.torch_steps --tokens 512 --cases ddp

Takes PyTorch (`pip install 'zbmd[torch]'`). Printed: the time of a step (median and 99th percentile), tokens
a second of all ranks, and our time over gloo's, the median of pairs of one round with its 95 % interval; in
our own row our last turn of a round over our first, the noise. Both backends must come to the same losses.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from zbmd.actors.host.supervisor import Host, HostConfig
from zbmd.actors.process.log import log_to_stderr
from zbmd.actors.process.output import OutputLine
from zbmd.actors.view import OnLoss, Outcome
from zbmd.tools.bench.run import rows_of
from zbmd.tools.bench.stats import OURS
from zbmd.tools.cli.launch import free_port
from zbmd.transport.errors import UserError

CASES: Final = ("ddp", "fsdp2")
ARENA_BYTES: Final = 256 << 20
LINES_KEPT: Final = 20
RUN_S_MAX: Final = 600.0
RANKS_MAX: Final = 16


class _RankOutput:
    """Takes the lines of the ranks: turns, and what else they say."""

    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []
        self.lines: list[str] = []

    async def write_line(self, line: OutputLine) -> None:
        """Keep a turn, or one of the last lines."""
        text = line.text.decode(errors="replace")
        if line.rank == 0 and text.startswith('{"case"'):
            self.turns.append(json.loads(text))
        else:
            self.lines = [*self.lines[1 - LINES_KEPT :], f"{line.rank}: {text}"]


async def run(arguments: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    """What rank 0 told of each turn. Raises `UserError` with the last lines if the ranks fail."""
    told = _RankOutput()
    config = HostConfig(
        target=str(Path(__file__).with_name("gloo_training.py")),
        arguments=tuple(arguments),
        world_size=ranks,
        on_loss=OnLoss.STOP,
        arena_bytes=ARENA_BYTES,
        environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"},
    )
    async with asyncio.timeout(RUN_S_MAX):
        result = await Host(config, output=told).run()
    if result.outcome is not Outcome.SUCCEEDED:
        raise UserError("\n".join([f"the ranks failed: {result.reason}", *told.lines]))
    return told.turns


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
            ratio = ""
            if row.time_ratio is not None:
                ratio = f"{row.time_ratio.value:.2f} ({row.time_ratio.low:.2f} … {row.time_ratio.high:.2f})"
                ratio += " noise" if row.who == OURS else ""
            speed = ranks * tokens / (row.time_us_p50 / 1e6)
            times = f"{row.time_us_p50 / 1e3:9.2f} {row.time_us_p99 / 1e3:9.2f} {speed:10,.0f}"
            lines.append(f"{row.who:6} {times}  {ratio}".rstrip())
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m zbmd.tools.lab.bench.training.torch_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES, help="(ddp fsdp2)")
    parser.add_argument("--ranks", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of a turn (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="a rank and step (%(default)s)")
    asked = parser.parse_args(argv)
    log_to_stderr()
    try:
        numbers = (asked.rounds, asked.steps, asked.width, asked.layers, asked.tokens)
        if min(numbers) < 1 or asked.width % 4 or not 2 <= asked.ranks <= RANKS_MAX:
            raise UserError(f"give positive numbers, a --width divisible by 4, and 2 to {RANKS_MAX} ranks")
        if importlib.util.find_spec("torch") is None:
            raise UserError("PyTorch is not installed: pip install 'zbmd[torch]'")
        found = uvloop.run(run([*map(str, numbers), *asked.cases], asked.ranks))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(found, asked.ranks, asked.tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
