"""`zbmd bench collectives`: blocking collectives among ranks of this host, with peers in the same run.

With `--explain` nothing is timed but the link: it prints which algorithm "auto" stands for at each size, and
why.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from zbmd.collectives.algorithms import Operation
from zbmd.collectives.choice import choose, wish_of_environment
from zbmd.collectives.cost_model import ONE_HOST, Model
from zbmd.tools.bench_peers import (
    ONE_THREAD,
    PeerMissing,
    _first_line,
    _mpich_abi_library,
    _need_command,
    _need_module,
)
from zbmd.tools.bench_progress import progress
from zbmd.tools.bench_result import Contestant, Row
from zbmd.tools.bench_run import rows_of
from zbmd.tools.bench_stats import OURS, iterations_for, parse_sizes, size_in_words, turns
from zbmd.tools.bench_workers import CONTROL, Workers
from zbmd.tools.peers.collective_cases import CASES, CASES_FOREIGN, bus_factor
from zbmd.transport.errors import UserError

PEERS: Final = ("openmpi", "mpich", "gloo")
RANKS_MAX: Final = 16
SIZES_DEFAULT: Final = "4,1K,1M,16M,64M"
ITERATIONS_MAX: Final = 2_000
_RANKS: Final = "zbmd.tools.bench_collective_ranks"
EXPLAINED: Final = tuple(
    operation for operation in Operation if operation not in (Operation.BARRIER, Operation.ALL_REDUCE_SHARDS)
)


def explain(sizes: Sequence[int], ranks: int, hosts: int, model: Model) -> list[str]:
    """A line for each operation and size: the algorithm, why, and what the others were predicted to take."""
    lines = [f"# {ranks} ranks on {hosts} hosts: {model}"]
    wish = wish_of_environment()
    for operation in EXPLAINED:
        for nbytes in sizes:
            choice = choose(
                operation, n=ranks, nbytes=nbytes, published_bytes=nbytes, hosts=hosts, model=model, wish=wish
            )
            costs = ", ".join(f"{name} {cost / 1e3:.1f} us" for name, cost in choice.predicted_ns)
            chosen = f"{choice.algorithm:18} {choice.reason}"
            what = f"{operation.name.lower():14} {size_in_words(nbytes):>5}  {chosen}"
            lines.append(f"{what} [{costs}]" if costs else what)
    return lines


def measure(
    sizes: Sequence[int], cases: Sequence[str], ranks: int, peers: Sequence[str], rounds: int
) -> tuple[list[Row], list[Contestant]]:
    """Everyone in turn. Raises `PeerMissing` before anything has run, `ContenderFailed`."""
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory(prefix="zbmd-bench-") as scratch:
        contestants = [_contestant(name, ranks, Path(scratch), stack) for name in peers]
        ours = [sys.executable, "-m", _RANKS, "--control", CONTROL, "--ranks", str(ranks)]
        ours += ["--bytes-max", str(max(sizes))]
        everyone = {OURS: stack.enter_context(Workers(OURS, [ours], ranks=ranks, environment=ONE_THREAD))}
        everyone.update((told.name, workers) for told, workers in contestants)
        rows: list[Row] = []
        with progress(len(sizes) * len(cases) * rounds * (2 + len(peers))) as tell:
            for case in cases:
                for nbytes in sizes:
                    samples: dict[str, list[list[float]]] = {name: [] for name in everyone}
                    iterations = min(ITERATIONS_MAX, iterations_for(nbytes))
                    for order in turns(peers, rounds):
                        for name in order:
                            tell(f"{case} {nbytes} {name}")
                            samples[name].append(everyone[name].ask(case, nbytes, iterations)[0])
                    rows += rows_of(case, nbytes, samples)
    return rows, [told for told, _ in contestants]


def table(rows: Sequence[Row], ranks: int) -> list[str]:
    """The rows as text: times, bandwidths, and our time over theirs."""
    lines: list[str] = []
    case = ""
    for row in rows:
        if row.case != case:
            case = row.case
            lines += ["", f"{(CASES | CASES_FOREIGN)[case]}, {ranks} ranks"]
            lines.append(f"{'size':>6} {'':8} {'p50 us':>11} {'p99 us':>11} {'busbw GB/s':>10}  ratio")
        bus = (row.algbw_gbytes_per_s or 0.0) * bus_factor(case, ranks)
        ratio = ""
        if row.time_ratio is not None:
            found = row.time_ratio
            ratio = f"{found.value:.2f} ({found.low:.2f} … {found.high:.2f})"
            ratio += " noise" if row.who == OURS else ""
        who = f"{size_in_words(row.size_bytes):>6} {row.who:8}"
        lines.append(f"{who} {row.time_us_p50:11.2f} {row.time_us_p99:11.2f} {bus:10.2f}  {ratio}".rstrip())
    return lines


def _contestant(
    name: str, ranks: int, scratch: Path, stack: contextlib.ExitStack
) -> tuple[Contestant, Workers]:
    """A peer, started. Raises `PeerMissing` with the command that installs it."""
    environment = dict(ONE_THREAD)
    program = [sys.executable, "-m", "zbmd.tools.peers.mpi4py_collectives", "--control", CONTROL]
    if name == "gloo":
        _need_module("torch", "PyTorch, which has gloo,", "pip install 'zbmd[torch]'")
        version = "torch.distributed"
        one = [sys.executable, "-m", "zbmd.tools.peers.gloo_collectives", "--control", CONTROL]
        one += ["--ranks", str(ranks), "--store", str(scratch / "gloo-store")]
        commands = [[*one, "--rank", str(rank)] for rank in range(ranks)]
    elif name == "openmpi":
        install = "apt-get install openmpi-bin libopenmpi-dev"
        mpirun = _need_command(("mpirun.openmpi",), "Open MPI", install)
        version = _first_line([mpirun, "--version"])
        start = [mpirun, "-n", str(ranks), "--mca", "pml", "ob1", "--mca", "btl", "self,vader"]
        start += ["--bind-to", "core"] if ranks <= _cores() else ["--oversubscribe", "--bind-to", "none"]
        start += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        environment["MPI4PY_MPIABI"] = "openmpi"
        commands = [[*start, *program]]
    else:
        mpirun = _need_command(
            ("mpirun.mpich", "mpiexec.hydra"), "MPICH", "apt-get install mpich libmpich-dev"
        )
        version = "MPICH " + _first_line([mpirun, "--version"], "Version:").removeprefix("Version:").strip()
        environment |= {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": _mpich_abi_library(scratch)}
        start = [mpirun, "-n", str(ranks), *(["-bind-to", "core"] if ranks <= _cores() else [])]
        commands = [[*start, *program]]
    if name != "gloo":
        _need_module("mpi4py", "mpi4py", "pip install 'zbmd[bench]'")
    workers = stack.enter_context(Workers(name, commands, ranks=ranks, environment=environment))
    return Contestant(name=name, version=version, command=" ".join(commands[0])), workers


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def add_arguments(kind: argparse.ArgumentParser, *, rounds_default: int) -> None:
    """The options of the benchmark."""
    kind.add_argument("--ranks", type=int, default=2, metavar="N", help="(%(default)s)")
    kind.add_argument("--sizes", default=SIZES_DEFAULT, metavar="SIZES", help="(%(default)s)")
    kind.add_argument(
        "--cases",
        action="append",
        choices=[*CASES, *CASES_FOREIGN],
        help="only this case; repeatable (all but those of ordinary arrays that are not all-reduces)",
    )
    kind.add_argument("--vs", default="", metavar="PEERS", help=f"peers to run in turn: {','.join(PEERS)}")
    kind.add_argument("--rounds", type=int, default=rounds_default, metavar="N", help="(%(default)s)")
    kind.add_argument("--explain", action="store_true", help="print which algorithm is chosen, and why")
    kind.add_argument("--hosts", type=int, default=1, metavar="H", help="of --explain (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Run it. Raises `UserError`."""
    ranks, sizes = arguments.ranks, parse_sizes(arguments.sizes)
    if not 1 <= ranks <= RANKS_MAX or not 1 <= arguments.rounds <= 100:
        raise UserError(f"give 1 to {RANKS_MAX} ranks and 1 to 100 rounds")
    if arguments.explain:
        model = ONE_HOST if arguments.hosts == 1 else Model(alpha_ns=20_000.0, beta_ns_per_byte=0.8)
        print("\n".join(explain(sizes, ranks, arguments.hosts, model)))
        return 0
    peers = tuple(dict.fromkeys(filter(None, arguments.vs.split(","))))
    if unknown := set(peers) - set(PEERS):
        raise UserError(f"--vs {','.join(sorted(unknown))}: choose from {', '.join(PEERS)}")
    try:
        rows, contestants = measure(sizes, arguments.cases or list(CASES), ranks, peers, arguments.rounds)
    except PeerMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    lines = [f"# {told.name}: {told.version}: {told.command}" for told in contestants]
    print("\n".join([*lines, *table(rows, ranks)]))
    return 0
