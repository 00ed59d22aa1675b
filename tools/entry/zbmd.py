"""`zbmd`: train, look at what runs left behind, simulate and measure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from zbmd import __version__
from zbmd.tools.cli.process import ended_by_ctrl_c
from zbmd.transport.errors import UserError

EXAMPLES = """examples:
  zbmd demo
  zbmd train --data 'texts/**/*.txt' --mesh dp=2,tp=2 --ranks 4
  zbmd generate zbmd-runs/demo --prompt 'def main(' --length 400
  zbmd ledger zbmd-runs/demo
  zbmd snapshots zbmd-runs/train
  zbmd plot zbmd-runs/demo -o demo.svg
  zbmd profile zbmd-runs/demo
  zbmd trace zbmd-runs/demo --steps 20:24
  zbmd goodput zbmd-runs/demo -o goodput.svg
  zbmd dashboard zbmd-runs/demo
  zbmd query zbmd-runs/demo "select rank, avg(wall_ns) from step_timing group by rank"
  zbmd export zbmd-runs/demo --format parquet
  zbmd export zbmd-runs/demo --format otlp --endpoint http://collector:4318
  zbmd diagnose zbmd-runs/train
  zbmd inject zbmd-runs/train --rank 1 --slow 20% --for 60s
  zbmd replay run.zlog --until hang
  zbmd flights --trace flights.json
  zbmd sim hunt --minutes 2
  zbmd plan pipeline --stages 4 --microbatches 8 --schedule 1f1b
  zbmd plan checkpoint --accelerators 1024 --mtbf 50000h --parameters 70B --bandwidth 100GB/s --async
  zbmd bench p2p --vs openmpi
"""

COMMANDS: Final = {
    "demo": "demo.command:add_demo",
    "generate": "runs.commands:add_generate",
    "ledger": "runs.commands:add_ledger",
    "checkpoint": "runs.convert:add_checkpoint",
    "plot": "runs.commands:add_plot",
    "replay": "replay.command:add_replay",
    "flights": "runs.flights:add_flights",
    "profile": "runs.profile:add_profile",
    "trace": "runs.profile:add_profile",
    "goodput": "runs.goodput_command:add_goodput",
    "plan": "plan.command:add_plan",
    "train": "train.command:add_train",
    "dashboard": "dashboard.command:add_dashboard",
    "query": "telemetry.commands:add_telemetry",
    "export": "telemetry.commands:add_telemetry",
    "diagnose": "telemetry.diagnosis.command:add_diagnose",
    "snapshots": "runs.snapshots:add_snapshots",
    "inject": "inject.command:add_inject",
    "sim": "sim.command:add_parser",
    "bench": "bench.command:add_parser",
}
"""The module of `zbmd.tools` that has a command, and what adds it there. Each imports a system of its own."""


def parser(*only: str) -> argparse.ArgumentParser:
    """The command line: all of it, or that of these commands, whose modules alone are imported."""
    made = argparse.ArgumentParser(
        prog="zbmd",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"zbmd {__version__}")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    for place in dict.fromkeys(COMMANDS[name] for name in only or COMMANDS):
        module, _, add = place.partition(":")
        getattr(import_module(f"zbmd.tools.{module}"), add)(commands)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 2: bad input; 1: the ledger does not balance, or a replay differs.

    See `sim.command` and `bench.command` for others.
    """
    words = sys.argv[1:] if argv is None else argv
    with ended_by_ctrl_c():
        arguments = parser(*(word for word in words[:1] if word in COMMANDS)).parse_args(words)
        # Here, not above: it takes as long as all that a small command imports.
        from zbmd.actors.process.log import log_to_stderr

    log_to_stderr()
    try:
        return int(arguments.run_command(arguments))
    except UserError as error:
        if "ZBMD_NODE" in os.environ:
            raise  # the launcher tells it, once for all ranks
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
