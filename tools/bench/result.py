"""Results of a benchmark: the schema of `--json`, the table, and the plot.

Columns are those of nccl-tests: size, time (p50 and p99), algbw, busbw. Two ranks that send to each other
exchange nothing twice, so their busbw is algbw, as in its sendrecv test; of collectives it is as in its
PERFORMANCE.md.
"""

from __future__ import annotations

import importlib.util
import io
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from zbmd.tools.bench.figures import Figure, Layer, cpu_name, new_figure
from zbmd.tools.bench.stats import ALONE, OURS, Ratio, size_in_words
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

FORMATS: Final = (".png", ".svg")
WIDTH_IN, HEIGHT_IN = 8.0, 4.2
PNG_DPI: Final = 140


def check_plot(out: Path) -> None:
    """Raise `UserError`, before anything is measured, if no picture could be drawn there."""
    if out.suffix not in FORMATS:
        raise UserError(f"{out} is no name for a picture: end it in {' or '.join(FORMATS)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("drawing a benchmark needs matplotlib: pip install 'zbmd[plot]'")


def save_plot(result: BenchResult, out: Path) -> None:
    """Write the picture. Raises `UserError` as `check_plot` does, or if the file cannot be written."""
    check_plot(out)
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row.case for row in result.rows))
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN * len(cases)), layout="constrained")
    for number, case in enumerate(cases, 1):
        axes = figure.add_subplot(len(cases), 1, number)
        rows = [row for row in result.rows if row.case == case]
        for who in dict.fromkeys(row.who for row in rows):
            line = [(row.size_bytes, row.time_us_p50) for row in rows if row.who == who]
            width = 2.4 if who == OURS else 1.2
            axes.plot(*zip(*line, strict=True), marker="o", markersize=3, linewidth=width, label=who)
        sizes = sorted({row.size_bytes for row in rows})
        axes.set_xscale("symlog", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [size_in_words(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylabel("median, µs")
        axes.set_title(CASES.get(case, case), fontsize="medium", loc="left")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format=out.suffix[1:], dpi=PNG_DPI)
    write_atomically(out, lambda file: file.write(picture.getvalue()))


FORMAT: Final = "zbmd.bench/1"


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One contender at one size."""

    case: str
    """The pattern that was timed, such as `p2p-arena`; the same for all contenders."""
    who: str
    """`zbmd`, or the peer's name."""
    size_bytes: int
    samples: int
    time_us_p50: float
    time_us_p99: float
    algbw_gbytes_per_s: float | None = None
    """None where nothing is carried."""
    busbw_gbytes_per_s: float | None = None
    time_ratio: Ratio | None = None
    """Our time over this peer's, below 1 where we are faster; in our own row A against A, the noise floor."""


class Contestant(msgspec.Struct, frozen=True, kw_only=True):
    """A peer, as it was run."""

    name: str
    version: str
    command: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that measured it."""

    cpu: str
    cores: int
    kernel: str
    python: str
    load_average: float
    """Of the minute before."""

    def __str__(self) -> str:
        """Of the heading of a table."""
        software = f"Linux {self.kernel}, Python {self.python}"
        return f"{self.cpu}, {self.cores} cores, {software}, load {self.load_average:g}"


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON object that `--json` prints."""

    benchmark: str
    """`p2p`, `put`, `collectives`, `torch` or `detect`."""
    command: str
    date: str
    machine: Machine
    transport: str
    rounds: int
    rows: list[Measurement]
    peers: list[Contestant] = []
    format: str = FORMAT


def this_machine() -> Machine:
    """The machine that this process runs on, and its load."""
    return Machine(
        cpu=cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
        python=platform.python_version(),
        load_average=round(os.getloadavg()[0], 2),
    )


def now_utc() -> str:
    """To the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line() -> str:
    """Return the command line, as it was given."""
    return shlex.join(["zbmd", *sys.argv[1:]])


def new_result(
    benchmark: str,
    transport: str,
    rounds: int,
    measure: Callable[[], tuple[list[Measurement], list[Contestant]]],
) -> BenchResult:
    """Measure; return what came of it, with this machine and its load before."""
    began, machine = now_utc(), this_machine()
    rows, peers = measure()
    return BenchResult(
        benchmark=benchmark,
        command=command_line(),
        date=began,
        machine=machine,
        transport=transport,
        rounds=rounds,
        rows=rows,
        peers=peers,
    )


def figures(result: BenchResult) -> Iterator[Figure]:
    """Yield a figure for each of our measurements, beside the best peer of the same case and size."""
    layer: Layer = "collectives" if result.benchmark in ("collectives", "torch") else "transport"
    of = "PyTorch " * (result.benchmark == "torch")
    for row in result.rows:
        if row.who != OURS:
            continue
        others = [r for r in result.rows if (r.case, r.size_bytes) == (row.case, row.size_bytes)]
        peers = [other for other in others if other.who not in (OURS, ALONE)]
        best = min(peers, key=lambda peer: peer.time_us_p50, default=None)
        ratio = None if best is None or best.time_ratio is None else round(1 / best.time_ratio.value, 3)
        times = TORCH_GOALS.get(row.case) if of else None
        figure = new_figure(
            layer,
            f"{of}{row.case}, {size_in_words(row.size_bytes)}, over {result.transport}",
            result.command,
            value=row.time_us_p50,
            unit="µs",
            peer=None if best is None else best.who,
            peer_value=None if best is None else best.time_us_p50,
            ratio=ratio,
        )
        if times is not None and best is not None and ratio is not None:
            goal = f"≥ {times:g} × {best.who}"
            figure = msgspec.structs.replace(figure, goal=goal, met=ratio >= times)
        yield figure
        alone = next((other for other in others if other.who == ALONE), None)
        if alone is not None and best is not None:
            yield _of_communication(figure, alone.time_us_p50)


def _of_communication(step: Figure, alone_us: float) -> Figure:
    """Return what the steps of a figure take longer than those of a model alone."""
    ours, theirs = step.value - alone_us, max(0.0, (step.peer_value or 0.0) - alone_us)
    return msgspec.structs.replace(
        step,
        what=f"{step.what}: communication, as what a step takes longer than the model alone",
        value=round(ours, 1),
        peer_value=round(theirs, 1),
        ratio=round(theirs / ours, 3) if ours > 0 else None,
        goal=f"≤ {COMMUNICATION_MAX:g} × {step.peer}",
        met=ours <= COMMUNICATION_MAX * theirs,
    )


def heading(result: BenchResult) -> list[str]:
    """Lines that say where, when and against whom."""
    lines = [
        f"# {result.command}",
        f"# {result.date}  {result.machine}",
        f"# {result.rounds} rounds, everyone in turn. ratio: our time over theirs, below 1 we are faster, "
        "and its 95 % interval; in our own row A against A, the noise",
    ]
    lines += [f"# {peer.name}: {peer.version}: {peer.command}" for peer in result.peers]
    return lines


def table(result: BenchResult) -> str:
    """The result as lines of text."""
    lines = heading(result)
    width = max((len(row.who) for row in result.rows), default=4)
    case = ""
    for row in result.rows:
        if row.case != case:
            case = row.case
            lines += ["", CASES.get(case, case), _columns(width)]
        lines.append(_line(row, width))
    return "\n".join(lines)


def _columns(width: int) -> str:
    return f"{'size':>6} {'':{width}} {'p50 us':>11} {'p99 us':>11} {'algbw':>7} {'busbw GB/s':>10}  ratio"


def _line(row: Measurement, width: int) -> str:
    ratio = ""
    if row.time_ratio is not None:
        ratio = f"{row.time_ratio}{' noise' * (row.who == OURS)}"
    algbw, busbw = (
        "" if bandwidth is None else f"{bandwidth:.2f}"
        for bandwidth in (row.algbw_gbytes_per_s, row.busbw_gbytes_per_s)
    )
    who = f"{size_in_words(row.size_bytes):>6} {row.who:{width}}"
    times = f"{row.time_us_p50:11.2f} {row.time_us_p99:11.2f}"
    return f"{who} {times} {algbw:>7} {busbw:>10}  {ratio}".rstrip()


COMMUNICATION_MAX: Final = 0.4
"""The goal for the communication in a step of DDP, in times of the peer's."""
TORCH_GOALS: Final = {
    **dict.fromkeys(("all_reduce", "broadcast", "all_gather", "reduce_scatter"), 3.0),
    **dict.fromkeys(("all_to_all", "send", "fsdp2", "fsdp2_arena"), 2.0),
}
"""Speed through PyTorch as a multiple of the peer's."""
CASES: Final = {
    "p2p-arena": "p2p, one way, from the arena into the other's inbox; native wait",
    "p2p-foreign": "p2p, one way, between ordinary arrays, through the inbox; native wait",
    "echo": "p2p, one way, every byte sent back from where it arrived; native wait",
    "frame": "frame round trip over asyncio (uvloop), idle",
    "frame-training": "frame round trip over asyncio (uvloop), both ranks inside a training step",
    "put-arena": "put, in windows, from the arena into the other's inbox",
    "put-foreign": "put, in windows, from an ordinary array into the other's inbox",
    "put-asyncio": "put, in windows, from the arena into the other's inbox; awaited on the loop",
    "all_reduce": "dist.all_reduce",
    "broadcast": "dist.broadcast from rank 0",
    "all_gather": "dist.all_gather_into_tensor; the size is that of a rank's tensor",
    "reduce_scatter": "dist.reduce_scatter_tensor; the size is that of the whole tensor",
    "all_to_all": "dist.all_to_all_single",
    "send": "dist.send and dist.recv, one way",
    "ddp": "a step of DistributedDataParallel; the size is that of the parameters",
    "fsdp2": "a step of fully_shard; the size is that of the parameters",
    "ddp_arena": "the same of DistributedDataParallel; gradients are views of buckets, ours in the arena",
    "fsdp2_arena": "the same of fully_shard; buffers of ours are in the arena",
    "detect-training": "notice of a SIGKILL, by memory of the victim; the survivor inside a training step",
    "detect-idle": "notice of a SIGKILL, by memory of the victim; the survivor idle",
}
