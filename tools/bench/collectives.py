"""`zbmd bench collectives`: blocking collectives among ranks of this host, with peers in the same run.

With `--explain` nothing is timed but the link, by ranks as a group is made of them: it prints which algorithm
"auto" stands for at each size, and why; how many instructions a rank's program has, and how the programs of
all ranks were proved. Links between hosts (`--hosts`) are not timed here, but assumed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from zbmd.collectives.algorithms.catalogue import Operation, Request
from zbmd.collectives.communicator.cost_model import MANY_HOSTS, Model
from zbmd.collectives.communicator.planning import (
    Call,
    GroupTraits,
    choice_of,
    override_of_environment,
    plan_call,
)
from zbmd.collectives.programs.reductions import BYTES_CODE
from zbmd.tools.bench.peer_catalogue import ONE_THREAD, Site, find_peer
from zbmd.tools.bench.peers.control import CASES, CASES_FOREIGN, MODEL, bus_factor
from zbmd.tools.bench.result import BenchResult, Contestant, Measurement, new_result
from zbmd.tools.bench.run import progress, rows_of
from zbmd.tools.bench.stats import OURS, iterations_for, parse_sizes, size_in_words, turns
from zbmd.tools.bench.workers import CONTROL, Workers
from zbmd.tools.cli.options import add_ranks, add_sizes, add_turns, listed
from zbmd.transport.errors import UserError

PEERS: Final = ("openmpi", "mpich", "gloo")
RANKS_MAX: Final = 16
SIZES_DEFAULT: Final = "4,1K,1M,16M,64M"
ITERATIONS_MAX: Final = 2_000
_RANKS: Final = "zbmd.tools.bench.collective_ranks"
EXPLAINED: Final = tuple(
    operation for operation in Operation if operation not in (Operation.BARRIER, Operation.ALL_REDUCE_SHARDS)
)


def explain(sizes: Sequence[int], ranks: int, hosts: int, model: Model) -> list[str]:
    """A line for each operation and size: the algorithm, why, and what the others were predicted to take."""
    how = "as the ranks have measured it" if hosts == 1 else "assumed"
    # The traits of the group as the first of its ranks sees them.
    traits = GroupTraits(place=0, model=model, far=hosts > 1, override=override_of_environment())
    lines = [f"# {ranks} ranks on {hosts} hosts, {how}: {model}"]
    for operation in EXPLAINED:
        for nbytes in sizes:
            call = _call_of(operation, nbytes, ranks, hosts)
            choice = choice_of(call, traits)
            costs = ", ".join(f"{name} {cost / 1e3:.1f} us" for name, cost in choice.predicted_ns)
            name = f"{choice.algorithm} or {choice.in_arena}" if choice.in_arena else choice.algorithm
            proved = _proved(call, traits)
            what = f"{operation.name.lower():14} {size_in_words(nbytes):>5}  {name:18} {proved}"
            lines.append(f"{what}; {choice.reason}" + (f" [{costs}]" if costs else ""))
    return lines


def _call_of(operation: Operation, nbytes: int, ranks: int, hosts: int) -> Call:
    """Return the call of which a rank's largest array has `nbytes`."""
    on_hosts = tuple(rank * hosts // ranks for rank in range(ranks)) if hosts > 1 else ()
    request = Request(operation=operation, algorithm="auto", n=ranks, hosts=on_hosts)
    count = nbytes // ranks if request.blocks > 1 else nbytes
    published = count if operation is Operation.ALL_GATHER else nbytes
    return Call(request=request, count=count, published=published, dtype=BYTES_CODE)


def _proved(call: Call, traits: GroupTraits) -> str:
    """Return the steps of a rank's programs, and how those of all ranks were proved.

    Verifies what has not been proved, as the first such call would.
    """
    plan = plan_call(call, traits)
    plans = {each.request: each for each in (plan, plan.in_arena, plan.last) if each is not None}
    steps = "+".join(str(len(plan.program.instructions)) for plan in plans.values())
    proofs = ", ".join(dict.fromkeys(str(plan.proof) for plan in plans.values()))
    return f"{steps} steps, {proofs}"


def measure(
    sizes: Sequence[int],
    cases: Sequence[str],
    ranks: int,
    peers: Sequence[str],
    rounds: int,
    iterations_max: int = ITERATIONS_MAX,
) -> tuple[list[Measurement], list[Contestant]]:
    """Everyone in turn. Raises `PeerMissing` before anything has run, `ContenderFailed`."""
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory(prefix="zbmd-bench-") as scratch:
        site = Site(transport="shm", scratch=Path(scratch), ranks=ranks, collectives=True)
        found = [find_peer(name, site) for name in peers]
        everyone = {OURS: stack.enter_context(_our_ranks(ranks, max(sizes)))}
        everyone.update((peer.name, stack.enter_context(peer.workers())) for peer in found)
        rows: list[Measurement] = []
        with progress(len(sizes) * len(cases) * rounds * (2 + len(peers))) as tell:
            for case in cases:
                for nbytes in sizes:
                    samples: dict[str, list[list[float]]] = {name: [] for name in everyone}
                    iterations = min(iterations_max, iterations_for(nbytes))
                    for order in turns(peers, rounds):
                        for name in order:
                            tell(f"{case} {nbytes} {name}")
                            samples[name].append(everyone[name].ask(case, nbytes, iterations)[0])
                    rows += rows_of(case, nbytes, samples)
    return [titled(row, ranks) for row in rows], [peer.contestant for peer in found]


def measured_model(ranks: int) -> Model:
    """Return the cost model that a group of `ranks` ranks agrees on. Raises `ContenderFailed`."""
    with _our_ranks(ranks, 0) as workers:
        alpha_ns, beta, gamma, cores = workers.ask(MODEL, 0, 1)[0]
    return Model(alpha_ns=alpha_ns, beta_ns_per_byte=beta, gamma_ns_per_byte=gamma, cores=int(cores))


def _our_ranks(ranks: int, bytes_max: int) -> Workers:
    command = [sys.executable, "-m", _RANKS, "--control", CONTROL, "--ranks", str(ranks)]
    command += ["--bytes-max", str(bytes_max)]
    return Workers(OURS, [command], ranks=ranks, environment=ONE_THREAD)


def titled(row: Measurement, ranks: int) -> Measurement:
    """With the case in words, as every table has it, and its bus bandwidth."""
    found = None if row.algbw_gbytes_per_s is None else row.algbw_gbytes_per_s * bus_factor(row.case, ranks)
    words = f"{(CASES | CASES_FOREIGN)[row.case]}, {ranks} ranks"
    return msgspec.structs.replace(row, case=words, busbw_gbytes_per_s=found)


def add_arguments(kind: argparse.ArgumentParser, *, rounds_default: int) -> None:
    """The options of the benchmark."""
    add_ranks(kind, 2)
    add_sizes(kind, SIZES_DEFAULT)
    add_turns(kind, PEERS, rounds_default)
    kind.add_argument(
        "--cases",
        action="append",
        default=[],
        metavar="CASES",
        help=f"time only: {', '.join((*CASES, *CASES_FOREIGN))} (default: all in the arena, and all-reduces)",
    )
    kind.add_argument(
        "--iterations",
        type=int,
        default=ITERATIONS_MAX,
        metavar="N",
        help="operations per turn at most (default: %(default)s, or 256 MiB of them)",
    )
    kind.add_argument(
        "--explain", action="store_true", help="print which algorithm is chosen at each size, and why"
    )
    kind.add_argument(
        "--hosts", type=int, default=1, metavar="H", help="hosts to explain for (default: %(default)s)"
    )


def check(arguments: argparse.Namespace) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(sizes, peers). Raises `UserError` for options that cannot be."""
    if not 1 <= arguments.ranks <= RANKS_MAX or not 1 <= arguments.rounds <= 100:
        raise UserError(f"--ranks, --rounds: expected 1 to {RANKS_MAX} ranks and 1 to 100 rounds")
    if not 1 <= arguments.iterations <= ITERATIONS_MAX:
        raise UserError(f"--iterations: expected 1 to {ITERATIONS_MAX:,}, got {arguments.iterations}")
    return parse_sizes(arguments.sizes), listed("--vs", arguments.vs, PEERS)


def explanation(arguments: argparse.Namespace) -> str:
    """What `--explain` prints. Raises `UserError`, `ContenderFailed`."""
    sizes, _ = check(arguments)
    model = MANY_HOSTS if arguments.hosts > 1 else measured_model(arguments.ranks)
    return "\n".join(explain(sizes, arguments.ranks, arguments.hosts, model))


def results(arguments: argparse.Namespace) -> BenchResult:
    """Everyone timed. Raises `UserError`, `PeerMissing`, `ContenderFailed`."""
    sizes, peers = check(arguments)
    cases = listed("--cases", arguments.cases, (*CASES, *CASES_FOREIGN)) or tuple(CASES)
    ranks, rounds = arguments.ranks, arguments.rounds
    at_most = arguments.iterations
    return new_result(
        "collectives", "shm", rounds, lambda: measure(sizes, cases, ranks, peers, rounds, at_most)
    )
