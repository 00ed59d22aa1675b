"""Measure how much of the gradient all-reduce the backward pass hides, between two hosts.

    python -m zbmd.tools.lab.bench.training.overlap [--rates 1000,300] [--layers N] [--width N] [--steps N]
        [--json]

Two network namespaces on a veth pair, whose rate the kernel limits, train one model, a rank each. From the
spans that the ranks' profilers keep: how long all-reduces were under way in a step, how much of that lay
beside spans of the backward pass, and how long the rank waited. `at most` is what can be hidden at all: what
is reduced but the last bucket, which is whole only as the pass ends. `clocks` says how far the trace's clock
of the second host, brought together by the operations, is from the truth, which is known here, and how right
it says that it is. Wants root.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from zbmd.tools.bench.result import now_utc, this_machine
from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.tools.lab.hosts.netns import Lab, LabHost
from zbmd.tools.runs.profile import clocks_of, read_rings
from zbmd.training.autograd._spans import CATEGORIES, TRACK_OPERATION, TRACK_STEP
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.profiler.ring import Spans
from zbmd.training.step.reduction import Buckets
from zbmd.transport.errors import UserError
from zbmd.transport.host.threads import ONE_THREAD

HOSTS: Final = 2
PORT: Final = 29420
REDUCTION: Final = "all_reduce_shards"
GOAL: Final = 0.7
RUN_S_MAX: Final = 540.0

Intervals = npt.NDArray[np.int64]
"""(count, 2): begins and ends, ns; apart from each other, in order."""


class Hidden(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's all-reduces at one rate, ms a step (means): under way, beside backward, and waited for.

    ratio: hidden over under way, the median of steps, with quartiles; ratio_in_all: of all steps together.
    """

    rate_mbps: float
    rank: int
    steps: int
    step_ms: float
    backward_ms: float
    reduce_ms: float
    hidden_ms: float
    waited_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    ratio_in_all: float


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """Error of the trace's clock of another host, and its stated bound; us."""

    rate_mbps: float
    off_us: float
    error_us: float | None


def union(begins: npt.ArrayLike, ends: npt.ArrayLike) -> Intervals:
    """Intervals that cover what these cover, apart from each other."""
    pairs = np.stack([np.asarray(begins, np.int64), np.asarray(ends, np.int64)], axis=1)
    made: list[list[int]] = []
    for begin, end in sorted(pairs.tolist()):
        if made and begin <= made[-1][1]:
            made[-1][1] = max(made[-1][1], end)
        else:
            made.append([begin, end])
    return np.array(made, np.int64).reshape(-1, 2)


def length(intervals: Intervals) -> int:
    """Return their total length, ns."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def shared(a: Intervals, b: Intervals) -> int:
    """Return the time that both were under way, ns."""
    both = union(np.concatenate([a[:, 0], b[:, 0]]), np.concatenate([a[:, 1], b[:, 1]]))
    return length(a) + length(b) - length(both)


def hidden_of(spans: Spans, rate_mbps: float) -> Hidden:
    """Evaluate a rank's spans of all-reduces, without the first step. Raises `UserError`."""
    records = spans.records
    number = spans.operations.index(REDUCTION) if REDUCTION in spans.operations else -1
    is_reduction = (records["track"] == TRACK_OPERATION) & (records["category"] == number)
    is_step = records["track"] == TRACK_STEP
    backward = is_step & (records["category"] == CATEGORIES.index("backward"))
    comm = is_step & (records["category"] == CATEGORIES.index("comm"))
    rows: list[tuple[int, ...]] = []
    for step in np.unique(records["step"][is_reduction])[1:-1]:  # the last one may not be whole
        of_step = records["step"] == step
        reduced, passes, waits = (
            union(records["begin_ns"][of_step & kind], records["end_ns"][of_step & kind])
            for kind in (is_reduction, backward, comm)
        )
        whole = int(records["end_ns"][of_step].max() - records["begin_ns"][of_step].min())
        rows.append((whole, length(passes), length(reduced), shared(reduced, passes), shared(reduced, waits)))
    if not rows:
        raise UserError(f"rank {spans.run.rank} kept no step with {REDUCTION}: give more --steps.")
    table = np.array(rows, np.float64)
    ratios = table[:, 3] / table[:, 2]
    whole_ms, backward_ms, reduce_ms, hidden_ms, waited_ms = (table.mean(axis=0) / 1e6).tolist()
    return Hidden(
        rate_mbps=rate_mbps,
        rank=spans.run.rank,
        steps=len(rows),
        step_ms=whole_ms,
        backward_ms=backward_ms,
        reduce_ms=reduce_ms,
        hidden_ms=hidden_ms,
        waited_ms=waited_ms,
        ratio=float(np.median(ratios)),
        ratio_low=float(np.quantile(ratios, 0.25)),
        ratio_high=float(np.quantile(ratios, 0.75)),
        ratio_in_all=hidden_ms / reduce_ms,
    )


def clocks_between(every: Sequence[Spans], rate_mbps: float) -> list[Clocks]:
    """Return the errors of a trace's clocks, for hosts that in truth share one monotonic clock."""
    first, *others = clocks_of(every)
    return [
        Clocks(
            rate_mbps=rate_mbps,
            off_us=(other.shift_ns - first.shift_ns) / 1e3,
            error_us=None if other.error_ns is None else other.error_ns / 1e3,
        )
        for other in others
    ]


def _job(host: LabHost, endpoint: str, folder: Path, data: Path, arguments: argparse.Namespace) -> list[str]:
    """The command that trains on a host."""
    made = [sys.executable, "-m", "zbmd.tools.node.cli", "run", "-n", "1", "--nnodes", str(HOSTS)]
    made += ["--node-rank", str(host.number), "--rdzv-endpoint", endpoint]
    made += ["--local-addr", host.address, "--max-restarts", "0", "-m", "zbmd", "train"]
    made += ["--out", str(folder / f"out{host.number}"), "--data", str(data)]
    made += ["--steps", str(arguments.steps), "--shards", str(arguments.shards)]
    made += ["--sequences-per-shard", str(arguments.sequences)]
    made += ["--evaluate-every", "0", "--checkpoint-every", "0"]
    for name in ("context", "width", "heads", "layers"):
        made += [f"--{name}", str(getattr(arguments, name))]
    return made


def measure(rate_mbps: float, arguments: argparse.Namespace) -> tuple[list[Hidden], list[Clocks]]:
    """Train once at a rate. Raises `UserError` if the run fails."""
    with tempfile.TemporaryDirectory(prefix="zbmd-overlap-") as scratch, Lab(HOSTS) as lab:
        folder = Path(scratch)
        data = write_text(folder / "text")
        for host in lab.hosts:
            if rate_mbps:
                host.shape(rate_mbps=rate_mbps)
        endpoint = f"{lab.hosts[0].address}:{PORT}"
        environment = {**ONE_THREAD, "ZBMD_COOKIE_FILE": str(folder / "cookie")}
        running: list[subprocess.Popen[str]] = [
            host.popen(
                _job(host, endpoint, folder, data, arguments),
                environment=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in lab.hosts
        ]
        try:
            told = [process.communicate(timeout=RUN_S_MAX)[0] for process in running]
        finally:
            for process in running:
                process.terminate()
        if any(process.returncode for process in running):
            raise UserError("the job did not end well:\n" + "\n".join(one[-2000:] for one in told))
        every = read_rings([folder / f"out{host.number}" for host in lab.hosts])
        return [hidden_of(spans, rate_mbps) for spans in every], clocks_between(every, rate_mbps)


def hideable(config: GPTConfig) -> float:
    """The part of the gradient that is on its way before the pass ends: all but the last bucket."""
    layout = GPT(config).layout
    last = Buckets(layout).spans[-1]
    return 1.0 - float(last.stop - last.start) / layout.size


def _print(found: Sequence[Hidden], clocks: Sequence[Clocks]) -> None:
    for one in found:
        met = "met" if one.ratio >= GOAL else "missed"
        rate = f"{one.rate_mbps:g}" if one.rate_mbps else "none"
        spread = f"{one.ratio:6.1%} ({one.ratio_low:.1%} … {one.ratio_high:.1%})"
        print(
            f"{rate:>6} {one.rank:4} {one.steps:5} {one.step_ms:8.1f} {one.backward_ms:11.1f} "
            f"{one.reduce_ms:9.1f} {one.hidden_ms:9.1f} {one.waited_ms:9.1f}  {spread:24} "
            f"{one.ratio_in_all:6.1%}  {met}",
            flush=True,
        )
    for clock in clocks:
        right = "unknown" if clock.error_us is None else f"± {clock.error_us:.0f} us"
        print(f"       clocks: {clock.off_us:+.0f} us off, said to be right {right}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = script_parser("lab.bench.training.overlap", __doc__)
    parser.add_argument("--rates", default="1000,500,250", metavar="MBPS,…", help="0: no limit (%(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="(%(default)s)")
    parser.add_argument("--shards", type=int, default=2, help="logical ones, of both (%(default)s)")
    parser.add_argument("--sequences", type=int, default=16, help="of a shard (%(default)s)")
    for name, value in (("context", 64), ("width", 256), ("heads", 4), ("layers", 6)):
        parser.add_argument(f"--{name}", type=int, default=value, help="of the model (%(default)s)")
    add_json(parser)
    return parser


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Measure at each rate. Exit code 1: the goal is missed at one."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started ends with it
    try:
        rates = [float(rate) for rate in arguments.rates.split(",")]
        config = GPTConfig(
            **{name: getattr(arguments, name) for name in ("context", "width", "heads", "layers")}
        )
    except (ValueError, UserError) as error:
        parser.error(str(error))
    missed = False
    if not arguments.json:
        size = GPT(config).layout.parameter_count
        print(
            f"# {now_utc()}  {this_machine()}; {size:,} parameters; "
            f"at most {hideable(config):.1%} can be hidden; goal {GOAL:.0%}"
        )
        print(
            "Mbit/s rank steps  step ms backward ms reduce ms hidden ms waited ms  hidden (quartiles)  in all"
        )
    for rate in rates:
        found, clocks = measure(rate, arguments)
        missed |= any(one.ratio < GOAL for one in found)
        if arguments.json:
            told = {"date": now_utc(), "machine": this_machine(), "hidden": found, "clocks": clocks}
            print(msgspec.json.encode(told).decode(), flush=True)
        else:
            _print(found, clocks)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
