"""`zbmd bench`: time transport, collectives and actors through their public API, beside peers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from zbmd.tools.bench.figures import add_record, append_figures
from zbmd.tools.bench.peer_catalogue import PEERS, PeerMissing
from zbmd.tools.bench.result import BenchResult, check_plot, figures, new_result, save_plot, table
from zbmd.tools.bench.run import CASES, TRANSPORTS, TransferPlan, check_plan, run
from zbmd.tools.bench.stats import ITERATIONS_MAX, ROUNDS_MAX, parse_sizes
from zbmd.tools.bench.workers import ContenderFailed
from zbmd.tools.cli.options import LazyParser, add_json, add_plot, add_sizes, add_turns, listed
from zbmd.transport.errors import UserError

EXIT_FAILED = 1
EXIT_MISSING = 3
SIZES_DEFAULT = {"p2p": "8:64M:8", "put": "4K:64M:8"}
VICTIMS_DEFAULT = "0,256M,1G"
ROUNDS_DEFAULT = 7
TRIALS_DEFAULT = 20

EXAMPLES = """examples:
  zbmd bench p2p                                  8 bytes to 64 MiB, and frames over the loop
  zbmd bench p2p --vs openmpi,openmpi-c           beside Open MPI, from Python and from C
  zbmd bench put --sizes 1M:64M --vs memcpy --plot put.png
  zbmd bench put --transport tcp --sizes 16M --vs iperf3
  zbmd bench collectives --vs openmpi,mpich,gloo  every operation, beside the same of its peers
  zbmd bench collectives --explain                which algorithm is taken at each size, and why
  zbmd bench torch --vs gloo                      calls of torch.distributed, steps of DDP and FSDP2
  zbmd bench torch --vs gloo --cases send,ddp --sizes 64K:1M:2 --ranks 4
  zbmd bench detect --trials 50 --json
  zbmd bench actors --vs xoscar,ray,monarch

exit codes: 0 measured; 1 a benchmarked program failed; 2 bad input; 3 a peer is not installed, and the
message holds the command that installs it
"""


def add_parser(commands: Any) -> None:
    """Add `bench` to the commands of `zbmd`."""
    raw = argparse.RawDescriptionHelpFormatter
    bench = commands.add_parser(
        "bench",
        help="time transport, collectives and actors beside their peers",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    kinds = bench.add_subparsers(required=True, metavar="BENCHMARK", parser_class=LazyParser)
    for name, text in (
        ("p2p", "one way between two ranks, and round trips of frames over the loop"),
        ("put", "bandwidth of one-sided puts, by size"),
    ):
        kind = kinds.add_parser(name, help=text, description=text, epilog=EXAMPLES, formatter_class=raw)
        _add_measuring(kind, name)
        kind.set_defaults(run_command=_transfers, benchmark=name)
    text = "collectives among ranks of this host"
    kinds.add_parser(
        "collectives",
        help=text,
        description=text,
        epilog=EXAMPLES,
        formatter_class=raw,
        fill=_fill_collectives,
    )
    text = "calls of torch.distributed, and steps of DDP and FSDP2"
    kinds.add_parser(
        "torch", help=text, description=text, epilog=EXAMPLES, formatter_class=raw, fill=_fill_torch
    )
    text = "time from kill -9 to the survivor's notice, with the floor"
    found = kinds.add_parser("detect", help=text, description=text, epilog=EXAMPLES, formatter_class=raw)
    found.add_argument(
        "--sizes",
        default=VICTIMS_DEFAULT,
        metavar="SIZES",
        help="memory of the victims (default: %(default)s), on top of what Python and numpy take",
    )
    found.add_argument(
        "--trials",
        type=int,
        default=TRIALS_DEFAULT,
        metavar="N",
        help="kills of each size (default: %(default)s)",
    )
    _add_output(found)
    found.set_defaults(run_command=_detect)
    text = "asks and tells between actors; the cost of spawning, keeping and restarting them, and fairness"
    kinds.add_parser(
        "actors", help=text, description=text, epilog=EXAMPLES, formatter_class=raw, fill=_fill_actors
    )


def _fill_collectives(kind: argparse.ArgumentParser) -> None:
    from zbmd.tools.bench import collectives as bench_collectives

    kind.description = bench_collectives.__doc__
    bench_collectives.add_arguments(kind, rounds_default=ROUNDS_DEFAULT)
    _add_output(kind)

    def run_command(arguments: argparse.Namespace) -> int:
        if not arguments.explain:
            return _report(arguments, lambda: bench_collectives.results(arguments))
        return _told(lambda: print(bench_collectives.explanation(arguments)))

    kind.set_defaults(run_command=run_command)


def _fill_torch(kind: argparse.ArgumentParser) -> None:
    from zbmd.tools.bench import torch_calls as bench_torch

    kind.description = bench_torch.__doc__
    bench_torch.add_arguments(kind)
    _add_output(kind)
    kind.set_defaults(
        run_command=lambda arguments: _report(arguments, lambda: bench_torch.results(arguments))
    )


def _fill_actors(kind: argparse.ArgumentParser) -> None:
    from zbmd.tools.bench import actors as bench_actors

    bench_actors.add_arguments(kind)
    kind.set_defaults(run_command=lambda arguments: _told(lambda: bench_actors.run(arguments)))


def _add_measuring(kind: argparse.ArgumentParser, name: str) -> None:
    add_sizes(kind, SIZES_DEFAULT[name])
    kind.add_argument(
        "--cases",
        action="append",
        default=[],
        metavar="CASES",
        help=f"time only: {', '.join(case.name for case in CASES[name])}",
    )
    kind.add_argument("--transport", choices=TRANSPORTS, default="shm", help="(default: %(default)s)")
    add_turns(kind, PEERS, ROUNDS_DEFAULT)
    kind.add_argument(
        "--iterations",
        type=int,
        metavar="N",
        help="operations per turn, if they fit in 1 s (default: 10000, or 256 MiB of them)",
    )
    _add_output(kind)


def _add_output(kind: argparse.ArgumentParser) -> None:
    add_json(kind)
    add_record(kind)
    add_plot(kind)


def _transfers(arguments: argparse.Namespace) -> int:
    wanted = listed("--cases", arguments.cases, [case.name for case in CASES[arguments.benchmark]])
    plan = TransferPlan(
        cases=tuple(case for case in CASES[arguments.benchmark] if not wanted or case.name in wanted),
        sizes=parse_sizes(arguments.sizes),
        rounds=_in_range("--rounds", arguments.rounds, ROUNDS_MAX),
        iterations=None
        if arguments.iterations is None
        else _in_range("--iterations", arguments.iterations, ITERATIONS_MAX),
        transport=arguments.transport,
        peers=listed("--vs", arguments.vs, PEERS),
    )
    check_plan(plan)
    return _report(
        arguments, lambda: new_result(arguments.benchmark, plan.transport, plan.rounds, lambda: run(plan))
    )


def _detect(arguments: argparse.Namespace) -> int:
    # Here, not above: it has a rank of a training job as its victim.
    from zbmd.tools.bench.transport.detect import TRIALS_MAX, DetectPlan, detect

    plan = DetectPlan(
        sizes=parse_sizes(arguments.sizes, least=0),
        trials=_in_range("--trials", arguments.trials, TRIALS_MAX),
    )

    return _report(arguments, lambda: new_result("detect", "shm", plan.trials, lambda: detect(plan)))


def _report(arguments: argparse.Namespace, measure: Callable[[], BenchResult]) -> int:
    """Measure and print. See the exit codes in `EXAMPLES`."""
    if arguments.plot is not None:
        check_plot(arguments.plot)

    def show() -> None:
        result = measure()
        print(msgspec.json.encode(result).decode() if arguments.json else table(result))
        if arguments.plot is not None:
            save_plot(result, arguments.plot)
        if arguments.record is not None:
            append_figures(arguments.record, figures(result))

    return _told(show)


def _told(show: Callable[[], None]) -> int:
    """Measure and print, or print what failed. Returns the exit code."""
    try:
        show()
    except PeerMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_MISSING
    except ContenderFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _in_range(option: str, value: int, most: int) -> int:
    if not 1 <= value <= most:
        raise UserError(f"{option}: expected 1 to {most:,}, got {value}")
    return value
