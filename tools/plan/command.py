"""`zbmd plan`: compute what a run costs, before it runs."""

from __future__ import annotations

import argparse

from zbmd.tools.cli.options import add_command
from zbmd.tools.plan.checkpoint import add_checkpoint
from zbmd.tools.plan.cluster import add_cluster
from zbmd.tools.plan.graph import add_graph
from zbmd.tools.plan.pipeline import add_pipeline

EXAMPLES = (
    "zbmd plan pipeline --stages 4 --microbatches 8 --schedule 1f1b",
    "zbmd plan checkpoint --accelerators 1024 --mtbf 50000h --parameters 70B --bandwidth 100GB/s --async",
    "zbmd plan cluster --parameters 70B --accelerators 64 --accelerator H100",
    "zbmd plan graph --layers 12 --width 768 --heads 12",
)


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the commands of `zbmd`."""
    plan = add_command(
        commands,
        "plan",
        "compute what a pipeline, a checkpoint interval, a cluster or a step costs, before it runs",
        examples=EXAMPLES,
    )
    kinds = plan.add_subparsers(required=True, metavar="WHAT")
    add_pipeline(kinds)
    add_checkpoint(kinds)
    add_cluster(kinds)
    add_graph(kinds)
