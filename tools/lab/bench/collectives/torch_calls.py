"""Calls of `torch.distributed` over zbmd beside gloo: the same processes and tensors, in turns.

    python -m zbmd.tools.lab.bench.collectives.torch_calls                    every call, 8 B to 64 MiB
    python -m zbmd.tools.lab.bench.collectives.torch_calls --calls send --sizes 8,1M --record FILE

`send` is half a round trip of `dist.send` and `dist.recv`; the others are `dist.all_reduce`,
`dist.all_to_all_single` and `dist.all_gather_into_tensor`, called and waited for one after the other. Sizes
are those of the tensor that a rank gives. Takes PyTorch (`pip install 'zbmd[torch]'`). Ratio: our time over
gloo's, the median of pairs of one round with its 95 % interval; in our own row our last turn over our first,
the noise.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import uvloop

from zbmd.actors.process.log import log_to_stderr
from zbmd.actors.rank.environment import RankEnvironment
from zbmd.tools.bench.figures import Figure, add_record, append_figures, new_figure
from zbmd.tools.bench.result import Measurement, now_utc, this_machine
from zbmd.tools.bench.run import rows_of
from zbmd.tools.bench.stats import OURS, iterations_for, parse_sizes, size_in_words, turns
from zbmd.tools.cli.options import exit_code_of, script_parser
from zbmd.tools.lab.bench.training.torch_steps import RANKS_MAX, run
from zbmd.transport.errors import UserError

MODULE: Final = "zbmd.tools.lab.bench.collectives.torch_calls"
SIZES_DEFAULT: Final = "8:64M:8"
ITERATIONS_MAX: Final = 300
ELEMENT_BYTES: Final = 4
GLOO: Final = "gloo"
GOALS: Final = {"send": 2.0, "all_to_all": 1.5}
"""Required speed of a call as a multiple of that of gloo, at every size."""
SMALL_BYTES: Final = 4
SMALL_US: Final = 15.0
"""The goal of an all-reduce of `SMALL_BYTES`."""


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

    def all_to_all(self) -> None:
        """Send each rank its rows."""
        self._dist.all_to_all_single(self._received, self._rows, group=self._group)

    def all_gather(self) -> None:
        """Collect the tensors of all ranks."""
        self._dist.all_gather_into_tensor(self._gathered, self._x, group=self._group)


CALLS: Final = ("send", "all_reduce", "all_to_all", "all_gather")
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


def be_rank(words: Sequence[str]) -> None:
    """Make the calls in turns. words: ROUNDS SIZES CALL…; rank 0 prints a line of JSON for each turn."""
    rounds, sizes, calls = int(words[0]), parse_sizes(words[1]), words[2:]
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    importlib.import_module("zbmd.torch")
    torch.set_num_threads(1)
    dist.init_process_group(OURS)
    groups = {OURS: dist.group.WORLD, GLOO: dist.new_group(backend=GLOO)}
    for call in calls:
        for nbytes in sizes:
            iterations = min(ITERATIONS_MAX, iterations_for(nbytes))
            made = {who: getattr(Calls(group, nbytes), call) for who, group in groups.items()}
            for each in made.values():
                timed_ns(each, 3)
            for order in turns([GLOO], rounds):
                for who in order:
                    dist.barrier()
                    took = timed_ns(made[who], iterations)
                    if dist.get_rank() == 0:
                        ways = 2 if call in ONE_WAY else 1
                        turn = {
                            "call": call,
                            "size": nbytes,
                            "who": who,
                            "ns": [each / ways for each in took],
                        }
                        print(json.dumps(turn), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def rows(found: Sequence[Mapping[str, Any]]) -> Iterator[Measurement]:
    """Yield ours and gloo's at every call and size, from what rank 0 reported of each turn."""
    samples: dict[tuple[str, int], dict[str, list[list[float]]]] = {}
    for turn in found:
        of_all = samples.setdefault((turn["call"], turn["size"]), defaultdict(list))
        of_all[turn["who"]].append(turn["ns"])
    for (call, nbytes), of_all in samples.items():
        yield from rows_of(call, nbytes, of_all)


def table(measured: Sequence[Measurement]) -> Iterator[str]:
    """Yield a line for each measurement."""
    yield f"{'call':12} {'size':>5} {'':5} {'p50 us':>10} {'p99 us':>10}  ratio"
    for row in measured:
        noise = " noise" * (row.who == OURS)
        ratio = "" if row.time_ratio is None else f"{row.time_ratio}{noise}"
        times = f"{row.time_us_p50:10.2f} {row.time_us_p99:10.2f}"
        yield f"{row.case:12} {size_in_words(row.size_bytes):>5} {row.who:5} {times}  {ratio}".rstrip()


def figures(measured: Sequence[Measurement], command: str, ranks: int) -> Iterator[Figure]:
    """Yield a figure for each of our measurements, beside gloo's."""
    theirs = {(row.case, row.size_bytes): row for row in measured if row.who == GLOO}
    for row in measured:
        if row.who != OURS:
            continue
        gloo = theirs[row.case, row.size_bytes]
        ratio = None if gloo.time_ratio is None else round(1 / gloo.time_ratio.value, 3)
        figure = new_figure(
            "collectives",
            f"PyTorch {row.case}, {size_in_words(row.size_bytes)}, {ranks} ranks, one host",
            command,
            value=row.time_us_p50,
            unit="µs",
            peer=GLOO,
            peer_value=gloo.time_us_p50,
            ratio=ratio,
        )
        yield with_goal(figure, row)


def with_goal(figure: Figure, row: Measurement) -> Figure:
    """Return the figure with its goal, if the call has one."""
    times = GOALS.get(row.case)
    if times is not None and figure.ratio is not None:
        return msgspec.structs.replace(figure, goal=f"≥ {times:g} × gloo", met=figure.ratio >= times)
    if row.case == "all_reduce" and row.size_bytes <= 2 * SMALL_BYTES:
        return msgspec.structs.replace(figure, goal=f"≤ {SMALL_US:g} µs", met=row.time_us_p50 <= SMALL_US)
    return figure


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    if RankEnvironment.read(os.environ) is not None:
        be_rank(sys.argv[1:])
        return 0
    parser = script_parser("lab.bench.collectives.torch_calls", __doc__)
    parser.add_argument("--calls", nargs="+", default=CALLS, choices=CALLS, help=f"({' '.join(CALLS)})")
    parser.add_argument("--sizes", default=SIZES_DEFAULT, help="(%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    add_record(parser)
    asked = parser.parse_args(argv)
    log_to_stderr()
    parse_sizes(asked.sizes)
    if asked.rounds < 1 or not 2 <= asked.ranks <= RANKS_MAX:
        raise UserError(f"--rounds: expected 1 or more; --ranks: 2 to {RANKS_MAX}")
    if importlib.util.find_spec("torch") is None:
        raise UserError("PyTorch is not installed: pip install 'zbmd[torch]'")
    began, before = now_utc(), this_machine()
    words = [str(asked.rounds), asked.sizes, *asked.calls]
    measured = list(rows(uvloop.run(run(words, asked.ranks, target=MODULE))))
    print(f"# {began}  {before}", *table(measured), sep="\n")
    if asked.record is not None:
        words = ["--sizes", asked.sizes, "--calls", *asked.calls]
        command = f"python -m {MODULE} {shlex.join(words)}"
        append_figures(asked.record, figures(measured, command, asked.ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
