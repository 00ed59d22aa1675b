"""`zbmd diagnose`: why a run failed, hung or was slow: one cause, root first, and what to do."""

from __future__ import annotations

import argparse
from typing import Any, Final

import msgspec

from zbmd.tools.cli.options import add_at, add_command, add_json
from zbmd.tools.telemetry.diagnosis.findings import as_json, as_text
from zbmd.tools.telemetry.diagnosis.readers import evidence_of
from zbmd.tools.telemetry.diagnosis.rules import diagnose

FAULT_FOUND: Final = 1


def add_diagnose(commands: Any) -> None:
    """Add `zbmd diagnose`."""
    command = add_command(
        commands,
        "diagnose",
        "say why a run failed, hung or was slow, root cause first, and what to do",
        description="Read what a run left (the launcher's record, hang reports, flight records, profile, "
        "database, capture) and name one root cause, with the rank, file and line where they are known. Exit "
        "code 0: no fault; 1: there is one; 2: nothing to read.",
        examples=(
            "zbmd diagnose                          # the latest launch of this user on this host",
            "zbmd diagnose zbmd-runs/train          # the directory of a run, also while it runs",
            "zbmd diagnose logs                     # what --log-dir was given",
            "zbmd diagnose run.zlog                 # what --capture was given",
            "zbmd diagnose job.log                  # a file with what the launcher printed",
            "zbmd diagnose 4711 --json              # the launch with this process id",
            "zbmd diagnose 3fa81c                   # a job of the cluster: the records of all of its nodes",
            "zbmd diagnose --at node0:29400         # the latest job of that node's cluster",
        ),
    )
    command.add_argument(
        "target",
        nargs="?",
        metavar="JOB|RUN|LOG",
        help="directory, file, launcher's process id or script, or a job of the cluster (default: the latest "
        "launch)",
    )
    add_at(command)
    add_json(command)
    command.set_defaults(run_command=_run)


def _run(arguments: argparse.Namespace) -> int:
    diagnosis = diagnose(evidence_of(arguments.target, at=arguments.at))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(as_json(diagnosis))).decode())
    else:
        print("\n".join(as_text(diagnosis)))
    return 0 if diagnosis.root is None else FAULT_FOUND
